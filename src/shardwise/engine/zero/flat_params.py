"""The flat buffers of one rank: working copies that the model's parameters view, masters of what it owns."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import digest_of_values
from shardwise.comm.dtypes import torch_dtype
from shardwise.engine.counters import Counters
from shardwise.engine.given_dtensors import put_on, values_of
from shardwise.engine.inventory import Inventory
from shardwise.plan import Bucket, Ownership, Segment, Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """A stretch of a parameter that this rank owns: what its optimizer updates."""

    segment: Segment
    parameter: nn.Parameter
    """The master, a view: in the parameter's shape where parameters stay whole, else 1-D."""


class FlatParams:
    """Working copies and masters, bucket by bucket. Where both have one dtype the master is a view: no second copy."""

    def __init__(
        self,
        inventory: Inventory,
        ownership: Ownership,
        owners: Channel,
        *,
        keep_shapes: bool,
        waiting: Collection[str] = (),
    ) -> None:
        """`waiting`: parameters whose values come later, by `write` or by a load."""
        self.ownership = ownership
        self.owner = owners.rank
        self._owners = owners
        self.working: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self.owned: list[Owned] = []
        """Trainable stretches only; frozen masters are held for the checkpoint."""
        self._parameters = {
            slot.name: inventory.parameters[slot.name] for bucket in ownership.buckets for slot in bucket.slots
        }
        self._slots: dict[str, tuple[int, Slot, Segment | None]] = {}
        """Where a parameter lies: bucket, slot in it, and what this rank owns of it."""
        for index, bucket in enumerate(ownership.buckets):
            self._fill(index, bucket, waiting, keep_shapes=keep_shapes)
        self._owned_elements = [
            sum(segment.run.num_elements for segment in bucket.segments(self.owner)) for bucket in ownership.buckets
        ]
        self._placed = {name: (self._place_of(name), each._version) for name, each in self._parameters.items()}
        self.written: set[str] = set()
        """Parameters that were written to from outside, until ranks have compared them."""

    def part(self, index: int) -> torch.Tensor:
        """The owned part of a working buffer."""
        run = self.ownership.buckets[index].part(self.owner)
        return self.working[index][run.start : run.stop]

    def name_of(self) -> dict[torch.Tensor, str]:
        """The names of the parameters that this rank's optimizers have."""
        return {owned.parameter: owned.segment.name for owned in self.owned}

    def has_masters(self, index: int) -> bool:
        """Whether the masters of a bucket are held apart from the working copies."""
        bucket = self.ownership.buckets[index]
        return bucket.master != bucket.working

    def cast_from_masters(self) -> set[str]:
        """Names of parameters whose working copy is made from a master that is held apart."""
        buckets = [bucket for index, bucket in enumerate(self.ownership.buckets) if self.has_masters(index)]
        return {slot.name for bucket in buckets for slot in bucket.slots}

    def moved(self) -> list[str]:
        """Names of parameters that no longer view their buffer: somebody replaced their storage."""
        return [name for name in self._parameters if self._place_of(name) != self._placed[name][0]]

    def _place_of(self, name: str) -> int:
        """What stays the same as long as nobody gives the parameter another storage."""
        return values_of(self._parameters[name]).data_ptr()

    def holds(self, name: str) -> bool:
        """Whether a parameter lies in one of the buffers."""
        return name in self._parameters

    def is_held_whole(self, index: int) -> bool:
        """Whether the working copy of a whole bucket is here all the time."""
        return True

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """Take values that were written into parameters from outside (`load_state_dict`) over into the masters."""
        written = {name for name, each in self._parameters.items() if each._version != self._placed[name][1]}
        if not written:
            return
        self.written |= written
        for index, bucket in enumerate(self.ownership.buckets):
            for segment in bucket.segments(self.owner) if self.has_masters(index) else ():
                if segment.name in written:
                    span = slice(segment.start, segment.start + segment.run.num_elements)
                    self.masters[index][span].copy_(self.part(index)[span])
        self._placed |= {name: (self._placed[name][0], self._parameters[name]._version) for name in written}

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Of the values of those parameters that are here."""
        held = {name: values_of(self._parameters[name]) for name in names if name in self._parameters}
        return {name: digest_of_values(values) for name, values in held.items()}

    def publish(self, counters: Counters) -> None:
        """Cast the updated masters into the working copy, once per owned element, and give them to all ranks."""
        trainable = [index for index, bucket in enumerate(self.ownership.buckets) if bucket.trainable]
        self._publish(trainable, "parameters of bucket", counters)

    def publish_restored(self, counters: Counters) -> None:
        """Publish masters that were written from outside, frozen ones too."""
        self._publish(range(len(self.ownership.buckets)), "restored parameters of bucket", counters)

    @torch.no_grad()
    def _publish(self, indices: Sequence[int], subject: str, counters: Counters) -> None:
        works = []
        for index in indices:
            bucket = self.ownership.buckets[index]
            part = self.part(index)
            if self.has_masters(index):
                part.copy_(self.masters[index])
                counters.cast_elements += self._owned_elements[index]
            if self._owners.size > 1 and self.is_held_whole(index):
                counters.all_gathers += 1
                purpose = f"{subject} {index}"
                works.append(self._owners.all_gather(self.working[index], part, counts=bucket.counts, purpose=purpose))
        for work in works:
            work.wait()

    @torch.no_grad()
    def write(self, name: str, values: torch.Tensor) -> bool:
        """Take over the values of a parameter, in its own shape; whether it is here."""
        if name not in self._slots:
            return False
        index, slot, segment = self._slots[name]
        self._write(index, slot, segment, values)
        return True

    def _room(self, index: int, num_bytes: int) -> torch.Tensor:
        """Memory for the working copy of a bucket."""
        return self._owners.allocate(num_bytes)

    def _write(self, index: int, slot: Slot, segment: Segment | None, values: torch.Tensor) -> None:
        flat = values.reshape(-1)
        self.working[index][slot.run.start : slot.run.stop].copy_(flat)
        if segment is not None:
            span = slice(segment.start, segment.start + segment.run.num_elements)
            self.masters[index][span].copy_(flat[segment.run.start : segment.run.stop])

    @torch.no_grad()
    def _fill(self, index: int, bucket: Bucket, waiting: Collection[str], *, keep_shapes: bool) -> None:
        dtype = torch_dtype(bucket.working)
        working = self._room(index, bucket.num_elements * dtype.itemsize).view(dtype)
        self.working.append(working)
        part = self.part(index)
        master = part
        if self.has_masters(index):
            master = torch.zeros(bucket.counts[self.owner], dtype=torch_dtype(bucket.master), device=working.device)
        self.masters.append(master)
        segments = {segment.name: segment for segment in bucket.segments(self.owner)}
        for slot in bucket.slots:
            self._slots[slot.name] = index, slot, segments.get(slot.name)
            parameter = self._parameters[slot.name]
            values = values_of(parameter)
            if slot.name not in waiting:
                self._write(index, slot, segments.get(slot.name), values)
            if (segment := segments.get(slot.name)) is not None and bucket.trainable:
                span = slice(segment.start, segment.start + segment.run.num_elements)
                view = master[span].view(values.shape) if keep_shapes else master[span]
                self.owned.append(Owned(segment=segment, parameter=nn.Parameter(view)))
            parameter.grad = None  # its dtype or place may no longer fit
            put_on(parameter, working[slot.run.start : slot.run.stop].view(values.shape))
