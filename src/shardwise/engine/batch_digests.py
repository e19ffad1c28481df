"""Digests of a batch: what ranks that share it compare. Of tensors on a device they are made there, and not read.

    x         elements as whole numbers       3   1   4 | 1   5   9 | 2   6       _ROW of them per row; here 3
    * keys    odd numbers, of the place       7  11  13 | 7  11  13 | 7  11
    sums      one number per row, modulo 2^64      84   |    179    |   80        the same again, until one is left

Two batches that differ have equal digests with a chance of 2^-32 at most: the keys are drawn at random, and are equal
on all ranks.
"""

import json
from collections.abc import Sequence
from typing import TypeGuard

import torch
import xxhash

from shardwise.comm.agreement import digest_of_values
from shardwise.comm.local_tensors import dtype_name
from shardwise.comm.nested_values import named_leaves
from shardwise.engine.batches import Batch

_ROW = 1 << 14
"""Keys that are held: 128 KiB."""

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""What tensors of so many bytes per element are read as."""


def describe_batch(batch: Batch, *, digest: bool = True) -> list[str]:
    """One line per entry: what must be equal on all ranks that share a batch.

    digest: also of the values that are on a device, which waits for them; else those have a line without.
    """
    return [
        f"{name!r} {list(value.shape)} {dtype_name(value.dtype)}"
        + (f" with digest {digest_of_values(value)}" if digest or not _is_on_device(value) else " on a device")
        if isinstance(value, torch.Tensor)
        else f"{name!r} {json.dumps(value, default=lambda each: type(each).__name__)}"
        for name, value in named_leaves(batch)
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
        return {name: self._of(value) for name, value in named_leaves(batch) if _is_on_device(value)}

    @torch.no_grad()
    def _of(self, value: torch.Tensor) -> torch.Tensor:
        if self._keys is None:
            drawn = torch.randint(-(1 << 62), 1 << 62, (_ROW,), generator=torch.Generator().manual_seed(0))
            self._keys = (2 * drawn + 1).to(value.device)  # odd: no difference of one element is lost
        flat = value.detach().contiguous().view(-1).view(_WHOLE[value.element_size()])
        while True:
            if flat.numel() <= _ROW:
                return (flat * self._keys[: flat.numel()]).sum()
            rows = flat.numel() // _ROW
            body, rest = flat[: rows * _ROW].view(rows, _ROW), flat[rows * _ROW :]
            sums = (body * self._keys).sum(1)
            flat = torch.cat([sums, (rest * self._keys[: rest.numel()]).sum().view(1)])


def _is_on_device(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"
