"""Rewrites of stored tensors: by every way, from any pieces into any pieces, equal to plain torch, with exact reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import convert, diff
from shardwise.checkpoint.arrangement import FileLayout
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import Checked, Fragment, Rewrite
from shardwise.space import Box, Piece
from tests.checkpoint.cut_tensors import Cut, Tensors, save_pieces, tensors_of
from tests.checkpoint.rewritten_tensors import CASES, CUTS, Case, blank, load_all, same_pieces, shares_of
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import contents, rubbish, same, same_tensor
from tests.engine.refusals import same_error_everywhere
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOSSY = ("cast", "rounded twice", "copies", "dropped", "padded", "padded and cropped")


def loaded(name: str, case: Case, source: Cut, target: Cut, path: Path, *, verify: bool) -> None:
    """From the pieces of two ranks into those of three; without checksums what depends on the sources is read."""
    save_pieces(path, shares_of(case.values(), source, 2))
    expected = shares_of(case.plain(case.values()), target, 3)
    got = blank(expected)
    reports = [each.report for each in load_all(path, got, rewrite=Rewrite(case.text), verify=verify)]
    assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))
    assert {report.missing + report.unexpected for report in reports} == {()}
    assert {report.dropped for report in reports} == {("a",) if name == "dropped" else ()}
    if not verify:
        itemsize = getattr(torch, case.dtype).itemsize
        zeros, ones = ({n: torch.full_like(t, to) for n, t in case.values().items()} for to in (0, 1))
        stored = {n: t != case.plain(zeros)[n] for n, t in case.plain(ones).items()}  # padding is not read
        needed = [itemsize * sum(int(mask.sum()) for mask in share.values()) for share in shares_of(stored, target, 3)]
        read = [report.read_bytes for report in reports]
        assert all(mine <= own for mine, own in zip(read, needed, strict=True)) if name == "copies" else read == needed


def saved(name: str, case: Case, source: Cut, target: Cut, path: Path, *, files: FileLayout) -> None:
    """And back through the inverse."""
    save_pieces(path, shares_of(case.values(), source, 3), rewrite=Rewrite(case.text), layout=files)
    assert same(tensors_of(path), plain(case))
    assert checkpoint.verify(path).good
    if name not in LOSSY:
        expected = shares_of(case.values(), target, 2)
        got = blank(expected)
        load_all(path, got, rewrite=Rewrite(case.text).inverse())
        assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))


def made_full(name: str, case: Case, source: Cut, target: Cut, path: Path, *, to: Any) -> None:
    shares = shares_of(case.values(), source, 3)

    def run(channel: Channel) -> dict[str, torch.Tensor]:
        return dict(sw.full(shares[channel.rank], Rewrite(case.text), to=to, channel=channel))

    for rank, full in enumerate(sw.simulate(3, run)):
        assert same(full, plain(case) if to in ("all", rank) else {})


def converted(
    name: str, case: Case, source: Cut, target: Cut, path: Path, *, to: Any, window_bytes: int | None = None
) -> None:
    save_pieces(path / "a", shares_of(case.values(), source, 3))
    with small_limits(window_bytes):
        convert(path / "a", path / "b", to=to, rewrite=Rewrite(case.text))
    assert same(tensors_of(path / "b"), plain(case))


def streamed(name: str, case: Case, source: Cut, target: Cut, path: Path) -> None:
    """From the pieces of two ranks into those of two others."""
    held, expected = shares_of(case.values(), source, 2), shares_of(case.plain(case.values()), target, 2)
    got = blank(expected)

    def run(channel: Channel) -> None:
        if channel.rank < 2:
            sw.stream(held[channel.rank], None, channel=channel, rewrite=Rewrite(case.text))
        else:
            sw.stream(None, got[channel.rank - 2], channel=channel)

    sw.simulate(4, run)
    assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))


def plain(case: Case) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in case.plain(case.values()).items()}


WAYS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "load": (loaded, {"verify": True}),
    "load exactly": (loaded, {"verify": False}),
    "save pieces": (saved, {"files": "pieces"}),
    "save whole": (saved, {"files": "whole"}),
    "full": (made_full, {"to": "all"}),
    "full on one": (made_full, {"to": 2}),
    "stream": (streamed, {}),
    "convert to pieces": (converted, {"to": "pieces"}),
    "convert to hf in small windows": (converted, {"to": "hf", "window_bytes": 100}),
    "convert to dcp": (converted, {"to": "dcp"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_every_form_by_every_way_is_what_plain_torch_makes(way: str, name: str, tmp_path: Path) -> None:
    """Each way has all pairs of cuts, in different cases."""
    function, options = WAYS[way]
    source, target = CUTS[(list(CASES).index(name) + list(WAYS).index(way)) % len(CUTS)]
    function(name, CASES[name], source, target, tmp_path, **options)


def test_what_is_only_renamed_or_cast_keeps_its_pieces_and_files(tmp_path: Path) -> None:
    sizes = {"old": 6, "kept": 9, "half": 7, "a": 8, "b": 4, "turned": 5}
    whole = {name: torch.randn(rows, 3) for name, rows in sizes.items()}
    whole["half"] = whole["half"].half()
    save_pieces(tmp_path / "a", shares_of(whole, "rows", 3))
    text = "old -> new; half -> half, dtype='float32'; a, b -> ab, axis=0; turned^T -> turned"
    convert(tmp_path / "a", tmp_path / "b", to="pieces", rewrite=Rewrite(text))
    old, new = checkpoint.open(tmp_path / "a").tensors, checkpoint.open(tmp_path / "b").tensors

    def places(tensors: Any, name: str) -> list[tuple[str, str]]:
        return sorted((each.file[-20:], str(each.piece).partition("[")[2]) for each in tensors[name].pieces)

    for one, other in (("old", "new"), ("kept", "kept"), ("half", "half")):
        assert len(places(new, other)) == 3
        assert places(new, other) == places(old, one)
    assert all(len(new[name].pieces) == 1 and new[name].pieces[0].piece.whole for name in ("ab", "turned"))


# What a save knows of the rewrite by which it was made


def test_the_inverse_finds_in_the_save_what_its_text_does_not_say(tmp_path: Path) -> None:
    text = (
        "x, y -> xy, axis=0; half -> half, dtype='float32'; e.*.w -> e, stack=0, gaps=1; flat -> flat, reshape='[2,-1]'"
    )
    before = {"x": torch.randn(3, 2), "y": torch.randn(4, 2), "half": torch.randn(3).half(), "flat": torch.randn(3, 4)}
    before |= {f"e.{number}.w": torch.randn(2) for number in (0, 3)}
    checkpoint.save(tmp_path / "a", before)
    convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text))
    record = checkpoint.open(tmp_path / "b").contents.settings["rewrite"]
    assert (record["text"], record["sources"]["half"]) == (str(Rewrite(text)), [[3], "float16"])
    for name, inverse in (
        ("c", Rewrite(text).inverse()),
        ("d", checkpoint.recorded_rewrite(tmp_path / "b").inverse()),
    ):
        convert(tmp_path / "b", tmp_path / name, rewrite=inverse)
        assert same(tensors_of(tmp_path / name), before)
    part = {"y": torch.zeros(4, 2)}  # where to split, though the target has but one of the tensors
    checkpoint.load(tmp_path / "b", part, rewrite=Rewrite(text).inverse(), strict=False)
    assert torch.equal(part["y"], before["y"])


def test_ties_stay_ties(tmp_path: Path) -> None:
    embed = torch.randn(4, 3)
    checkpoint.save(tmp_path / "a", {"embed": embed, "head": embed, "w": torch.ones(2)})
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("embed -> tokens; head -> out"))
    assert report.aliases == checkpoint.open(tmp_path / "b").contents.aliases == {"out": "tokens"}
    convert(tmp_path / "b", tmp_path / "c", rewrite=checkpoint.recorded_rewrite(tmp_path / "b").inverse(), certify=True)
    assert diff(tmp_path / "a", tmp_path / "c").equal
    convert(tmp_path / "a", tmp_path / "d", rewrite=Rewrite("head^T -> head"))  # no longer the same tensor
    assert same(tensors_of(tmp_path / "d"), {"embed": embed, "head": embed.t(), "w": torch.ones(2)})


# What may be missing, added, or read by one rank only


def saved_ab(path: Path) -> dict[str, torch.Tensor]:
    whole = {"a": torch.randn(4, 6), "b": torch.randn(2, 6), "c": torch.randn(3)}
    save_pieces(path, shares_of(whole, "rows", 2))
    return whole


def test_with_leave_names_may_be_missing_and_dtypes_other(tmp_path: Path) -> None:
    whole = saved_ab(tmp_path)
    target = {"ab": torch.zeros(6, 6, dtype=torch.float64), "new": torch.full((3,), 7.0)}
    rewrite = Rewrite("a, b -> ab, axis=0, dtype='float16'")
    report = checkpoint.load(tmp_path, target, rewrite=rewrite, strict=False, cast=True).report
    assert torch.equal(target["ab"], torch.cat([whole["a"], whole["b"]]).half().double())
    assert torch.equal(target["new"], torch.full((3,), 7.0))
    assert report.missing == ("new: missing; the rewritten checkpoint has no tensor for it",)
    assert report.unexpected == ("c: unexpected; the target has no place for it",)
    assert report.casts == ("ab: dtype float64 in the target, float16 in the rewritten checkpoint",)


def test_each_rank_wants_what_it_wants_and_a_source_may_be_wanted_as_well(tmp_path: Path) -> None:
    whole = saved_ab(tmp_path)
    states: list[Any] = [{}, {"ab": torch.zeros(6, 6)}, {"c": torch.zeros(3), "a": torch.zeros(4, 6)}]
    load_all(tmp_path, states, rewrite=Rewrite("a, b -> ab, axis=0"), strict=False)
    assert torch.equal(states[1]["ab"], torch.cat([whole["a"], whole["b"]]))
    assert same(states[2], {"c": whole["c"], "a": whole["a"]})
    stacked = torch.randn(3, 4)
    checkpoint.save(tmp_path / "stacked", {"stacked": stacked})
    named = [{f"e.{number}": torch.zeros(4)} for number in (0, 1, 7)]
    load_all(tmp_path / "stacked", named, rewrite=Rewrite("stacked -> e.*, stack=0"))
    assert all(torch.equal(row, *each.values()) for row, each in zip(stacked, named, strict=True))


@pytest.mark.parametrize("verify", [True, False])
def test_storage_that_one_rank_sees_is_read_by_it_for_all(verify: bool, tmp_path: Path) -> None:
    whole = saved_ab(tmp_path / "1")
    shares = shares_of({"ab": torch.cat([whole["a"], whole["b"]]).T.contiguous(), "c": whole["c"]}, "rows", 3)
    states = blank(shares)
    rewrite = Rewrite("a, b -> ab, axis=0, permute='[]'")

    def run(channel: Channel) -> int:
        path, state = tmp_path / str(channel.rank), states[channel.rank]
        return sw.load(path, state, channel=channel, rewrite=rewrite, shared=False, verify=verify).report.read_bytes

    read = sw.simulate(3, run)
    assert all(same_pieces(*pair) for pair in zip(states, shares, strict=True))
    assert [each > 0 for each in read] == [False, True, False]


def test_replicas_are_written_once_and_ranks_may_hold_nothing(tmp_path: Path) -> None:
    whole = {"a": torch.randn(600, 700), "b": torch.randn(3)}
    states: list[Any] = [whole, {name: each.clone() for name, each in whole.items()}, {}]

    def run(channel: Channel) -> int:
        return sw.save(tmp_path, states[channel.rank], rewrite=Rewrite("a^T -> c; b -> d"), channel=channel).num_bytes

    assert sw.simulate(3, run) == [sum(tensor.nbytes for tensor in whole.values())] * 3
    assert same(tensors_of(tmp_path), {"c": whole["a"].T.contiguous(), "d": whole["b"]})


def test_ranks_that_want_the_same_ask_a_rewrite_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2)})
    asked: list[str] = []
    resolve = Checked.resolve

    def note(checked: Checked, name: str, box: Box) -> list[Fragment]:
        asked.append(name)
        return resolve(checked, name, box)

    monkeypatch.setattr(Checked, "resolve", note)

    def number_of_questions(size: int) -> int:
        asked.clear()

        def run(channel: Channel) -> None:
            target = {"c": torch.zeros(4, 3), "b": torch.zeros(2)}
            sw.load(tmp_path, target, rewrite=Rewrite("a^T -> c"), channel=channel)
            assert torch.equal(target["c"].T, torch.arange(12.0).view(3, 4))

        sw.simulate(size, run)
        return len(asked)

    assert number_of_questions(4) == 4 * number_of_questions(1), "each rank asks for itself, and not for its replicas"


def test_a_crop_comes_back_only_where_the_text_says_what_the_elements_were(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(12.0).view(4, 3), "b": torch.tensor([1.0, 2.0, -1.0, -1.0])}
    sw.save(tmp_path / "save", tensors)
    text = "w -> w, crop='[2,-1]'{}; b -> b, crop='[2]', fill='-1'"
    with pytest.raises(RewriteError, match=r"crops w from \[4, 3\] to \[2, 3\]: no fill= says"):
        sw.Rewrite(text.format("")).inverse(tensors)
    for fill in ("", ", fill=9"):
        report = sw.checkpoint.convert(
            tmp_path / "save", tmp_path / f"cropped{fill}", rewrite=sw.Rewrite(text.format(fill)), certify=True
        )
        assert report.certificate is not None
        assert {each.name: each.why for each in report.certificate.tensors} == {
            "w": "6 of 12 elements are cropped", "b": ""
        }  # fmt: skip
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(4)}
    sw.load(tmp_path / "cropped, fill=9", state, rewrite=sw.Rewrite(text.format(", fill=9")).inverse())
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5], [9, 9, 9], [9, 9, 9]]
    assert same_tensor(state["b"], tensors["b"])


@pytest.mark.parametrize("how", ["rows", "columns", "runs"])
def test_new_rows_of_a_larger_target_keep_their_values(tmp_path: Path, how: Cut) -> None:
    """Moments of new rows are zeros. A first rank that has the last rows has nothing to read."""
    names = ("w", "optimizer/w/exp_avg")
    sw.save(tmp_path, {name: torch.randn(6, 4) for name in names})
    saved = tensors_of(tmp_path)
    expected = {"optimizer/w/master": torch.randn(9, 4), "optimizer/w/exp_avg": torch.zeros(9, 4)}
    target = {name: torch.ones(9, 4) if "avg" in name else each.clone() for name, each in expected.items()}
    for each, name in zip(expected.values(), names, strict=True):
        each[:6] = saved[name]
    got = shares_of(target, how, 3)[::-1]
    load_all(tmp_path, got, rewrite=sw.Rewrite("w -> w, pad='[9,-1]', fill='kept'"))
    assert all(same_pieces(*pair) for pair in zip(got, shares_of(expected, how, 3)[::-1], strict=True))


# Bytes


@pytest.mark.parametrize(("size", "verify"), [(1, True), (2, False)])
def test_large_tensors_are_read_once_in_rounds_though_they_come_in_strips(
    size: int, verify: bool, tmp_path: Path
) -> None:
    whole = {"a": torch.arange(3 << 20, dtype=torch.float32).view(2048, 1536), "b": torch.randn(2048, 512)}
    save_pieces(tmp_path, shares_of(whole, "columns", 2))
    expected = shares_of({"ab": torch.cat([whole["a"], whole["b"]], 1).T.contiguous()}, "rows", size)
    got = blank(expected)
    rewrite = Rewrite("a, b -> ab, axis=1, permute='[1,0]'")
    reports = [each.report for each in load_all(tmp_path, got, rewrite=rewrite, verify=verify)]
    assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))
    total = sum(each.nbytes for each in whole.values())
    assert total <= sum(report.read_bytes for report in reports) <= 1.05 * total


def test_damage_in_what_is_dropped_does_no_harm(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(1000), "bad": torch.ones(1000)}, layout="whole")
    damage(tmp_path / "a", checkpoint.open(tmp_path / "a").tensors["bad"].pieces[0].start)
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("bad -> _"))
    assert report.read_bytes == 4000
    assert same(tensors_of(tmp_path / "b"), {"x": torch.ones(1000)})


# What is refused, by all ranks alike


def damage(folder: Path, at: int = -3) -> Path:
    file = max(folder.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    return folder


def load(folder: Path, text: str, wanted: Tensors, how: Cut = "rows", **more: Any) -> None:
    """By three ranks, whose tensors stay as they were."""
    if not list(folder.iterdir()):
        saved_ab(folder)
    states = blank(shares_of(wanted, how, 3))

    def run(channel: Channel) -> None:
        sw.load(folder, states[channel.rank], rewrite=Rewrite(text), channel=channel, **more)

    error = same_error_everywhere(3, run)
    assert all((tensor == 77).all() for state in states for tensor in state.values())
    raise error


AB = {"a": torch.ones(2, 3), "b": torch.ones(2, 4)}


def save(folder: Path, text: str) -> None:
    error = same_error_everywhere(2, lambda channel: sw.save(folder, AB, rewrite=Rewrite(text), channel=channel))
    assert rubbish(folder) == []
    raise error


def full(**options: Any) -> None:
    raise same_error_everywhere(2, lambda channel: list(sw.full({"a": torch.ones(1)}, channel=channel, **options)))


def differing(folder: Path, call: Callable[[Channel, Any], object]) -> None:
    checkpoint.save(folder, {"a": torch.ones(1)})
    raise same_error_everywhere(2, lambda channel: call(channel, Rewrite("a -> x") if channel.rank else None))


def converts(folder: Path, text: str | Rewrite, source: Path, **options: Any) -> None:
    before = contents(folder)
    try:
        convert(source, folder / "out", rewrite=text if isinstance(text, Rewrite) else Rewrite(text), **options)
    finally:
        assert contents(folder) == before, "nothing is left"


def stored(folder: Path, tensors: Tensors) -> Path:
    checkpoint.save(folder / "a", dict(tensors))
    return folder / "a"


def incomplete(folder: Path) -> None:
    """A save as one of ours would be that had lost a piece: it is made without the check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.checkpoint.arrangement.check_cover", lambda pieces: [])
        piece = Piece(name="a", dtype="float32", global_shape=(4, 2), shape=(3, 2))
        checkpoint.save(folder, {piece: torch.ones(3, 2)})
    load(folder, "a^T -> b", {"b": torch.zeros(2, 4)})


