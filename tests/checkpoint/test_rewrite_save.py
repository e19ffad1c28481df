"""Saves through a rewrite: every form, from any pieces into either layout of files, equal to plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.arrangement import FileLayout
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, MismatchError, RewriteError
from tests.checkpoint.cut_tensors import Cut, save_pieces, tensors_of
from tests.checkpoint.rewritten_tensors import CASES, blank, same_pieces, shares_of
from tests.checkpoint.small_states import rubbish, same

LOSSY = ("cast", "rounded", "rounded twice", "copies", "dropped", "padded", "padded and cropped")


@pytest.mark.parametrize("files", ["pieces", "whole"])
@pytest.mark.parametrize("how", ["rows", "columns", "runs"])
@pytest.mark.parametrize("name", CASES)
def test_every_form_of_any_pieces_is_saved(name: str, how: Cut, files: FileLayout, tmp_path: Path) -> None:
    case = CASES[name]
    save_pieces(tmp_path, shares_of(case.values(), how, 3), rewrite=sw.Rewrite(case.text), layout=files)
    expected = {name: tensor.contiguous() for name, tensor in case.plain(case.values()).items()}
    assert same(tensors_of(tmp_path), expected)
    assert checkpoint.verify(tmp_path).good


@pytest.mark.parametrize("name", [name for name in CASES if name not in LOSSY])
def test_the_inverse_brings_back_what_was_there(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_pieces(tmp_path, shares_of(case.values(), "runs", 2), rewrite=sw.Rewrite(case.text))
    for how in ("rows", "columns"):
        expected = shares_of(case.values(), how, 3)
        got = blank(expected)
        inverse = sw.Rewrite(case.text).inverse()
        sw.simulate(
            3,
            lambda channel, got=got, inverse=inverse: sw.load(  # type: ignore[misc]
                tmp_path, got[channel.rank], rewrite=inverse, channel=channel
            ),
        )
        assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))


def test_what_is_cast_is_cast_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a window of it is there in the other dtype at a time."""
    monkeypatch.setattr("shardwise.checkpoint.safetensors_files._BOUNCE_BYTES", 1 << 16)
    whole = {"a": torch.randn(512, 640), "b": torch.randn(640, 512)}
    rewrite = sw.Rewrite("a -> a, dtype='bfloat16'; b^T -> c, dtype='float64'")
    largest = 0
    plain = torch.empty

    def counted(*arguments: Any, **more: Any) -> torch.Tensor:
        nonlocal largest
        made = plain(*arguments, **more)
        largest = max(largest, made.nbytes)
        return made

    monkeypatch.setattr("shardwise.checkpoint.safetensors_files.torch.empty", counted)
    checkpoint.save(tmp_path, whole, rewrite=rewrite)
    assert largest <= 1 << 16
    assert same(tensors_of(tmp_path), {"a": whole["a"].bfloat16(), "c": whole["b"].T.double().contiguous()})


def test_replicas_are_written_once_and_ranks_may_hold_nothing(tmp_path: Path) -> None:
    whole = {"a": torch.randn(600, 700), "b": torch.randn(3)}
    states = [whole, whole, {}]
    rewrite = sw.Rewrite("a^T -> c; b -> d")

    def run(channel: Channel) -> int:
        state = {name: tensor.clone() for name, tensor in states[channel.rank].items()}
        return sw.save(tmp_path, state, rewrite=rewrite, channel=channel).num_bytes

    assert sw.simulate(3, run) == [sum(tensor.nbytes for tensor in whole.values())] * 3
    assert same(tensors_of(tmp_path), {"c": whole["a"].T.contiguous(), "d": whole["b"]})


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("a, b -> c, axis=0", RewriteError, "a, b -> c, axis=0"),
        ("x -> y", RewriteError, "there is no tensor x"),
        ("_ -> c", RewriteError, "c: the rewrite adds a tensor that keeps its current value"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks_and_nothing_is_left(
    text: str, kind: type[Exception], said: str, tmp_path: Path
) -> None:
    def run(channel: Channel) -> str:
        state = {"a": torch.ones(2, 3), "b": torch.ones(2, 4)}
        with pytest.raises(kind) as caught:
            sw.save(tmp_path, state, rewrite=sw.Rewrite(text), channel=channel)
        return str(caught.value)

    one, other = sw.simulate(2, run)
    assert one == other
    assert said in one
    assert rubbish(tmp_path) == []


def test_ranks_that_give_different_rewrites_are_told(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        rewrite = sw.Rewrite("a -> b") if channel.rank else None
        with pytest.raises(MismatchError, match="extra, step, layout and rewrite are"):
            sw.save(tmp_path, {"a": torch.ones(1)}, rewrite=rewrite, channel=channel)
        with pytest.raises(CheckpointError, match=r"rewrite is a str; give sw\.Rewrite\(text\)"):
            sw.save(tmp_path, {"a": torch.ones(1)}, rewrite="a -> b", channel=channel)  # type: ignore[arg-type]

    sw.simulate(2, run)


def test_conjugates_and_strides_are_saved_as_their_values(tmp_path: Path) -> None:
    values = torch.randn(4, 3, dtype=torch.complex64)
    state = {"a": values.conj(), "b": values.T[1:], "c": values.conj().imag}
    checkpoint.save(tmp_path, state, rewrite=sw.Rewrite("a^T -> x; b -> y, permute='[1,0]'; c -> z, dtype='float64'"))
    expected = {"x": values.conj().T, "y": values[:, 1:], "z": values.conj().imag.double()}
    assert same(
        tensors_of(tmp_path), {name: each.resolve_conj().resolve_neg().contiguous() for name, each in expected.items()}
    )


def test_the_record_of_a_save_tells_what_a_part_of_the_target_cannot(tmp_path: Path) -> None:
    """Where to split, and from which dtype to come back, though the target has but one of the tensors."""
    whole = {"a": torch.randn(2, 3).half(), "b": torch.randn(5, 3).half(), "other": torch.ones(1)}
    rewrite = sw.Rewrite("a, b -> ab, axis=0; ab -> ab, dtype='float32'")
    checkpoint.save(tmp_path, whole, rewrite=rewrite)
    for name in ("a", "b"):
        target = {name: torch.zeros_like(whole[name])}
        report = checkpoint.load(tmp_path, target, rewrite=rewrite.inverse(), strict=False).report
        assert torch.equal(target[name], whole[name])
        assert report.casts == ()
    other = {"a": torch.zeros(2, 3).half()}
    with pytest.raises(RewriteError):  # another rewrite's inverse, of whose sources nothing is recorded
        checkpoint.load(tmp_path, other, rewrite=sw.Rewrite("a, c -> ab, axis=0").inverse(), strict=False)
