"""Loads through a rewrite: every form, from any pieces into any pieces, equal to plain torch, with exact reads."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Loaded
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, MismatchError, RewriteError
from shardwise.space import Piece
from tests.checkpoint.cut_tensors import Cut, Pieces, save_pieces
from tests.checkpoint.rewritten_tensors import CASES, blank, same_pieces, shares_of
from tests.checkpoint.small_states import same

CUTS: list[tuple[Cut, Cut]] = [("rows", "columns"), ("columns", "runs"), ("runs", "rows"), ("rows", "runs")]


def load_all(path: Path, states: list[Any], **arguments: Any) -> list[Loaded]:
    def run(channel: Channel) -> Loaded:
        return sw.load(path, states[channel.rank], channel=channel, **arguments)

    return sw.simulate(len(states), run)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("source", "target"), CUTS)
@pytest.mark.parametrize("name", CASES)
def test_every_form_loads_from_any_pieces_into_any_pieces(
    name: str, source: Cut, target: Cut, verify: bool, tmp_path: Path
) -> None:
    case = CASES[name]
    save_pieces(tmp_path, shares_of(case.values(), source, 2))
    expected = shares_of(case.plain(case.values()), target, 3)
    got = blank(expected)
    reports = [each.report for each in load_all(tmp_path, got, rewrite=sw.Rewrite(case.text), verify=verify)]
    assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))
    assert {report.missing + report.unexpected for report in reports} == {()}
    if not verify:
        itemsize = getattr(torch, case.dtype).itemsize
        # What depends on the sources is read; padding is not.
        zeros, ones = ({n: torch.full_like(t, to) for n, t in case.values().items()} for to in (0, 1))
        stored = {n: t != case.plain(zeros)[n] for n, t in case.plain(ones).items()}
        needed = [itemsize * sum(int(mask.sum()) for mask in share.values()) for share in shares_of(stored, target, 3)]
        read = [report.read_bytes for report in reports]
        assert all(mine <= own for mine, own in zip(read, needed, strict=True)) if name == "copies" else read == needed


@pytest.mark.parametrize("name", CASES)
def test_one_process_and_tensors_by_name(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint.save(tmp_path, case.values())
    expected = {name: tensor.contiguous() for name, tensor in case.plain(case.values()).items()}
    target = {name: torch.full_like(tensor, 77) for name, tensor in expected.items()}
    report = checkpoint.load(tmp_path, target, rewrite=sw.Rewrite(case.text)).report
    assert same(target, expected)
    assert report.dropped == (("a",) if name == "dropped" else ())
    strided = {name: torch.full_like(tensor.mT, 77).mT for name, tensor in expected.items() if tensor.dim() > 1}
    checkpoint.load(tmp_path, strided, rewrite=sw.Rewrite(case.text), strict=False)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in strided.items())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_large_tensors_are_read_once_in_rounds_though_they_come_in_strips(
    size: int, verify: bool, tmp_path: Path
) -> None:
    whole = {"a": torch.arange(3 << 20, dtype=torch.float32).view(2048, 1536), "b": torch.randn(2048, 512)}
    save_pieces(tmp_path, shares_of(whole, "columns", 2))
    expected = shares_of({"ab": torch.cat([whole["a"], whole["b"]], 1).T.contiguous()}, "rows", size)
    got = blank(expected)
    rewrite = sw.Rewrite("a, b -> ab, axis=1, permute='[1,0]'")
    reports = [each.report for each in load_all(tmp_path, got, rewrite=rewrite, verify=verify)]
    assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))
    total = sum(each.nbytes for each in whole.values())
    assert total <= sum(report.read_bytes for report in reports) <= 1.05 * total


def refusal(path: Path, states: list[Pieces], text: str, kind: type[Exception] = CheckpointError, **more: Any) -> str:
    """The error that all ranks get; their tensors are as they were."""
    before = [{piece: tensor.clone() for piece, tensor in state.items()} for state in states]
    errors = []

    def run(channel: Channel) -> None:
        with pytest.raises(kind) as caught:
            sw.load(path, states[channel.rank], rewrite=sw.Rewrite(text), channel=channel, **more)
        errors.append(str(caught.value))

    sw.simulate(len(states), run)
    assert len(set(errors)) == 1
    assert len(errors) == len(states)
    assert all(same_pieces(*pair) for pair in zip(states, before, strict=True))
    return errors[0]


def saved_ab(path: Path) -> dict[str, torch.Tensor]:
    whole = {"a": torch.randn(4, 6), "b": torch.randn(2, 6), "c": torch.randn(3)}
    save_pieces(path, shares_of(whole, "rows", 2))
    return whole


def test_a_rewrite_that_does_not_fit_what_is_stored_refuses_on_all_ranks_with_all_findings(tmp_path: Path) -> None:
    saved_ab(tmp_path)
    states = blank(shares_of({"ab": torch.zeros(6, 6), "c": torch.zeros(3)}, "rows", 3))
    text = refusal(tmp_path, states, "a, b -> ab, axis=1\nd -> e\nf -> _", RewriteError)
    for line in ("line 1", "line 2", "line 3", "a, b -> ab, axis=1", "there is no tensor d", "there is no tensor f"):
        assert line in text
    problems = []

    def run(channel: Channel) -> None:
        with pytest.raises(RewriteError) as caught:
            sw.load(tmp_path, states[channel.rank], rewrite=sw.Rewrite("d -> e; f -> g"), channel=channel)
        problems.append(caught.value.problems)

    sw.simulate(3, run)
    assert [len(each) for each in problems] == [2, 2, 2]


def test_rows_that_data_parallelism_may_have_cut_are_not_taken_for_tensor_parallelism(tmp_path: Path) -> None:
    whole = {"gate": torch.arange(12.0).view(4, 3), "up": torch.arange(12.0, 24.0).view(4, 3)}
    sw.save(tmp_path, whole)
    fused = "gate, up -> gu, fused_ffn, axis=0"
    states = blank(shares_of({"gu": torch.zeros(8, 3)}, "rows", 2))
    text = refusal(tmp_path, states, fused, RewriteError)
    assert "the right tensor is cut along dim 0 by its layout" in text
    assert "Write dst_tp= with the tensor-parallel degree, or dst_tp=1" in text
    for degree, order in ((1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 1, 4, 5, 2, 3, 6, 7])):
        rewrite = sw.Rewrite(f"{fused}, dst_tp={degree}")
        load_all(tmp_path, states, rewrite=rewrite)
        held = torch.cat([tensor for state in states for tensor in state.values()])
        assert torch.equal(held, torch.cat([whole["gate"], whole["up"]])[order])


def test_what_the_outputs_do_not_fit_is_found_as_in_a_plain_load(tmp_path: Path) -> None:
    saved_ab(tmp_path)
    states = blank(shares_of({"ab": torch.zeros(6, 5), "new": torch.zeros(3)}, "rows", 2))
    text = refusal(tmp_path, states, "a, b -> ab, axis=0")
    assert "ab: shape [6, 5] in the target, [6, 6] in the rewritten checkpoint" in text
    assert "new: missing; the rewritten checkpoint has no tensor for it" in text
    assert "c: unexpected; the target has no place for it" in text
    states = blank(shares_of({"ab": torch.zeros(6, 6, dtype=torch.float64), "c": torch.zeros(3)}, "runs", 2))
    text = refusal(tmp_path, states, "a, b -> ab, axis=0")
    assert "dtype float64 in the target, float32 in the rewritten checkpoint; allow it with" in text


def test_with_leave_names_may_be_missing_and_dtypes_other(tmp_path: Path) -> None:
    whole = saved_ab(tmp_path)
    target = {"ab": torch.zeros(6, 6, dtype=torch.float64), "new": torch.full((3,), 7.0)}
    rewrite = sw.Rewrite("a, b -> ab, axis=0, dtype='float16'")
    report = checkpoint.load(tmp_path, target, rewrite=rewrite, strict=False, cast=True).report
    assert torch.equal(target["ab"], torch.cat([whole["a"], whole["b"]]).half().double())
    assert torch.equal(target["new"], torch.full((3,), 7.0))
    assert report.missing == ("new: missing; the rewritten checkpoint has no tensor for it",)
    assert report.unexpected == ("c: unexpected; the target has no place for it",)
    assert report.casts == ("ab: dtype float64 in the target, float16 in the rewritten checkpoint",)


def test_what_is_added_keeps_its_value_and_what_is_dropped_is_told(tmp_path: Path) -> None:
    whole = saved_ab(tmp_path)
    shares = shares_of({"x": whole["a"], "new": torch.full((4,), 7.0)}, "rows", 2)
    states = blank(shares)
    for state, share in zip(states, shares, strict=True):
        for piece, tensor in share.items():
            if piece.name == "new":
                state[piece].copy_(tensor)
    reports = [each.report for each in load_all(tmp_path, states, rewrite=sw.Rewrite("a -> x; b, c -> _; _ -> new"))]
    assert all(same_pieces(*pair) for pair in zip(states, shares, strict=True))
    assert [(report.dropped, report.added) for report in reports] == [(("b", "c"), ("new",))] * 2


def test_a_tensor_that_was_read_is_there_when_the_target_wants_it(tmp_path: Path) -> None:
    whole = saved_ab(tmp_path)
    target = {"a": torch.zeros(4, 6), "t": torch.zeros(6, 4), "b": torch.zeros(2, 6), "c": torch.zeros(3)}
    checkpoint.load(tmp_path, target, rewrite=sw.Rewrite("a^T -> t"))
    assert same(target, {"t": whole["a"].T.contiguous(), **whole})


def test_placeholders_on_the_right_stand_for_what_any_rank_has(tmp_path: Path) -> None:
    stacked = torch.randn(3, 4)
    checkpoint.save(tmp_path, {"stacked": stacked})
    states = [{f"e.{number}": torch.zeros(4)} for number in (0, 1, 7)]
    load_all(tmp_path, states, rewrite=sw.Rewrite("stacked -> e.*, stack=0"))
    for row, (number, state) in zip(stacked, zip((0, 1, 7), states, strict=True), strict=True):
        assert torch.equal(state[f"e.{number}"], row)


def test_a_rank_that_wants_nothing_takes_part(tmp_path: Path) -> None:
    whole = saved_ab(tmp_path)
    states: list[Any] = [{}, {"ab": torch.zeros(6, 6)}, {"c": torch.zeros(3)}]
    load_all(tmp_path, states, rewrite=sw.Rewrite("a, b -> ab, axis=0"))
    assert torch.equal(states[1]["ab"], torch.cat([whole["a"], whole["b"]]))
    assert torch.equal(states[2]["c"], whole["c"])


def test_elements_that_are_in_no_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.arrangement.check_cover", lambda pieces: [])
    piece = Piece(name="a", dtype="float32", global_shape=(4, 2), shape=(3, 2))
    checkpoint.save(tmp_path, {piece: torch.ones(3, 2)})
    text = refusal(tmp_path, blank(shares_of({"b": torch.zeros(2, 4)}, "rows", 2)), "a^T -> b")
    assert "2 of 4 elements are in no piece of a that the checkpoint has; it is incomplete" in text or (
        "1 of 4 elements are in no piece of a" in text
    )


@pytest.mark.parametrize("verify", [True, False])
def test_files_of_hugging_face_and_storage_that_one_rank_sees(verify: bool, tmp_path: Path) -> None:
    whole = saved_ab(tmp_path / "saves")
    checkpoint.convert(tmp_path / "saves", tmp_path / "hf", to="hf")
    shutil.copytree(tmp_path / "saves", tmp_path / "1")
    shares = shares_of({"ab": torch.cat([whole["a"], whole["b"]]).T.contiguous(), "c": whole["c"]}, "rows", 3)
    rewrite = sw.Rewrite("a, b -> ab, axis=0, permute='[]'")
    states = blank(shares)
    load_all(tmp_path / "hf", states, rewrite=rewrite, verify=verify)
    assert all(same_pieces(*pair) for pair in zip(states, shares, strict=True))
    states = blank(shares)

    def run(channel: Channel) -> int:
        path = tmp_path / str(channel.rank)
        return sw.load(
            path, states[channel.rank], rewrite=rewrite, shared=False, verify=verify, channel=channel
        ).report.read_bytes

    read = sw.simulate(3, run)
    assert all(same_pieces(*pair) for pair in zip(states, shares, strict=True))
    assert [each > 0 for each in read] == [False, True, False]


def test_damage_is_named_and_found_before_anything_is_written(tmp_path: Path) -> None:
    saved_ab(tmp_path)
    file = next(tmp_path.glob("save-*/*rank00000.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    states = blank(shares_of({"ab": torch.zeros(6, 6), "c": torch.zeros(3)}, "runs", 2))
    text = refusal(tmp_path, states, "a, b -> ab, axis=0")
    assert f"{file} is damaged" in text
    assert "nothing of the target was changed" in text


def test_ranks_that_give_different_rewrites_are_told(tmp_path: Path) -> None:
    saved_ab(tmp_path)

    def run(channel: Channel) -> None:
        rewrite = sw.Rewrite("a -> x") if channel.rank else None
        with pytest.raises(MismatchError, match=r"rank 1 loads with .*rewrite='a -> x"):
            sw.load(tmp_path, {"x": torch.zeros(4, 6)}, rewrite=rewrite, channel=channel)
        with pytest.raises(CheckpointError, match=r"rewrite is a str; give sw\.Rewrite"):
            sw.load(tmp_path, {"x": torch.zeros(4, 6)}, rewrite="a -> x", channel=channel)  # type: ignore[arg-type]

    sw.simulate(2, run)


def test_what_is_added_and_has_no_place_in_the_target_is_refused_or_told(tmp_path: Path) -> None:
    saved_ab(tmp_path)
    rewrite = sw.Rewrite("b, c -> _; _ -> d")
    said = "d: the rewrite adds it, and the target has no such tensor"

    def run(channel: Channel) -> str:
        with pytest.raises(CheckpointError, match="does not fit the target") as caught:
            checkpoint.load(tmp_path, {"a": torch.zeros(4, 6)}, rewrite=rewrite, channel=channel)
        return "; ".join(caught.value.problems)

    assert sw.simulate(2, run) == [said] * 2
    report = checkpoint.load(tmp_path, {"a": torch.zeros(4, 6)}, rewrite=rewrite, strict=False).report
    assert report.unexpected == (said,)
    assert checkpoint.load(tmp_path, {"a": torch.zeros(4, 6), "d": torch.ones(1)}, rewrite=rewrite).report.added == (
        "d",
    )