def half_of(channel: Channel) -> dict[Piece, torch.Tensor]:
    piece = Piece(name="w", dtype="float32", global_shape=(4,), offset=(channel.rank,), shape=(1,))
    return {piece: torch.ones(1)}


NO_REWRITE: Any = "a -> x"
KEPT = "a -> a, pad='[9,-1]', fill='kept'"

REFUSED = Refusals(
    "checkpoint.rewrites",
    {
        "all findings": lambda folder: load(
            folder, "a, b -> ab, axis=1\nd -> e\nf -> _", {"ab": torch.zeros(6, 6), "c": torch.zeros(3)}
        ),
        "other shapes and names": lambda folder: load(
            folder, "a, b -> ab, axis=0", {"ab": torch.zeros(6, 5), "new": torch.zeros(3)}
        ),
        "another dtype": lambda folder: load(
            folder, "a, b -> ab, axis=0", {"ab": torch.zeros(6, 6, dtype=torch.float64), "c": torch.zeros(3)}, "runs"
        ),
        "added without a place": lambda folder: load(folder, "b, c -> _; _ -> d", {"a": torch.zeros(4, 6)}),
        "damage": lambda folder: load(
            damage((saved_ab(folder), folder)[1]), "a, b -> ab, axis=0", {"ab": torch.zeros(6, 6), "c": torch.zeros(3)}
        ),
        "elements in no file": incomplete,
        "rewrites that differ in a load": lambda folder: differing(
            folder, lambda channel, rewrite: sw.load(folder, {"x": torch.zeros(1)}, rewrite=rewrite, channel=channel)
        ),
        "rewrites that differ in a save": lambda folder: differing(
            folder, lambda channel, rewrite: sw.save(folder, {"a": torch.ones(1)}, rewrite=rewrite, channel=channel)
        ),
        "no rewrite to load": lambda folder: sw.load(stored(folder, AB), dict(AB), rewrite=NO_REWRITE),
        "no rewrite to save": lambda folder: sw.save(folder, AB, rewrite=NO_REWRITE),
        "a save of other widths": lambda folder: save(folder, "a, b -> c, axis=0"),
        "a save of what is not there": lambda folder: save(folder, "x -> y"),
        "a save that adds": lambda folder: save(folder, "_ -> c"),
        "a save that keeps": lambda folder: sw.save(folder, AB, rewrite=Rewrite(KEPT)),
        "full on no rank": lambda: full(to=2),
        "full on a word": lambda: full(to="one"),
        "full on a bool": lambda: full(to=True),
        "full of other names": lambda: full(names=["a", "c"]),
        "full and a word": lambda: full(optimizer="x"),
        "full of no rewrite": lambda: full(rewrite=NO_REWRITE),
        "full of what is not there": lambda: full(rewrite=Rewrite("c -> b")),
        "full that adds": lambda: full(rewrite=Rewrite("_ -> b")),
        "full that keeps": lambda: dict(sw.full({"a": torch.ones(2, 2)}, Rewrite(KEPT))),
        "full of a list": lambda: next(iter(sw.full(AS_LIST))),
        "full of different things": lambda: on_two(
            lambda channel: list(sw.full({"a": torch.ones(1)}, channel=channel, to=0, optimizer=channel.rank == 1))
        ),
        "full of parts": lambda: on_two(lambda channel: list(sw.full(half_of(channel), channel=channel))),
        "a conversion that adds": lambda folder: converts(folder, "_ -> z", stored(folder, AB)),
        "a conversion that keeps": lambda folder: converts(folder, KEPT, stored(folder, AB)),
        "a conversion of what is not there": lambda folder: converts(
            folder, "typo -> x; a -> l, r, axis=7", stored(folder, AB)
        ),
        "an inverse without the record": lambda folder: converts(
            folder, Rewrite("x, y -> a, axis=0").inverse(), stored(folder, AB)
        ),
        "no record": lambda folder: checkpoint.recorded_rewrite(stored(folder, AB)),
        "a damaged source": lambda folder: converts(folder, "a^T -> a", damage(stored(folder, AB)), to="pieces"),
        "a damaged source of hf": lambda folder: converts(folder, "a^T -> a", damage(stored(folder, AB)), to="hf"),
    },
)
AS_LIST: Any = [1]


