"""Pictures say what is so: parts of a model, orders of a schedule, files of elements, sources of elements."""

from itertools import pairwise, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

import shardwise as sw
from shardwise.cli import main
from shardwise.pictures.contents_picture import contents_picture
from shardwise.pictures.plan_pictures import held, mesh_picture, step_picture
from shardwise.pictures.rewrite_picture import rewrite_picture
from shardwise.pictures.svg import Picture, colour, shortened

SVG = "{http://www.w3.org/2000/svg}"


def boxes(text: str) -> list[dict[str, str]]:
    """The rectangles of a picture, which is well-formed XML."""
    return [each.attrib for each in ElementTree.fromstring(text).iter(f"{SVG}rect") if "stroke" in each.attrib]


def texts(text: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter(f"{SVG}text"))


PLANS = [
    sw.Plan(mesh=sw.Mesh(pp=pp, dp_replicate=replicas, dp_shard=shards, tp=tp), sharding=sharding)
    for pp, replicas, shards, tp in product((1, 2), (1, 2), (1, 3), (1, 2))
    for sharding in (*(sw.Sharding(stage=stage) for stage in (0, 1, 2, 3)), sw.Sharding(owners="dp_shard"))
]


CUT_FROM = {"parameters": 3, "gradients": 2, "masters": 1, "optimizer state": 1}
"""Stages of ZeRO from which data ranks hold parts."""


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.mesh} {plan.sharding.stage} {plan.sharding.owners}")
def test_what_ranks_hold_covers_the_model_once_per_replica(plan: sw.Plan) -> None:
    parts = [held(plan, rank) for rank in range(plan.mesh.size)]
    for kind in parts[0]:
        total = sum(part[kind][1] - part[kind][0] for part in parts)
        assert total == pytest.approx(len(parts) * (parts[0][kind][1] - parts[0][kind][0]))  # equal parts
        distinct = sorted({(round(start, 9), round(stop, 9)) for start, stop in (part[kind] for part in parts)})
        num_owners = len(plan.mesh.peers(0, plan.sharding.owner_axes)) if plan.sharding.stage >= CUT_FROM[kind] else 1
        assert len(distinct) == plan.mesh.pp * plan.mesh.tp * num_owners
        assert distinct[0][0] == 0
        assert distinct[-1][1] == pytest.approx(1)
        assert [stop for _, stop in distinct[:-1]] == pytest.approx([start for start, _ in distinct[1:]])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_picture_of_a_step_has_every_action_once(stage: int) -> None:
    mesh = sw.Mesh(pp=2, dp_shard=2)
    plan = sw.Plan(mesh=mesh, sharding=sw.Sharding(stage=stage), merge=sw.Merge(microbatches=3))
    text = step_picture(plan).svg()
    for kind, microbatch, pp in product(("forward", "backward"), range(3), range(2)):
        assert text.count(f"<title>{kind} of microbatch {microbatch}, stage {pp}</title>") == 1
    assert text.count("<title>reduce-scatter of this") == (6 if stage >= 2 else 0)
    assert text.count("<title>reduce-scatter of the merged") == (2 if stage == 1 else 0)
    assert text.count("<title>all-reduce of the merged") == (2 if stage == 0 else 0)
    assert boxes(text)


def test_the_picture_of_a_rewrite_follows_each_element() -> None:
    shapes = {"q": (4, 6), "k": (2, 6)}
    checked = sw.Rewrite("q, k -> qk, axis=0\nqk^T -> out").check(shapes)
    values = {name: torch.arange(4 * 6).view(4, 6)[: shape[0]] for name, shape in shapes.items()}
    expected = torch.cat([values["q"], 100 + values["k"]]).T  # which source, and where in it
    text = rewrite_picture(checked).svg()
    for source in ("q", "k"):
        assert f"{source} {list(shapes[source])}" in text
    order = ["k", "q"]
    wanted = [
        colour(order.index("k" if value >= 100 else "q"), (value % 100) / (11 if value >= 100 else 23))
        for value in expected.flatten().tolist()
    ]
    # The cells of the output begin at its left edge, row by row; equal neighbours are one box.
    found: list[str] = []
    for box in boxes(text):
        if float(box["x"]) >= 400 and box["stroke"] == "none":
            found += [box["fill"]] * round(float(box["width"]) / 40)
    assert found == wanted


