"""Snapshots: the bytes of a save in blocks of memory, and what is left where a device gives no page-locked memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwise.checkpoint.snapshots import Snapshot
from shardwise.checkpoint.state_pieces import Held
from shardwise.space import Piece
from tests.checkpoint.small_limits import small_limits


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Page-locked memory where there is no device: plain memory. The sizes that were asked for."""
    sizes: list[int] = []
    empty = torch.empty

    def pretend(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            sizes.append(*size)
        return empty(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", pretend)
    with small_limits(8):
        yield sizes


def piece(name: str, size: int) -> Piece:
    return Piece(name=name, dtype="uint8", global_shape=(size,), offset=(0,), shape=(size,))


@pytest.mark.parametrize("sizes", [[], [1], [7, 1], [8], [9], [3, 30, 0, 5], [64]])
def test_bytes_come_back_in_order_whatever_the_blocks(locked: list[int], sizes: list[int]) -> None:
    snapshot = Snapshot()
    for offset in range(2):  # the second one uses the memory of the first
        values = {
            piece(f"t{at}", size): torch.arange(at + offset, at + offset + size, dtype=torch.uint8)
            for at, size in enumerate(sizes)
        }
        snapshot.begin(sum(sizes), from_device=True)
        snapshot.take(list(values), Held(tensors=values))
        snapshot.wait()
        expected = b"".join(bytes(each.tolist()) for each in values.values())
        assert b"".join(map(bytes, snapshot.chunks())) == expected
    assert locked == [8] * -(-sum(sizes) // 8)
    assert snapshot.num_bytes == sum(locked)
    assert (snapshot.counters.waited_bytes, snapshot.counters.queued_bytes) == (2 * sum(sizes), 0)
    snapshot.release()
    assert snapshot.num_bytes == 0


def test_without_page_locked_memory_copies_are_waited_for_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty

    def refuse(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no more of it")
        return empty(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    snapshot = Snapshot()
    values = {piece("w", 5): torch.arange(5, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="a snapshot of 5 bytes got no page-locked memory .*; saves in the background"):
        snapshot.begin(5, from_device=True)
    snapshot.take(list(values), Held(tensors=values))
    assert b"".join(map(bytes, snapshot.chunks())) == bytes(range(5))
    assert snapshot.num_bytes == 5


def test_bytes_of_device_tensors_are_copied_without_a_wait_of_the_host(fake: str) -> None:
    from shardwise.testing.accelerator import counted

    numbers = torch.arange(24, dtype=torch.float32).view(4, 6)
    tensors = {
        "plain": numbers,
        "columns": numbers.t(),
        "turned": torch.complex(numbers, numbers + 1).conj(),
        "cast": numbers / 7,
        "step": torch.tensor(3.0),
    }
    held: dict[Piece, torch.Tensor] = {}
    casts: dict[Piece, list[str]] = {}
    expected = b""
    for name, values in tensors.items():
        dtype = "bfloat16" if name == "cast" else str(values.dtype).removeprefix("torch.")
        shape = tuple(values.shape)
        key = Piece(name=name, dtype=dtype, global_shape=shape, offset=(0,) * len(shape), shape=shape)
        held[key] = values if name == "step" else values.to(fake)
        if name == "cast":
            casts[key] = [dtype]
        as_written = values.to(getattr(torch, dtype)).resolve_conj().contiguous()
        expected += bytes(as_written.reshape(-1).view(torch.uint8).tolist())
    snapshot = Snapshot()
    snapshot.begin(len(expected), from_device=True)
    with counted("sync") as counts:
        snapshot.take(list(held), Held(tensors=held, casts=casts))
    assert counts[0].syncs == 0, counts[0].lines
    for tensor in held.values():
        tensor.zero_()  # the state may change at once
    snapshot.wait()
    assert b"".join(map(bytes, snapshot.chunks())) == expected
    assert (snapshot.counters.waited_bytes, snapshot.counters.queued_bytes) == (4, len(expected) - 4)
