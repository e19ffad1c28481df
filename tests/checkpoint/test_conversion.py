"""`convert`: with all that a save says, whole or not at all, in bounded memory; and what it refuses."""

import gc
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors
import safetensors.torch
import torch

from shardwise import checkpoint
from shardwise.checkpoint import convert, diff, export_hf, import_hf, preview
from shardwise.errors import CheckpointError
from shardwise.rewrite import Rewrite
from tests.checkpoint.cut_tensors import save_sharded, tensors_of
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import contents, same, whole_state
from tests.costs import calls_in
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

To = Literal["pieces", "whole", "hf", "dcp"]


def pieces_of(path: Path) -> dict[str, list[str]]:
    found = checkpoint.open(path).tensors
    return {name: sorted(str(each.piece) for each in tensor.pieces) for name, tensor in found.items()}


def test_pieces_stay_in_as_many_files_with_boxes_runs_and_checksums(tmp_path: Path) -> None:
    source = save_sharded(tmp_path / "a", whole_state(1))
    convert(source, tmp_path / "b", to="pieces")
    old, new = checkpoint.open(source).contents, checkpoint.open(tmp_path / "b").contents
    assert len(new.file_sizes) == len(old.file_sizes) == 3
    assert list(new.tensors) == list(old.tensors)
    for name, tensor in old.tensors.items():
        again = {each.piece: each.checksums for each in new.tensors[name].pieces}
        assert again == {each.piece: each.checksums for each in tensor.pieces}
    assert {"rows[2:4, 0:5]", "rows[4:7, 0:5]"} < set(pieces_of(source)["rows"])
    assert all("run" in each for each in pieces_of(source)["flat"])
    found = diff(source, tmp_path / "b")
    assert (found.num_equal, found.num_equal_by_checksum) == (5, 4)


def test_a_conversion_joins_the_saves_of_its_folder(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", whole_state(1), step=1)
    checkpoint.save(tmp_path / "b", whole_state(2), step=2)
    before = contents(tmp_path / "a/save-00000001")
    report = convert(tmp_path / "b", tmp_path / "a")
    assert report.destination == str(tmp_path / "a/save-00000002")
    assert contents(tmp_path / "a/save-00000001") == before
    assert same(tensors_of(tmp_path / "a"), whole_state(2))
    convert(tmp_path / "a", tmp_path / "a", to="pieces", step=1)
    assert same(tensors_of(tmp_path / "a"), whole_state(1))


def test_nothing_at_all_becomes_a_save_of_nothing(tmp_path: Path) -> None:
    for at, state in enumerate(({}, {"none": torch.zeros(0)})):
        checkpoint.save(tmp_path / f"{at}", state, extra={"x": 1})
        convert(tmp_path / f"{at}", tmp_path / f"{at} again")
        assert diff(tmp_path / f"{at}", tmp_path / f"{at} again").equal


def test_shards_are_as_large_as_asked_and_their_index_holds_every_tensor_once(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(10 + number) for number in range(9)} | {"large": torch.randn(500)}
    checkpoint.save(tmp_path / "a", {**state, "tied": state["w3"]})
    report = convert(tmp_path / "a", tmp_path / "hf", to="hf", max_shard_bytes=150)
    assert report.aliases == {"tied": "w3"}
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(each.nbytes for each in state.values())}
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    shards = {name: safetensors.torch.load_file(tmp_path / "hf" / name) for name in names}
    assert index["weight_map"] == {key: name for name, shard in shards.items() for key in shard}
    assert sum(map(len, shards.values())) == len(state)
    assert same({key: each for shard in shards.values() for key, each in shard.items()}, state)
    assert all(sum(each.nbytes for each in shard.values()) <= 150 or [*shard] == ["large"] for shard in shards.values())