def test_the_picture_of_a_save_shows_the_file_of_each_element(tmp_path: Path) -> None:
    def save(channel: sw.Channel) -> None:
        rows = sw.Piece(name="w", dtype="float32", global_shape=(4, 3), offset=(2 * channel.rank, 0), shape=(2, 3))
        sw.save(tmp_path, {rows: torch.ones(2, 3)}, channel=channel)

    sw.simulate(2, save)
    text = contents_picture(sw.checkpoint.open(tmp_path).contents).svg()
    rows = [box for box in boxes(text) if box["stroke"] == "none" and float(box["height"]) == 24]
    assert [box["fill"] for box in rows] == [colour(0)] * 2 + [colour(1)] * 2


def test_the_command_draws_plans_configurations_and_checkpoints(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(sw.Plan(mesh=sw.Mesh(pp=2, tp=2)).text())
    (tmp_path / "fuse.rewrite").write_text("a, b -> ab, axis=0\n")
    sw.save(tmp_path / "save", {"a": torch.ones(2, 3), "b": torch.zeros(1, 3)})
    runner = CliRunner()
    for words, shown in [
        ([str(plan)], "the model&#x27;s parts on each rank"),
        (["examples/tiny.toml", "--nproc", "2"], "buckets, 2 owners"),
        (["examples/hybrid.toml"], "rank 7"),
        ([str(tmp_path / "save")], "a [2, 3]"),
        ([str(tmp_path / "save"), "--rewrite", str(tmp_path / "fuse.rewrite")], "ab [3, 3]"),
    ]:
        result = runner.invoke(main, ["draw", *words, "--out", str(tmp_path / "out.svg")])
        assert result.exit_code == 0, result.output
        text = (tmp_path / "out.svg").read_text()
        assert shown in text
        assert boxes(text)


def test_pictures_of_many_things_have_room_for_all_of_them() -> None:
    """Narrow bars keep a width, tall pictures their rows, and no two files have one colour."""
    mesh = sw.Mesh(pp=40, dp_shard=2)
    plan = sw.Plan(mesh=mesh, merge=sw.Merge(microbatches=256))
    text = step_picture(plan).svg()
    assert min(float(box["width"]) for box in boxes(text)) >= 0
    assert "and 8 more ranks along pp" in text
    sources = {f"e{number}": (2, 3) for number in range(130)}
    tall = boxes(rewrite_picture(sw.Rewrite("e*-> all, stack=0").check(sources)).svg())
    rows = sorted({float(box["y"]) for box in tall if box["stroke"] != "none"})
    assert len(rows) == 130
    assert {round(after - before, 2) for before, after in pairwise(rows)} == {128.0}
    assert len({colour(number) for number in range(100)}) == 100


@pytest.mark.parametrize(
    "words", ["short", "layers.0." + "long" * 40 + ".weight", "\N{CJK UNIFIED IDEOGRAPH-91CD}" * 50, ""]
)
@pytest.mark.parametrize("width", [0, 5, 60, 200])
def test_a_label_keeps_its_width_and_both_ends(words: str, width: int) -> None:
    label = shortened(words, width, size=10)
    letters = sum(10 if letter > "\xff" else 6 for letter in label)
    assert label == words or letters <= max(width, 3 * 6)
    head, dots, tail = label.partition("...")
    assert not dots or (words.startswith(head) and words.endswith(tail) and abs(len(head) - len(tail)) <= 1)


@pytest.mark.parametrize(
    ("mesh", "labels"),
    [
        (sw.Mesh(dp_replicate=3, tp=2), ["rank 5: dp_replicate 2, tp 1"]),
        (sw.Mesh(dp_replicate=16, dp_shard=16), ["rank 31: 1, 15", "rank: dp_replicate, dp_shard"]),
        (sw.Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2), ["rank 5: 0, 1, 0, 1", "rank: pp, dp_replicate"]),
    ],
)
def test_labels_of_ranks_do_not_overlap(mesh: sw.Mesh, labels: list[str]) -> None:
    text = mesh_picture(sw.Plan(mesh=mesh)).svg()
    places = [(float(each.attrib["y"]), float(each.attrib["x"]), each.text or "") for each in texts(text)]
    for (y, x, words), (next_y, next_x, _) in pairwise(sorted(places)):
        assert y != next_y or x + 7 * len(words) <= next_x, words
    for label in labels:
        assert label in text