def on_two(call: Callable[[Channel], object]) -> None:
    raise same_error_everywhere(2, call)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rewritten_is_refused_in_words(case: str) -> None:
    REFUSED.check(case)


def test_rows_that_data_parallelism_may_have_cut_are_not_taken_for_tensor_parallelism(tmp_path: Path) -> None:
    whole = {"gate": torch.arange(12.0).view(4, 3), "up": torch.arange(12.0, 24.0).view(4, 3)}
    sw.save(tmp_path, whole)
    fused = "gate, up -> gu, fused_ffn, axis=0"
    states = blank(shares_of({"gu": torch.zeros(8, 3)}, "rows", 2))
    with pytest.raises(RewriteError, match="Write dst_tp= with the tensor-parallel degree, or dst_tp=1"):
        load_all(tmp_path, states, rewrite=Rewrite(fused))
    for degree, order in ((1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 1, 4, 5, 2, 3, 6, 7])):
        load_all(tmp_path, states, rewrite=Rewrite(f"{fused}, dst_tp={degree}"))
        held = torch.cat([tensor for state in states for tensor in state.values()])
        assert torch.equal(held, torch.cat([whole["gate"], whole["up"]])[order])


def test_every_finding_comes_before_a_byte_is_read(tmp_path: Path) -> None:
    source = stored(tmp_path, AB)
    for file in source.rglob("*.safetensors"):
        file.unlink()
    assert "joined" in checkpoint.preview(source, rewrite=Rewrite("a, b -> joined, axis=1"))
    with pytest.raises(RewriteError) as caught:
        convert(source, tmp_path / "b", rewrite=Rewrite("typo -> x; a -> l, r, axis=7"))
    assert len(caught.value.problems) == 2
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        convert(source, tmp_path / "b", rewrite=Rewrite("a^T -> a"))
    assert not (tmp_path / "b").exists()
