"""Memory for gradients: buffers in turn, copies to them, views of sums, and rooms on the host.

Two buffers serve gradients that are reduced after every microbatch: here of four buckets, which backward completes one
after the other (stage 2; at stage 3 a buffer has all buckets of a unit). The first gradient of b2 waits for b0, which
gives A back:

    backward    | b0        | b1        | b2        | b3        |
    buffer A    | fills b0  | reduce b0 | fills b2  | reduce b2 |
    buffer B                | fills b1  | reduce b1 | fills b3  | reduce b3
    waits                                 b0^         b1^           b2, b3 in `GradReduce.reduce`

Where transfers go on only while somebody waits, or the sum needs the scratch, the launch of b1 waits for b0 already.

Gradients of masters that are in the host's memory travel there bucket by bucket, while backward still runs:

    device        | backward of b2 | backward of b1 | backward of b0 | norm |                      forward ..
    reductions                     | reduce b2      | reduce b1      | reduce b0
    down                                            | b2             | b1   | b0
    host          launches ..                                               | clip, step on b2 | b1 | b0
    up                                                                                         | b2 | b1 | b0

A part becomes a mean before it leaves, so that the host has one pass less. The host waits once: for the norm, and for
the parts that are still on their way then.

The few numbers that a step makes on a device have memory that the next step uses again: steady steps take none.
"""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from shardwise.comm import Channel
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.zero.bucket_memory import page_locked
from shardwise.engine.zero.flat_params import FlatParams, Mark, Owned, Run
from shardwise.plan import Bucket, Ownership, Precision
from shardwise.plan.memory import buffer_bytes, places_in_buffers