@pytest.mark.parametrize(("offload", "on_host"), [(None, []), ("state", ["masters", "optimizer state"])])
def test_the_mesh_says_what_is_on_the_host(offload: Any, on_host: list[str]) -> None:
    text = mesh_picture(sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(offload=offload))).svg()
    assert [each for each in ("masters", "optimizer state", "parameters") if f"{each} (host)" in text] == on_host


@pytest.mark.parametrize("name", ["a\x01\x1b", "half \ud800", '<b> & "c"', "\N{SNOWMAN} \u202e"])
def test_any_name_is_well_formed_xml(name: str) -> None:
    picture = Picture(name)
    picture.text(0, 0, name)
    picture.box(0, 0, 1, 1, colour(0), title=name)
    ElementTree.fromstring(picture.svg().encode())


def test_a_rewrite_of_squares_copies_and_drops_shows_what_changed() -> None:
    shapes = {"square": (4, 4), "gone": (2,), "same": (3, 3), "rows": (0, 3), "point": ()}
    checked = sw.Rewrite("square^T -> turned\ngone -> _\nsame -> renamed").check(shapes)
    text = rewrite_picture(checked).svg()
    assert "point []" in rewrite_picture(checked, ["point"]).svg()
    assert "turned [4, 4]" in text
    assert "renamed" not in text
    assert "dropped: gone" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing.toml", "nothing.toml"),
        ("{save} --tensor c", "has no tensor 'c'; it has a"),
        ("{plan} --tensor c", "go with a checkpoint"),
        ("{broken}", "mesh.up: unknown setting"),
        ("{empty}", "has no settings; write a plan there"),
        ("{plan} --set mesh.pp=1", "is a plan"),
        ("{plan} --nproc 3", "is a plan"),
        ("{save} --set x.y=1", "is no configuration"),
        ("{save} --parameter a=3", "belong to a rewrite"),
        ("{noise}", "is not TOML"),
        ("{plan} --out {plan}/x.svg", "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_and_options_that_would_do_nothing_are_refused(
    tmp_path: Path, words: str, message: str
) -> None:
    files = {"plan": sw.Plan().text(), "broken": "mesh.up = 2\n", "empty": "# nothing yet\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "noise.toml").write_bytes(b"\xff\xfe")
    sw.save(tmp_path / "save", {"a": torch.ones(2, 3)})
    names = {"save": tmp_path / "save"} | {name: tmp_path / f"{name}.toml" for name in (*files, "noise")}
    result = CliRunner().invoke(main, ["draw", "--out", str(tmp_path / "x.svg"), *words.format(**names).split()])
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert not (tmp_path / "x.svg").exists()


def test_what_is_drawn_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder hides a shipped configuration, dots of a name stay, and dotted keys are a configuration."""
    monkeypatch.chdir(tmp_path)

    def said(name: str) -> str:
        return CliRunner().invoke(main, ["draw", name]).output

    (tmp_path / "demo").mkdir()
    assert "This folder hides the configuration 'demo' that comes with shardwise" in said("demo")
    for name in ("demo", "llama-3.1-8b"):
        sw.save(tmp_path / name, {"a": torch.ones(2, 3)})
        assert said(name) == f"drawn in {name}.svg\n"
        assert "a [2, 3]" in (tmp_path / f"{name}.svg").read_text()
    (tmp_path / "run.toml").write_text('model.factory = "torch.nn:Linear"\ntrain.steps = 2\ntrain.step = 3\n')
    assert "did you mean train.steps" in said("run.toml")
