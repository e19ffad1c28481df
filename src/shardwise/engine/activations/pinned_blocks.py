"""Blocks of pinned host memory that are used again: to pin memory takes longer than to fill it."""

import torch


class PinnedBlocks:
    """The blocks of one rank. Copies to and from them go over one stream, so a block may be given back at once."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self.num_bytes = 0
        """Of all blocks, free ones included."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the host, at least so many."""
        size = size_of_block(num_bytes)
        if free := self._free.get(size):
            return free.pop()
        self.num_bytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, block: torch.Tensor) -> None:
        """What is in the block is not needed any more."""
        self._free.setdefault(block.numel(), []).append(block)


def size_of_block(num_bytes: int) -> int:
    """Of few sizes, so that blocks fit again: at most an eighth larger than asked.

    >>> size_of_block(100), size_of_block(5000), size_of_block(1 << 20)
    (512, 5120, 1048576)
    """
    step = max(512, 1 << max(0, (num_bytes - 1).bit_length() - 4))
    return -(-num_bytes // step) * step
