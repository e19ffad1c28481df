"""Digests of a batch: what ranks that share it compare. Of tensors on a device they are made there, and not read.

    x         elements as whole numbers       3   1   4 | 1   5   9 | 2   6       ROW of them per row; here 3
    * keys    odd numbers, of the place       7  11  13 | 7  11  13 | 7  11
    sums      one number per row, modulo 2^64      84   |    179    |   80        the same again, until one is left

Two batches that differ have equal digests with a chance of 2^-32 at most: the keys are drawn at random, and are equal
on all ranks.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
import xxhash

from shardwise.comm.digests import digest_of_values
from shardwise.comm.local_tensors import dense_parts, dtype_name, is_dense
from shardwise.comm.nested_values import named_leaves
from shardwise.engine.forward.batches import Batch

ROW = 1 << 14
"""Keys that are held: 128 KiB."""

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What tensors of so many bytes per real number are read as."""


def describe_batch(batch: Batch, *, digest: bool = True) -> list[str]:
    """One line per entry: what must be equal on all ranks that share a batch.

    digest: also of the values that are on a device, which waits for them; else those have a line without.
    """
    return [
        f"{name!r} {list(value.shape)} {dtype_name(value.dtype)}"
        + (f" with digest {digest_of_values(value)}" if digest or not _is_on_device(value) else " on a device")
        if isinstance(value, torch.Tensor)
        else f"{name!r} {json.dumps(value, default=lambda each: type(each).__name__)}"
        for name, value in _dense_leaves(batch)
    ]


def digest_of_lines(lines: Sequence[str]) -> str:
    """One digest of a description with the digests of all values."""
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


class BatchDigests:
    """Makes digests on one device."""

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None

    def of(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Of each entry that is on the device, by its name: one int64."""
        return {name: self._of(value) for name, value in _dense_leaves(batch) if _is_on_device(value)}

    @torch.no_grad()
    def _of(self, value: torch.Tensor) -> torch.Tensor:
        if self._keys is None:
            drawn = torch.randint(-(1 << 62), 1 << 62, (ROW,), generator=torch.Generator().manual_seed(0))
            self._keys = (2 * drawn + 1).to(value.device)  # odd: no difference of one element is lost
        value = value.detach().resolve_conj().resolve_neg()
        if value.is_complex():
            value = torch.view_as_real(value)
        whole, length = _WHOLE[value.element_size()], value.numel()
        if length <= ROW:
            return (value.view(whole).contiguous().view(-1) * self._keys[:length]).sum()
        sums = torch.zeros(-(-length // ROW), dtype=torch.int64, device=value.device)
        # Products take 8 bytes for each element: so only some rows at a time, and of a large tensor a 64th.
        num_rows = max(2, len(sums) // 64)
        at = 0
        for words in _stretches(value.view(whole), num_rows * ROW):
            while words.numel():
                row, column = divmod(at, ROW)
                if column or words.numel() < ROW:
                    taken = words[: ROW - column]
                    sums[row] += (taken * self._keys[column : column + len(taken)]).sum()
                else:
                    taken = words[: min(num_rows, len(words) // ROW) * ROW]
                    ends = sums[row : row + len(taken) // ROW]
                    torch.sum(taken.view(-1, ROW) * self._keys, 1, out=ends)  # no name keeps the products
                at += len(taken)
                words = words[len(taken) :]
        return self._of(sums)


def _stretches(value: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """All elements in their order, flat: views of the memory, or copies of so many at most where it has holes."""
    if value.is_contiguous() or value.numel() <= most:
        yield value.contiguous().view(-1)
        return
    for part in value.split(max(1, most * len(value) // value.numel())):
        yield from _stretches(part[0] if len(part) == 1 else part, most)


def _dense_leaves(batch: Batch) -> Iterator[tuple[str, Any]]:
    """The leaves by name; of a tensor of another layout its parts, each by the layout and a number."""
    for name, leaf in named_leaves(batch):
        if not isinstance(leaf, torch.Tensor) or is_dense(leaf):
            yield name, leaf
            continue
        for at, part in enumerate(dense_parts(leaf)):
            yield f"{name} ({'nested' if leaf.is_nested else leaf.layout}) {at}", part


def _is_on_device(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"
