"""What a checkpoint holds reaches other ranks in few bytes, and means the same there."""

import contextlib
import random
from dataclasses import replace

import pytest

from shardwise.checkpoint.contents import CHECKSUM_BYTES, Contents, StoredPiece, StoredTensor
from shardwise.checkpoint.packed_contents import pack_contents, unpack_contents
from shardwise.comm.agreement import understood
from shardwise.comm.digests import checksum
from shardwise.errors import PeerError
from shardwise.space import Piece


def made(num_tensors: int, num_ranks: int, *, seed: int = 0) -> Contents:
    """Whole tensors, boxes, runs, tensors without dims or elements; half of them with checksums."""
    numbers = random.Random(seed)
    tensors = {}
    for at in range(num_tensors):
        name, rows = f"layers.{at // 4}.w{at % 4}.weight", numbers.choice((4, 64))
        shape: tuple[int, ...] = (rows * num_ranks, 4096)
        kind = numbers.choice(("box", "run", "box")) if at >= 4 else ("whole", "scalar", "empty", "nowhere")[at]
        pieces = [Piece(name=name, dtype="bfloat16", global_shape=shape)]
        if kind == "box":
            boxes = [((rows * rank, 0), (rows, 4096)) for rank in range(num_ranks)]
            pieces = [
                Piece(name=name, dtype="bfloat16", global_shape=shape, offset=offset, shape=size)
                for offset, size in boxes
            ]
        elif kind == "run":
            step = rows * 4096
            runs = [(rank * step, (rank + 1) * step) for rank in range(num_ranks)]
            pieces = [Piece(name=name, dtype="bfloat16", global_shape=shape, run=run) for run in runs]
        elif kind != "whole":
            shape = () if kind == "scalar" else (0, 3)
            pieces = [Piece(name=name, dtype="bfloat16", global_shape=shape)] if kind == "scalar" else []
        stored = [
            StoredPiece(
                piece=piece,
                file=f"rank{rank:05d}",
                start=numbers.randrange(1 << 40),
                checksums=numbers.randbytes(8) if at % 2 else None,
            )
            for rank, piece in enumerate(pieces)
        ]
        tensors[name] = StoredTensor(name=name, dtype="bfloat16", shape=shape, pieces=tuple(stored))
    sizes = {f"rank{rank:05d}": 1 << 41 for rank in range(num_ranks)}
    return Contents(
        format="shardwise",
        location="runs/a",
        tensors=tensors,
        file_sizes=sizes,
        file_heads=dict.fromkeys(sizes, (4096, b"12345678")),
        extra={"step": 3},
        notes=("one", "two"),
        step=3,
    )


def test_contents_come_back_as_they_were() -> None:
    contents = made(40, 3)
    found = unpack_contents(pack_contents(contents))
    tensors = {name: replace(tensor, pieces=tuple(tensor.pieces)) for name, tensor in found.tensors.items()}
    assert [len(each.pieces) for each in found.tensors.values()] == [len(each.pieces) for each in tensors.values()]
    assert replace(found, tensors=tensors) == contents
    assert list(tensors) == list(contents.tensors)
    assert next(iter(found.tensors.values())).pieces[0] == next(iter(contents.tensors.values())).pieces[0]
    empty = made(0, 1)
    assert unpack_contents(pack_contents(empty)) == empty


def test_a_piece_takes_less_than_forty_bytes() -> None:
    contents = made(100, 200)
    num_pieces = sum(len(each.pieces) for each in contents.tensors.values())
    assert num_pieces > 15_000
    assert len(pack_contents(contents)) < 20 * num_pieces


@pytest.mark.parametrize("at", [0, 9, 300, -1])
def test_bytes_that_changed_on_the_way_are_refused(at: int) -> None:
    packed = bytearray(pack_contents(made(40, 3)))
    packed[at] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        unpack_contents(bytes(packed))


@pytest.mark.parametrize("seed", range(3))
def test_other_bytes_are_refused_by_errors_that_ranks_expect_of_a_peer(seed: int) -> None:
    """A rank of another version gives bytes that have their checksum and mean nothing."""
    numbers, packed = random.Random(seed), pack_contents(made(40, 3))[CHECKSUM_BYTES:]
    for _ in range(300):
        changed = bytearray(packed)
        changed[numbers.randrange(len(changed))] ^= 1 << numbers.randrange(8)
        given = [checksum(bytes(changed)) + changed]
        with contextlib.suppress(PeerError):  # what is only another number is read
            understood(given, unpack_contents, purpose="contents")