class KeptNumbers:
    """Places by name. A step writes to one behind the kernels of the last step that read it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._places: dict[str, torch.Tensor] = {}

    def place(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """The place of this name, whose values mean nothing yet; a new one where shape or dtype differ from before."""
        found = self._places.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            found = self._places[name] = torch.empty(shape, dtype=dtype, device=self.device)
        return found

    def one(self, dtype: torch.dtype) -> torch.Tensor:
        """The number 1; nobody writes to it."""
        name = f"one {dtype}"
        if name not in self._places:
            self._places[name] = torch.ones((), dtype=dtype, device=self.device)
        return self._places[name]


def divide_on_device(
    parts: Sequence[torch.Tensor], divisor: int, scale: torch.Tensor | None, kept: KeptNumbers
) -> None:
    """Divide gradients in place, by the number and by the scale of the losses if there is one."""
    if not parts:  # a stage that trains nothing; torch refuses empty lists
        return
    if scale is not None:
        place = kept.place("divisor", dtype=scale.dtype)
        torch._foreach_div_(list(parts), torch.mul(scale, divisor, out=place))
    elif divisor > 1:
        torch._foreach_div_(list(parts), divisor)


_NUM_KEPT = 2
"""One fills while the other is reduced."""

MOST_ELEMENTS = 1 << 14
"""Of all that wait together. A gradient of more than a quarter of it is copied at once."""

Views: TypeAlias = "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"
"""The flat place of a bucket in a buffer, and those of its parameters by name."""


@dataclass(slots=True, eq=False)
class _Room:
    memory: torch.Tensor
    views: dict[int, Views] = field(default_factory=dict)
    """Of each bucket that had its place here before: buffers come again in every microbatch."""


@dataclass(kw_only=True, slots=True, eq=False)
class GradBuffer:
    """Memory for the gradients of buckets that come together: of one, or of those of a unit."""

    group: int
    room: _Room
    num_to_launch: int
    num_to_land: int


class GradBuffers:
    """The buffers of one rank. A bucket has its number among the trainable ones of the ownership."""

    def __init__(self, ownership: Ownership, precision: Precision, owners: Channel, *, by_unit: bool) -> None:
        """`by_unit`: the gradients of a unit come together."""
        self._places = places_in_buffers(ownership, precision, by_unit=by_unit)
        self._num_bytes = buffer_bytes(ownership, precision, by_unit=by_unit)
        self._sizes = Counter(place.group for place in self._places)
        """Group -> its buckets that are reduced."""
        self._num_kept = min(_NUM_KEPT, len(self._sizes))
        self._num_taken = 0
        """Buffers that are free or in use."""
        self._owners = owners
        self._held: dict[int, GradBuffer] = {}
        """Group -> its buffer, until all of its buckets are launched."""
        self.free: list[_Room] = []
        self._largest_part = max(
            (each.counts[owners.rank] * torch_dtype(each.master).itemsize for each in ownership.buckets), default=0
        )
        self.scratch_memory = torch.empty(0, dtype=torch.uint8, device=owners.device)
        self._scratch_views: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def expect(self, buckets: Collection[int]) -> None:
        """Only these are reduced from now on."""
        self._sizes = Counter(self._places[each].group for each in buckets)

    def is_short(self, bucket: int) -> bool:
        """Whether `give` would take memory that is not kept."""
        is_held = self._places[bucket].group in self._held
        return not is_held and not self.free and self._num_taken >= self._num_kept

    def give(self, bucket: int) -> GradBuffer:
        """The buffer of a bucket: that of its group, if it has one."""
        group = self._places[bucket].group
        if (buffer := self._held.get(group)) is None:
            # All buffers have the size of the largest group, so that any of them serves any group.
            room = self.free.pop() if self.free else self._take()
            count = self._sizes[group]
            buffer = self._held[group] = GradBuffer(group=group, room=room, num_to_launch=count, num_to_land=count)
        return buffer

    def part(self, bucket: int, buffer: GradBuffer, dtype: torch.dtype) -> torch.Tensor:
        """The place of a bucket in its buffer."""
        place = self._places[bucket]
        return buffer.room.memory[place.start_bytes : place.stop_bytes].view(dtype)

    def views(self, bucket: int, buffer: GradBuffer, make: Callable[[], Views]) -> Views:
        """The views of a bucket in a buffer, as `make` made them once."""
        if (found := buffer.room.views.get(bucket)) is None:
            found = buffer.room.views[bucket] = make()
        return found

    def launched(self, buffer: GradBuffer) -> None:
        """The reduction of one of its buckets has begun."""
        buffer.num_to_launch -= 1
        # The group is closed when all of it is on its way: the same unit in the next microbatch takes another buffer,
        # as this one is still being read.
        if not buffer.num_to_launch:
            del self._held[buffer.group]

    def landed(self, buffer: GradBuffer) -> None:
        """The reduction of one of its buckets has ended."""
        buffer.num_to_land -= 1
        if not buffer.num_to_land:
            self.free.append(buffer.room)

    def scratch(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for one part of a sum: one reduction that needs it is in flight."""
        # Not allocated with one microbatch in the master's dtype, which needs none; then at once for the largest.
        if (view := self._scratch_views.get((num_elements, dtype))) is not None:
            return view
        num_bytes = num_elements * dtype.itemsize
        if self.scratch_memory.numel() < num_bytes:
            self.scratch_memory = self.scratch_memory.new_empty(self._largest_part)
        view = self._scratch_views[num_elements, dtype] = self.scratch_memory[:num_bytes].view(dtype)
        return view

    def forget_scratch(self) -> None:
        """Perhaps nothing needs it any more."""
        self._scratch_views.clear()
        self.scratch_memory = self.scratch_memory.new_empty(0)

    def forget(self) -> None:
        """What is in use belongs to an update that was given up."""
        # It does not go back to `free`: a transfer that nobody waited for may still read it.
        self._held.clear()
        self._num_taken = len(self.free)

    def trim(self) -> None:
        """Give back what is seldom needed."""
        # Backward may fill several buckets side by side: those of a block and of the module around it, say. More so in
        # the first update, where a bucket waits for parameters that no backward reaches (`expect`).
        if len(self.free) > self._num_kept:
            self._num_taken -= len(self.free[self._num_kept :])
            del self.free[self._num_kept :]

    def _take(self) -> _Room:
        self._num_taken += 1
        return _Room(self._owners.allocate(self._num_bytes))


class GradCopies:
    """Copies into buffers, and additions to them, that have not been made yet: small ones go in one call of torch.

        hook of w0, of w1, ..    p.grad is taken, and waits with its place in the buffer
        `flush`                  all of them are copied; those that are added to what is there follow

    A call costs the host some microseconds, whatever the size. What waits takes 64 KiB of float32 at most, and is
    flushed before anybody reads the buffer.
    """

    __slots__ = ("_added", "_copied", "_num_elements", "_sums", "_targets", "_terms")

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._copied: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._terms: list[torch.Tensor] = []
        self._added: set[int] = set()
        self._num_elements = 0

    def put(self, target: torch.Tensor, gradient: torch.Tensor, *, adds: bool) -> None:
        """Let `target` have the values of a gradient, or add them to it."""
        if adds:
            # Several tensors are added side by side: two terms of one sum would race.
            if (place := id(target)) in self._added:
                self.flush()
            self._added.add(place)
            self._sums.append(target)
            self._terms.append(gradient)
        else:
            self._targets.append(target)
            self._copied.append(gradient)
        self._num_elements += (num_elements := gradient.numel())
        if self._num_elements > MOST_ELEMENTS or num_elements > MOST_ELEMENTS >> 2:
            self.flush()

    def flush(self) -> None:
        """Make all copies, and then all additions."""
        if not self._num_elements:
            return
        with torch.no_grad():
            if self._targets:
                torch._foreach_copy_(self._targets, self._copied)
            if self._sums:
                torch._foreach_add_(self._sums, self._terms)
        self.forget()

    def forget(self) -> None:
        """Make none of them: they belong to an update that was given up."""
        for each in (self._targets, self._copied, self._sums, self._terms, self._added):
            each.clear()
        self._num_elements = 0


