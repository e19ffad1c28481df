"""Buffers through which gradients go to their owners: as few as there are gradients on their way at a time."""

from collections import Counter
from dataclasses import dataclass

import torch

from shardwise.comm import Channel
from shardwise.plan import Ownership, Precision
from shardwise.plan.memory import buffer_bytes, places_in_buffers

_NUM_KEPT = 2
"""One fills while the other is reduced."""


@dataclass(kw_only=True, slots=True, eq=False)
class GradBuffer:
    """Memory for the gradients of buckets that come together: of one, or of those of a unit."""

    group: int
    memory: torch.Tensor
    num_to_launch: int
    num_to_land: int


class GradBuffers:
    """The buffers of one rank. Buckets are told by their number among the trainable ones of the ownership."""

    def __init__(self, ownership: Ownership, precision: Precision, owners: Channel, *, by_unit: bool) -> None:
        """`by_unit`: the gradients of a unit come together."""
        self._places = places_in_buffers(ownership, precision, by_unit=by_unit)
        self._num_bytes = buffer_bytes(ownership, precision, by_unit=by_unit)
        self._sizes = Counter(place.group for place in self._places)
        self._owners = owners
        self._held: dict[int, GradBuffer] = {}
        """Group -> its buffer, until all of its buckets are launched."""
        self._num_used = 0
        self.free: list[torch.Tensor] = []
        self.peak = 0
        """Most buffers that were in use at a time."""

    def give(self, bucket: int) -> GradBuffer:
        """The buffer of a bucket: that of its group, if it has one."""
        group = self._places[bucket].group
        if (buffer := self._held.get(group)) is None:
            memory = self.free.pop() if self.free else self._owners.allocate(self._num_bytes)
            count = self._sizes[group]
            buffer = self._held[group] = GradBuffer(group=group, memory=memory, num_to_launch=count, num_to_land=count)
            self._num_used += 1
            self.peak = max(self.peak, self._num_used)
        return buffer

    def part(self, bucket: int, buffer: GradBuffer, dtype: torch.dtype) -> torch.Tensor:
        """The place of a bucket in its buffer."""
        place = self._places[bucket]
        return buffer.memory[place.start_bytes : place.stop_bytes].view(dtype)

    def launched(self, buffer: GradBuffer) -> None:
        """The reduction of one of its buckets has begun."""
        buffer.num_to_launch -= 1
        if not buffer.num_to_launch:
            del self._held[buffer.group]

    def landed(self, buffer: GradBuffer) -> None:
        """The reduction of one of its buckets has ended."""
        buffer.num_to_land -= 1
        if not buffer.num_to_land:
            self.free.append(buffer.memory)
            self._num_used -= 1

    def forget(self) -> None:
        """What is in use belongs to an update that was given up."""
        self._held.clear()
        self._num_used = 0

    def trim(self) -> None:
        """Give back what is seldom needed."""
        del self.free[_NUM_KEPT:]
