"""Buffers of the model that forward writes to (running statistics): data rank 0's values hold for all.

The rule of DistributedDataParallel, applied after each update and only to buffers that changed.
"""

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.counters import Counters


class ModelBuffers:
    """The buffers of a model and the versions that all ranks had last in common."""

    def __init__(self, model: nn.Module) -> None:
        seen: set[int] = set()
        self._places: list[tuple[nn.Module, str]] = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((module, name))
        self._known = self._versions()

    def changed(self) -> list[bool]:
        """For each buffer: whether it was written to, or replaced, since the ranks last agreed."""
        return [now != before for now, before in zip(self._versions(), self._known, strict=True)]

    @torch.no_grad()
    def synchronise(self, channel: Channel, changed: list[bool], counters: Counters) -> None:
        """Give every rank the values that data rank 0 has in the buffers marked `changed`."""
        if channel.size > 1 and any(changed):
            buffers = [self._buffer(at) for at, flag in enumerate(changed) if flag]
            flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
            counts = [flat.numel(), *[0] * (channel.size - 1)]
            mine = flat if channel.rank == 0 else flat[:0]
            counters.all_gathers += 1
            channel.all_gather(flat, mine, counts=counts, purpose="buffers of the model").wait()
            if channel.rank > 0:
                parts = flat.split([buffer.numel() * buffer.element_size() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        self._known = self._versions()

    def _buffer(self, at: int) -> torch.Tensor:
        module, name = self._places[at]
        buffer = getattr(module, name)
        assert isinstance(buffer, torch.Tensor)
        return buffer

    def _versions(self) -> list[tuple[int, int]]:
        buffers = [self._buffer(at) for at in range(len(self._places))]
        return [(id(buffer), buffer._version) for buffer in buffers]
