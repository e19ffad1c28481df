"""Buffers: memory for many bytes, which does not stay with the process when it is given back."""

import contextlib
import mmap

import torch

__all__ = ["GrowingBuffer"]


class GrowingBuffer:
    """Memory that each use takes over from the one before, and that grows where one needs more.

    It is mapped for itself, not taken from the heap. glibc takes what is as large as blocks that were freed before, up
    to 32 MiB, from the heap, which shrinks only at its end: between small blocks that last, large ones find no room
    where large ones were. So 20 MiB of buffers that came and went took 40 to 64 MiB.
    """

    def __init__(self, least_bytes: int = mmap.PAGESIZE) -> None:
        """It has room for `least_bytes` from its first use on: what is not used takes no memory."""
        self._least_bytes = least_bytes
        self._memory: torch.Tensor | None = None

    def room(self, num_bytes: int) -> torch.Tensor:
        """At least so many bytes; those of the last use hold until now."""
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None  # goes before the next comes
            self._memory = _mapped(max(num_bytes, self._least_bytes))
        return self._memory


def _mapped(num_bytes: int) -> torch.Tensor:
    """So many bytes in a mapping of their own, which goes with the last view of them."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without them
            mapping.madvise(mmap.MADV_HUGEPAGE)  # a dozen conversions: 64,000 page faults, not 167,000
    return torch.frombuffer(mapping, dtype=torch.uint8)
