"""The parameters of one rank in flat buffers: working copies that parameters view, masters of what the rank owns."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import digest_of_values
from shardwise.engine.inventory import Inventory, put_on, values_of
from shardwise.engine.reports import Counters
from shardwise.engine.zero.param_buckets import ShardedBucket, WholeBucket, make_buckets
from shardwise.engine.zero.sharded_params import sharded_class
from shardwise.engine.zero.view_copies import refusal_of_write
from shardwise.plan import Ownership, Segment, Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """A stretch of a parameter that this rank owns: what its optimizer updates."""

    segment: Segment
    parameter: nn.Parameter
    """The master, a view: in the parameter's shape where parameters stay whole, else 1-D."""


class FlatParams:
    """Working copies and masters, bucket by bucket."""

    def __init__(
        self,
        inventory: Inventory,
        ownership: Ownership,
        owners: Channel,
        *,
        keep_shapes: bool,
        waiting: Collection[str] = (),
        unit_of: Mapping[str, str] | None = None,
    ) -> None:
        """waiting: parameters whose values come later, by `write` or by a load. unit_of: of parameters that are
        sharded, which are here whole only while their unit is gathered (stage 3)."""
        unit_of = unit_of or {}
        self.ownership = ownership
        self.owner = owners.rank
        self._owners = owners
        self.owned: list[Owned] = []
        """Trainable stretches only; frozen masters are held for the checkpoint."""
        self.buckets: list[WholeBucket] = []
        self.sharded: list[ShardedBucket] = []
        self._parameters = {
            slot.name: inventory.parameters[slot.name] for bucket in ownership.buckets for slot in bucket.slots
        }
        self._slots: dict[str, tuple[WholeBucket, Slot]] = {}
        """The bucket of a parameter, and its slot in it."""
        for bucket, sharded in make_buckets(ownership.buckets, unit_of, owners):
            self.buckets.append(bucket)
            if sharded is not None:
                self.sharded.append(sharded)
            self._fill(bucket, waiting, keep_shapes=keep_shapes)
        self._placed = {name: (self._place_of(name), each._version) for name, each in self._parameters.items()}
        self._kinds: dict[str, type] = {}
        for slot in (slot for bucket in self.sharded for slot in bucket.plan.slots):
            parameter = self._parameters[slot.name]
            self._kinds[slot.name] = type(parameter)
            parameter.__dict__["_rests_in"] = (slot.name, unit_of[slot.name])
            parameter.__class__ = sharded_class(type(parameter))
        self.written: set[str] = set()
        """Parameters that were written to from outside, until ranks have compared them."""

    def name_of(self) -> dict[torch.Tensor, str]:
        """The names of the parameters that this rank's optimizers have."""
        return {owned.parameter: owned.segment.name for owned in self.owned}

    def cast_from_masters(self) -> set[str]:
        """Names of parameters whose working copy is made from a master that is held apart."""
        return {slot.name for bucket in self.buckets if bucket.has_master for slot in bucket.plan.slots}

    def holds(self, name: str) -> bool:
        """Whether a parameter lies in one of the buffers."""
        return name in self._parameters

    # What is sharded ------------------------------------------------------------------------------------------------

    def kind_of(self, name: str) -> type | None:
        """The class of a parameter while it is gathered; None for one that is held whole."""
        return self._kinds.get(name)

    def read_by(self, reader: Callable[..., Any]) -> None:
        """Let `reader` carry out operations on sharded parameters; see `OutsideReads`."""
        for name in self._kinds:
            self._parameters[name].__dict__["_reader"] = reader

    # Writes from outside --------------------------------------------------------------------------------------------

    def moved(self) -> list[str]:
        """Names of parameters that no longer view their buffer: somebody replaced their storage."""
        with torch._C.DisableTorchFunctionSubclass():  # sharded or not
            return [name for name in self._parameters if self._place_of(name) != self._placed[name][0]]

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """Take values that were written into parameters from outside (`load_state_dict`) over into the masters.

        Raises ModelError for writes to a sharded parameter while it was gathered, which are lost.
        """
        with torch._C.DisableTorchFunctionSubclass():  # sharded or not
            versions = {name: each._version for name, each in self._parameters.items()}
        written = [name for name, version in versions.items() if version != self._placed[name][1]]
        if lost := next((name for name in written if name in self._kinds), None):
            raise refusal_of_write(lost)
        for name in written:
            self._slots[name][0].adopt(name)
            self._placed[name] = self._placed[name][0], versions[name]
        self.written.update(written)

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Of the values of those parameters that are here."""
        held = {name: values_of(self._parameters[name]) for name in names if name in self._parameters}
        return {name: digest_of_values(values) for name, values in held.items()}

    @torch.no_grad()
    def write(self, name: str, values: torch.Tensor) -> bool:
        """Take over the values of a parameter, in its own shape; whether it is here."""
        if name not in self._slots:
            return False
        bucket, slot = self._slots[name]
        bucket.write(slot, values)
        return True

    # Updates --------------------------------------------------------------------------------------------------------

    def publish(self, counters: Counters) -> None:
        """Cast the updated masters into the working copy, once per owned element, and give them to all ranks."""
        trainable = [index for index, bucket in enumerate(self.buckets) if bucket.plan.trainable]
        self._publish(trainable, "parameters of bucket", counters)

    def publish_restored(self, counters: Counters) -> None:
        """Publish masters that were written from outside, frozen ones too."""
        self._publish(range(len(self.buckets)), "restored parameters of bucket", counters)

    @torch.no_grad()
    def _publish(self, indices: Sequence[int], subject: str, counters: Counters) -> None:
        works = []
        for index in indices:
            bucket = self.buckets[index]
            if bucket.has_master:
                bucket.part.copy_(bucket.master)
                counters.cast_elements += bucket.num_owned
            if self._owners.size > 1 and bucket.is_whole:
                counters.all_gathers += 1
                # Begun for all buckets before the first is waited for: one bucket travels while the next is cast.
                works.append(
                    self._owners.all_gather(
                        bucket.working, bucket.part, counts=bucket.plan.counts, purpose=f"{subject} {index}"
                    )
                )
        for work in works:
            work.wait()

    def _place_of(self, name: str) -> int:
        return self._slots[name][0].place_of(self._parameters[name])

    @torch.no_grad()
    def _fill(self, bucket: WholeBucket, waiting: Collection[str], *, keep_shapes: bool) -> None:
        for slot in bucket.plan.slots:
            self._slots[slot.name] = bucket, slot
            parameter = self._parameters[slot.name]
            values = values_of(parameter)
            if slot.name not in waiting:
                bucket.write(slot, values)
            if (segment := bucket.segments.get(slot.name)) is not None and bucket.plan.trainable:
                span = slice(segment.start, segment.start + segment.run.num_elements)
                view = bucket.master[span].view(values.shape) if keep_shapes else bucket.master[span]
                self.owned.append(Owned(segment=segment, parameter=nn.Parameter(view)))
            # A gradient from before has the dtype, and maybe the shape, of the parameter as it was.
            parameter.grad = None
            put_on(parameter, bucket.working[slot.run.start : slot.run.stop].view(values.shape))
        bucket.free()