def test_optimizers_are_left_out_of_hugging_face_files_and_counted(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(3).bfloat16(),
        "optimizer/w/master": torch.ones(3),
        "optimizer/w/exp_avg": torch.ones(3),
        "optimizer.bias": torch.ones(2),
    }
    checkpoint.save(tmp_path / "a", state)
    report = convert(tmp_path / "a", tmp_path / "hf", to="hf")
    assert (report.left_out, report.num_masters) == (("optimizer/w/master", "optimizer/w/exp_avg"), 1)
    found = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert same(found, {name: state[name] for name in ("w", "optimizer.bias")})


def flip_last(source: Path) -> Path:
    file = sorted((source / "save-00000001").glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def before(
    state: dict[str, torch.Tensor], place: str = "b", *, damage: bool = False, filled: bool = False, **arguments: Any
) -> Any:
    """A conversion of a state to a place beside some that hold something; which stay as they are."""

    def call(folder: Path) -> object:
        checkpoint.save(folder / "a", state, step=3)
        (folder / "full").mkdir()
        (folder / "full/x").write_text("precious")
        (folder / "hf").mkdir()
        safetensors.torch.save_file({"w": torch.ones(1)}, folder / "hf/model.safetensors")
        if damage:
            flip_last(folder / "a")
        kept = contents(folder)
        if filled:
            kept |= {f"{place}/y": b""}

            def fill(done: int, total: int) -> None:
                (folder / place).mkdir(exist_ok=True)
                (folder / place / "y").touch()

            arguments["progress"] = fill
        try:
            return convert(folder / "a", place if "://" in place or not place else folder / place, **arguments)
        except CheckpointError as error:  # names of files are drawn
            raise CheckpointError(re.sub(r"[0-9a-f]{8}-rank", "ID-rank", str(error))) from error
        finally:
            assert contents(folder) == kept

    return call


W = {"w": torch.ones(4)}
A_TO_B = Rewrite("w -> b")
FOREIGN = ("hf", "dcp", "torchtitan", "deepspeed-universal")


def calls_with(rewrite: Any) -> dict[str, Any]:
    """All calls that take a rewrite."""
    return {
        "convert": lambda folder: convert(folder, folder / "b", rewrite=rewrite),
        "preview": lambda folder: preview(folder, rewrite=rewrite),
        "import_hf": lambda folder: import_hf(folder, folder / "b", rewrite),
        "export_hf": lambda folder: export_hf(folder, folder / "b", rewrite),
        "save": lambda folder: checkpoint.save(folder / "b", W, rewrite=rewrite),
        "load": lambda folder: checkpoint.load(folder, dict(W), rewrite=rewrite),
        "full": lambda folder: list(checkpoint.full(dict(W), rewrite=rewrite)),
    }


def previewed(place: str, **arguments: Any) -> Any:
    def call(folder: Path) -> object:
        checkpoint.save(folder / "a", W)
        (folder / "full").mkdir()
        (folder / "full/x").write_text("precious")
        return preview(folder / "a", folder / place, **{"rewrite": A_TO_B, **arguments})

    return call


REFUSED = Refusals(
    "checkpoint.conversion",
    {
        **{f"{to}: a folder that holds something": before(W, "full", to=to) for to in FOREIGN},
        **{f"{to}: damage": before(W, to=to, damage=True) for to in (*FOREIGN, "whole", "pieces")},
        **{f"{to}: nothing of a model": before({"optimizer/w/exp_avg": torch.ones(3)}, to=to) for to in FOREIGN},
        **{
            f"{to}: state of no parameter": before({**W, "optimizer/0/exp_avg": torch.ones(2)}, to=to)
            for to in FOREIGN[1:]
        },
        "a file": before(W, "full/x", to="hf"),
        "a file in the place of saves": before(W, "full/x"),
        "an empty path": before(W, "", to="hf"),
        "the folder of one save": before(W, "a/save-00000001"),
        "a folder of another format": before(W, "hf"),
        "an unknown form": before(W, to="gguf"),
        "a folder that is filled meanwhile": before(W, "new", to="hf", filled=True),
        "names and dtypes that files of Hugging Face do not have": before(
            {"__metadata__": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}, to="hf"
        ),
        **{
            f"{name!r}, which no folder can have": before({name: torch.ones(2), **W}, to="deepspeed-universal")
            for name in ("../../x", "a//b", "/abs", "nul\0")
        },
        "two that would have one name": before(
            {name: torch.ones(2) for name in ("w", "optimizer/w/exp_avg", "step", "optimizer.state.w.exp_avg")},
            to="torchtitan",
        ),
        "a dtype of a save": before(W, dtype="bfloat16"),
        "a dtype that is no float": before(W, to="hf", dtype="int8"),
        "weights of no kind": before(W, weights="mean"),
        "no averages": before(W, weights="average"),
        "a parameter that nobody gave": before(W, to="hf", rewrite=Rewrite("w -> b, reshape='[{heads},-1]'")),
        **{f"max_shard_bytes={size!r}": before(W, max_shard_bytes=size) for size in ("x", None, 1.5, True, 0)},
        "certify as text": before(W, certify="yes"),
        "a step that is a flag": before(W, step=True),
        "an original without a certificate": before(W, original="x"),
        "an original that is not there": before(W, certify=True, original="/nothing/there"),
        "a configuration that is a number": lambda folder: export_hf(folder, folder / "b", config=5),  # type: ignore[arg-type]
        **{
            f"{type(rewrite).__name__} as the rewrite of {name}": call
            for rewrite in ("a -> b", 5, ["a -> b"])
            for name, call in calls_with(rewrite).items()
        },
        **{f"a preview to {to!r}": previewed("b", to=to) for to in ("HF", None, 5)},
        "a preview without a rewrite": previewed("b", rewrite=None),
        "a preview to a folder that holds something": previewed("full", to="hf"),
        "a preview to a file": previewed("full/x"),
        "a preview to the folder of one save": previewed("a/save-00000001"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_and_leaves_all_as_it_was(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("stops", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("certify", [False, True])
def test_a_conversion_that_is_stopped_leaves_nothing(tmp_path: Path, stops: type[BaseException], certify: bool) -> None:
    """At its first window, or at the last of the certificate."""
    checkpoint.save(tmp_path / "a", W)

    def stopped(done: int, total: int) -> None:
        if done == total or not certify:
            raise stops

    for destination in (tmp_path / "new/b", tmp_path / "a"):
        with pytest.raises(stops):
            convert(tmp_path / "a", destination, rewrite=A_TO_B, certify=certify, progress=stopped)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["save-00000001"]


def test_progress_comes_to_all_bytes(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"w": torch.ones(40), "optimizer/w/m": torch.ones(2)})
    to: To
    for to, total in (("whole", 168), ("hf", 160)):
        seen: list[tuple[int, int]] = []

        def note(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        with small_limits(64):
            convert(tmp_path / "a", tmp_path / to, to=to, progress=note)
        assert seen == [(min(done, total), total) for done in range(64, total + 64, 64)]


@pytest.mark.parametrize(("to", "most"), [("whole", 830), ("dcp", 1200)])
def test_very_many_tensors_cost_few_calls_each_and_no_looks_at_all_objects(
    tmp_path: Path, to: Literal["whole", "dcp"], most: int
) -> None:
    counts = []
    for number in (200, 600):
        torch.save({f"layers.{each}.w": torch.full((4,), float(each)) for each in range(number)}, tmp_path / "from.pt")
        convert(tmp_path / "from.pt", tmp_path / f"warm {number}", to=to)
        counts.append(calls_in(partial(convert, tmp_path / "from.pt", tmp_path / f"{number}", to=to)))
    assert (counts[1] - counts[0]) / 400 <= most
    looks = gc.get_stats()[2]["collections"]
    convert(tmp_path / "from.pt", tmp_path / "once more", to=to)
    assert gc.get_stats()[2]["collections"] == looks
    assert gc.get_threshold()[2] < 1000
