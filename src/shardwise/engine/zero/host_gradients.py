"""Gradients on their way to masters that are in the host's memory: bucket by bucket, while backward still runs.

    device        | backward of b2 | backward of b1 | backward of b0 | norm |                      forward ..
    reductions                     | reduce b2      | reduce b1      | reduce b0
    down                                            | b2             | b1   | b0
    host          launches ..                                               | clip, step on b2 | b1 | b0
    up                                                                                         | b2 | b1 | b0

A part becomes a mean before it leaves, so that the host has one pass less. The host waits once: for the norm, and for
the parts that are still on their way then.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.forward.kept_numbers import KeptNumbers, divide_on_device
from shardwise.engine.zero.bucket_memory import page_locked
from shardwise.engine.zero.flat_params import FlatParams, Mark, Owned, Run
from shardwise.engine.zero.grad_buffers import OwnedGradients
from shardwise.plan import Bucket


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
