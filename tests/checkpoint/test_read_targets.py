"""Read targets: neighbours are one, and every element gets where it would get alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shardwise import Rewrite, checkpoint
from shardwise.checkpoint import windows
from shardwise.checkpoint.windows import ReadTarget, joined
from shardwise.space import Piece, moves
from tests.checkpoint.cut_tensors import tensors_of

W = torch.arange(7 * 24, dtype=torch.float32).view(7, 24)


def columns(width: int, pad: int) -> tuple[list[ReadTarget], torch.Tensor]:
    """Targets for the columns of `W`, `width` at a time, in memory with `pad` elements after each; and that memory."""
    each = 7 * width + pad
    memory = torch.full((each * (24 // width),), -1.0)
    targets = []
    for at in range(24 // width):
        source = Piece(name="w", dtype="float32", global_shape=(7, 24), offset=(0, at * width), shape=(7, width))
        targets.append(ReadTarget(source, memory[at * each : at * each + 7 * width].view(7, width), ("float32",)))
    return targets, memory


def fill(targets: Sequence[ReadTarget], run: int) -> int:
    """Bring `W` into the targets, `run` elements at a time; how many copies that takes."""
    count = 0
    for start in range(0, W.numel(), run):
        span = Piece(name="w", dtype="float32", global_shape=(7, 24), run=(start, min(start + run, W.numel())))
        elements = W.flatten()[start : start + run]
        for each in targets:
            for move in moves(span, each.source):
                first = move.source.start
                block = elements[first : first + torch.Size(move.source.block).numel()].view(move.source.block)
                box = tuple(slice(a, a + n) for a, n in zip(move.source.offset, move.shape, strict=True))
                for target, source in each.copies(move, block[box]):
                    target.copy_(source)
                    count += 1
    return count


@pytest.mark.parametrize("run", [1, 5, 24, 50, 168])
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_columns_side_by_side_are_one_slot_and_get_what_each_would_get_alone(width: int, pad: int, run: int) -> None:
    alone, expected = columns(width, pad)
    before = fill(alone, run)
    targets, got = columns(width, pad)
    (one,) = joined(targets)
    after = fill([one], run)
    assert torch.equal(got, expected)
    assert after <= before
    assert after <= 9 * -(-168 // run)


def test_what_is_no_neighbour_stays_apart() -> None:
    targets, _ = columns(2, 1)
    assert len(joined(targets[::2])) == 6
    assert len(joined([targets[1], targets[0]])) == 2
    assert len(joined([targets[0], targets[1], targets[3], targets[4]])) == 2
    cast = ReadTarget(targets[1].source, targets[1].view, ("float32", "bfloat16"))
    assert len(joined([targets[0], cast, targets[2]])) == 3


@pytest.mark.parametrize("width", [1, 3])
def test_a_tensor_of_many_columns_is_split_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    counts: list[int] = []

    def counted(targets: Sequence[ReadTarget]) -> list[ReadTarget]:
        found = joined(targets)
        counts.append(len(found))
        return found

    monkeypatch.setattr(windows, "joined", counted)
    w = torch.randn(701, 300 * width)
    checkpoint.save(tmp_path / "a", {"w": w})
    text = "w -> m[0:300], axis=1"
    report = checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text), certify=True)
    assert report.certificate is not None
    assert not report.certificate.lossy
    assert counts[0] == 1  # one window, in which all of the columns are one target
    got = tensors_of(tmp_path / "b")
    for at, part in enumerate(w.split(width, 1)):
        assert torch.equal(got[f"m_{at}"], part)