class OwnedGradients:
    """Views of the reduced gradients. They are made once: buffers serve many updates."""

    def __init__(self) -> None:
        self._parts: Sequence[torch.Tensor] = ()
        """The owned parts of buckets that are viewed."""
        self._views: dict[str, torch.Tensor] = {}
        self._runs: dict[int, tuple[Sequence[Run[Any]], list[tuple[torch.Tensor, Any]]]] = {}
        """By the list of runs that was asked for."""

    def views(
        self, owned: Sequence[Owned], parts: Sequence[torch.Tensor], part_of: Callable[[str], torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The gradients of what is owned, by name. `parts`: the owned parts of all buckets. `part_of`: the one with a
        parameter."""
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            self._views, self._runs = {}, {}
            for each in owned:
                segment = each.segment
                span = slice(segment.start, segment.start + segment.run.num_elements)
                self._views[segment.name] = part_of(segment.name)[span].view(each.parameter.shape)
            self._parts = list(parts)
        return self._views

    def runs(self, runs: Sequence[Run[Mark]]) -> Sequence[tuple[torch.Tensor, Mark]]:
        """The same gradients as flat runs."""
        known = self._runs.get(id(runs))
        if known is None or known[0] is not runs:
            made = [(self._views[name].as_strided((size,), (1,)), counts) for name, size, counts in runs]
            known = self._runs[id(runs)] = runs, made
        return known[1]

    def forget(self) -> None:
        """The buffers are given back: views would keep them."""
        self._parts, self._views, self._runs = (), {}, {}


class HostGradients:
    """The owned gradients of one rank in page-locked memory of the host."""

    def __init__(
        self, buffers: FlatParams, device: torch.device, changes: Callable[[Collection[str]], bool] | None
    ) -> None:
        """changes: whether reduced gradients of some of these parameters may change again before `send_rest`."""
        self._stream = torch.Stream(device)
        self._changes = changes
        self._rooms: dict[str, torch.Tensor] = {}
        """The owned part of a bucket, by its first parameter."""
        self._room_of: dict[str, torch.Tensor] = {}
        for bucket in (each.plan for each in buffers.buckets if each.plan.trainable):
            room = page_locked(bucket.counts[buffers.owner], torch_dtype(bucket.master))
            self._rooms[bucket.slots[0].name] = room
            self._room_of |= {slot.name: room for slot in bucket.slots}
        self.parts: Sequence[torch.Tensor] = list(self._rooms.values())
        """Flat, valid after `arrived`."""
        self._views = OwnedGradients()
        self._divisor = 1
        self._scale: torch.Tensor | None = None
        self._numbers = KeptNumbers(device)
        self._kept: list[tuple[str, torch.Tensor]] = []
        self._last: torch.Event | None = None
        """What the device passes when all that was sent has come."""

    def begin(self, divisor: int, scale: torch.Tensor | None) -> None:
        """An update begins. divisor and scale: what makes means of its sums, on the device."""
        self._divisor, self._scale = divisor, scale
        self._kept.clear()
        # Of an update that was given up, whose gradients the device is about to overwrite.
        self._wait()

    def send(self, bucket: Bucket, part: torch.Tensor) -> None:
        """The owned part of a bucket has its last value; it stays as it is, but for the division and the clip."""
        name = bucket.slots[0].name
        if self._changes is not None and self._changes([slot.name for slot in bucket.slots]):
            self._kept.append((name, part))
        else:
            self._send(name, part)

    def send_rest(self) -> None:
        """Send what was held back, too."""
        for name, part in self._kept:
            self._send(name, part)
        self._kept.clear()

    def arrived(self, owned: Sequence[Owned]) -> Mapping[str, torch.Tensor]:
        """The gradients of what is owned, by name, in the shapes of the masters; the host waits for them."""
        self._wait()
        return self._views.views(owned, self.parts, self._room_of.__getitem__)

    def runs_of(self, runs: Sequence[Run[Mark]]) -> Sequence[tuple[torch.Tensor, Mark]]:
        """The same as flat runs, each with its mark; asked for after `arrived`."""
        return self._views.runs(runs)

    @torch.no_grad()
    def _send(self, name: str, part: torch.Tensor) -> None:
        divide_on_device([part], self._divisor, self._scale, self._numbers)
        # On a stream of copies alone: nothing that computes waits for them. The memory stays the gradients' until the
        # host has waited.
        self._stream.wait_event(torch.accelerator.current_stream(part.device).record_event())
        with self._stream:
            self._rooms[name].copy_(part, non_blocking=True)
        self._last = self._stream.record_event()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.synchronize()
            self._last = None
