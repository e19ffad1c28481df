"""Buffers of the model that forward writes to (running statistics): data rank 0's values hold for all.

The rule of DistributedDataParallel, applied after each update and only to buffers that changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.counters import Counters


class ModelBuffers:
    """The buffers of a model and the values that all ranks had last in common."""

    def __init__(self, model: nn.Module) -> None:
        seen: set[int] = set()
        self._places: list[tuple[nn.Module, str]] = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((module, name))
        self._known = [_Known.of(self._buffer(at)) for at in range(len(self._places))]

    def changed(self) -> list[bool]:
        """For each buffer: whether it was written to, or replaced, since the ranks last agreed."""
        return [not known.holds_for(self._buffer(at)) for at, known in enumerate(self._known)]

    def agreed_unless(self, pending: Sequence[bool]) -> None:
        """Take the present values for those of all ranks, but for buffers that were `pending` (changed) before."""
        for at, was_pending in enumerate(pending):
            if not was_pending:
                self._known[at] = _Known.of(self._buffer(at))

    @torch.no_grad()
    def synchronise(self, channel: Channel, changed: list[bool], counters: Counters) -> None:
        """Give every rank the values that data rank 0 has in the buffers marked `changed`."""
        if channel.size > 1 and any(changed):
            held = [self._buffer(at) for at, flag in enumerate(changed) if flag]
            buffers = [buffer for buffer in held if buffer is not None]
            nothing = torch.empty(0, dtype=torch.uint8, device=channel.device)  # for cat, where no buffer is left
            flat = torch.cat([nothing, *(buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers)])
            counts = [flat.numel(), *[0] * (channel.size - 1)]
            mine = flat if channel.rank == 0 else flat[:0]
            counters.all_gathers += 1
            channel.all_gather(flat, mine, counts=counts, purpose="buffers of the model").wait()
            if channel.rank > 0:
                parts = flat.split([buffer.numel() * buffer.element_size() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        for at, flag in enumerate(changed):
            if flag:
                self._known[at] = _Known.of(self._buffer(at))

    def _buffer(self, at: int) -> torch.Tensor | None:
        """None where forward has taken a buffer away (caches come and go)."""
        module, name = self._places[at]
        return module._buffers.get(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """A buffer as it was when the ranks last agreed."""

    buffer: torch.Tensor | None
    """The tensor itself: the id of one that is gone may be another's."""
    version: int
    values: torch.Tensor | None
    """A copy, where the version does not tell: torch's batch norm writes its running statistics, which are vectors,
    without counting it as a write."""

    @classmethod
    def of(cls, buffer: torch.Tensor | None) -> "_Known":
        if buffer is None:
            return cls(buffer=None, version=0, values=None)
        is_vector = buffer.ndim == 1 and buffer.is_floating_point()
        return cls(buffer=buffer, version=buffer._version, values=buffer.detach().clone() if is_vector else None)

    def holds_for(self, buffer: torch.Tensor | None) -> bool:
        if buffer is not self.buffer or buffer is None:
            return buffer is self.buffer
        return buffer._version == self.version and (self.values is None or torch.equal(buffer, self.values))
