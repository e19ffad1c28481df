"""The parameters of one rank in flat buffers: working copies that the parameters view, and masters of what it owns.

A bucket of bfloat16 parameters w0 (10 elements), w1 (40) and w2 (16), stages 1 and 2, 2 owners (`plan.buckets`):

    element        0         16                48    56    64        74         96
    working copy   | w2      | w1 . . . . . . .| . . | pad | w0      | pad      |   bfloat16, on both ranks
                   | <------ owner 0 --------> | <------- owner 1 ------------> |   w0.data, w1.data, w2.data: views
    rank 0         | w2      | w1[0:32]        |                                    float32 master; the optimizer has
    rank 1                                     | w1[32:40] | w0                |    1-D views of it (`Owned`)
    update         the optimizers step on masters; `publish` casts each master into its part of the working copy, 48
                   elements per rank; an all-gather gives both parts to both ranks: one cast per element and update

WholeBucket     the working copy of all elements, here all the time (stages 0 to 2)
ShardedBucket   the working copy of the owned part; that of all elements from `fill` to `free` (stage 3)

Where masters are in the host's memory (`offload`), `publish` casts there, and the narrow dtype moves up to the device.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.accelerators import synchronize
from shardwise.comm.digests import digest_of_values
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.forward.batch_digests import digest_of_lines
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.forward.sharded_parameters import refusal_of_write, sharded_class
from shardwise.engine.forward.trained_parameters import ALL, TrainedSet
from shardwise.engine.forward.writes import bits_in, is_due, is_on_host, is_readable
from shardwise.engine.torch_private import DisableTorchFunctionSubclass, storage_of, version_of
from shardwise.engine.zero.bucket_memory import ShardedBucket, WholeBucket, make_buckets
from shardwise.engine.zero.masters import master
from shardwise.errors import ModelError
from shardwise.plan import Ownership, Parameter, Segment, Slot
from shardwise.plan.specs import Offload
from shardwise.space import Box, Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """A stretch of a parameter that this rank owns: what its optimizer updates."""

    segment: Segment
    parameter: nn.Parameter
    """The master, a view: in the parameter's shape where parameters stay whole, else 1-D."""


Mark = TypeVar("Mark", bound=int)

Run: TypeAlias = tuple[str, int, Mark]
"""The first name of what follows each other in memory, its elements, and whether (or how) its parameters count."""


def runs_of(owned: Sequence[Owned], ownership: Ownership, *, counts: Callable[[str], Mark]) -> list[Run[Mark]]:
    """What is owned, as few runs of memory: the first name of each, its elements, and whether its parameters count.

    part of a bucket    | a 6 | b 4 | c 2 | padding |
    a and b count       | a, 10     | c, 2 |           padding belongs to no run: it may be anything
    """
    bucket_of = {slot.name: at for at, bucket in enumerate(ownership.buckets) for slot in bucket.slots}
    runs: list[Run[Mark]] = []
    end: tuple[int, int, Mark] | None = None
    for each in sorted(owned, key=lambda each: (bucket_of[each.segment.name], each.segment.start)):
        name, start, num_elements = each.segment.name, each.segment.start, each.segment.run.num_elements
        if not num_elements:
            continue
        if end == (bucket_of[name], start, counts(name)):
            first, before, _ = runs.pop()
            runs.append((first, before + num_elements, counts(name)))
        else:
            runs.append((name, num_elements, counts(name)))
        end = bucket_of[name], start + num_elements, counts(name)
    return runs


def note_masters(buckets: Iterable[WholeBucket]) -> None:
    """What masters hold now is what they are to hold."""
    for each in buckets:
        each.master_memory.note()


class FlatParams:
    """Working copies and masters, bucket by bucket."""

    def __init__(
        self,
        inventory: Inventory,
        ownership: Ownership,
        owners: Channel,
        *,
        whole: Collection[str],
        waiting: Collection[str] = (),
        unit_of: Mapping[str, str] | None = None,
        offload: Offload | None = None,
    ) -> None:
        """whole: parameters that are cut for no owner; the masters of others are 1-D. waiting: parameters whose values
        come later, by `write` or by a load. unit_of: of parameters that are sharded, which are here whole only
        while their unit is gathered (stage 3). offload: what is on the host, where the owners have devices."""
        unit_of = unit_of or {}
        self.is_offloaded = owners.device.type != "cpu" and offload is not None
        """Whether masters are in the memory of the host, and working copies in that of a device."""
        self.ownership = ownership
        self.owner = owners.rank
        self.owners = owners
        self.owned: list[Owned] = []
        """Trainable stretches only; frozen masters are held for the checkpoint."""
        self.buckets: list[WholeBucket] = []
        self.sharded: list[ShardedBucket] = []
        self._parameters = {
            slot.name: inventory.parameters[slot.name] for bucket in ownership.buckets for slot in bucket.slots
        }
        self._in_no_bucket = {
            name: each
            for name, each in inventory.parameters.items()
            if name not in self._parameters and is_readable(each)
        }
        """Frozen ones that nobody casts or cuts."""
        self._slots: dict[str, tuple[WholeBucket, Slot]] = {}
        """The bucket of a parameter, and its slot in it."""
        shapes = {spec.name: spec.global_shape for spec in inventory.specs}
        for bucket in make_buckets(ownership.buckets, unit_of, owners, offload if self.is_offloaded else None):
            self.buckets.append(bucket)
            if isinstance(bucket, ShardedBucket):
                self.sharded.append(bucket)
            self._fill(bucket, waiting, whole, shapes)
        # Taken once all are in place. Later, another place says that somebody replaced the storage of a parameter
        # (`.data = ..`, `model.to(..)`), and another version that somebody wrote to it. Lists, and not a table by name:
        # every step compares them.
        here = self._parameters
        self._names, self._all = list(here), list(here.values())
        sharded = {slot.name for bucket in self.sharded for slot in bucket.plan.slots}
        # Of one that is sharded the storage: its address changes whenever it is gathered.
        self._place_functions = [storage_of if name in sharded else torch.Tensor.data_ptr for name in here]
        self._places = self._places_now()
        self._watched = here | self._in_no_bucket
        """Parameters whose counts of writes are compared."""
        self._versions = self._versions_now()
        self._kinds: dict[str, type] = {}
        for slot in (slot for bucket in self.sharded for slot in bucket.plan.slots):
            parameter = self._parameters[slot.name]
            self._kinds[slot.name] = type(parameter)
            parameter.__dict__["_unit_place"] = (slot.name, unit_of[slot.name])
            # Last of all: from here on, torch functions on the parameter go through the new class.
            parameter.__class__ = sharded_class(type(parameter))
        self.written: set[str] = set()
        """Parameters that were written to from outside, until ranks have compared them."""
        self.written_masters: set[str] = set()
        """A parameter for each bucket whose masters were, until its owners have given them to all ranks."""
        self._casts = [each for each in self.buckets if each.is_cast and not isinstance(each, ShardedBucket)]
        self._num_looks = 0
        self._reads_all = False
        self._is_learned = False
        """Whether somebody writes without a count, and everything is compared in each look."""

    def cast_from_masters(self) -> set[str]:
        """Names of parameters whose working copy is made from a master of another dtype."""
        return {slot.name for bucket in self.buckets if bucket.is_cast for slot in bucket.plan.slots}

    def holds(self, name: str) -> bool:
        """Whether a parameter is in one of the buffers."""
        return name in self._parameters

    # What is sharded ------------------------------------------------------------------------------------------------

    def kind_of(self, name: str) -> type | None:
        """The class of a parameter while it is gathered; None for one that is held whole."""
        return self._kinds.get(name)

    def read_by(self, reader: Callable[..., Any]) -> None:
        """Let `reader` carry out operations on sharded parameters; see `OutsideReads`."""
        # On each parameter and not in the class: several engines in one process share a class (`sharded_class`).
        for name in self._kinds:
            self._parameters[name].__dict__["_reader"] = reader

    # Writes from outside --------------------------------------------------------------------------------------------

    def moved(self) -> list[str]:
        """Names of parameters that no longer view their buffer: somebody replaced their storage."""
        now = self._places_now()
        if now == self._places:
            return []
        return [name for name, one, other in zip(self._names, now, self._places, strict=True) if one != other]

    def adopt_writes(self, *, reads_all: bool = False) -> None:
        """Take values that were written into parameters from outside (`load_state_dict`) over into the masters.

        reads_all: compare all elements, where a look reads some. Raises ModelError, once, for writes to a sharded
        parameter while it was gathered, which are lost.
        """
        self.take_up_masters()
        # Without this the next `publish` would cast the old master over the written values, without a word.
        self._num_looks += 1
        before, self._reads_all = self._reads_all, reads_all or self._is_learned or is_due(self._num_looks)
        for bucket in self.sharded if self._reads_all != before else ():
            bucket.turn_to(reads_all=self._reads_all)
        written = self.found_written()
        if not written:
            return
        # Before a refusal: what is lost is refused once, and training goes on with the values that the owners have.
        self._versions = self._versions_now()
        if lost := next((name for name in written if name in self._kinds), None):
            raise refusal_of_write(lost)
        for name in written:
            if name in self._slots:
                self._slots[name][0].adopt(name)
        note_masters(self.buckets)
        # What is written on one rank only would tear the copies of data ranks apart: the next step compares digests.
        self.written.update(written)

    def take_up_masters(self, *, sends: bool = True) -> None:
        """Take values that were written to masters from outside over into this rank's part of the working copies.

        `publish_masters` gives them to the others; before `adopt_writes`, which goes by the working copies. sends:
        whether `publish_masters` follows.
        """
        for bucket in self.buckets:
            memory = bucket.master_memory
            # Where a master is the working copy, its values do not show who wrote. To give them to all is always right.
            is_written = memory.is_written(reads=bucket.has_master or sends)
            if memory.is_touched and bucket.has_master and not (is_written or is_on_host(bucket.master)):
                # Both hold the same unless one of them was written. Torch counts most writes to the model.
                is_written = bool(bucket.other_than_casts(reads_all=True)) and not self._counted()
            if not (is_written and bucket.plan.trainable):
                continue
            self.settle()
            bucket.publish()
            note_masters([bucket])
            self.written_masters.add(bucket.plan.slots[0].name)
            if not isinstance(bucket, ShardedBucket):  # no rank holds copies of those
                self.written.update(slot.name for slot in bucket.plan.slots)

    def check_masters(self, doing: str, *, has_stages: bool) -> None:
        """Before a forward that not all ranks run. Raises ModelError for weights that others do not have yet."""
        self.take_up_masters(sends=False)
        if self.written_masters and (has_stages or self.is_shared):
            raise ModelError(
                f"weights were written through the optimizer since the last step, and {doing} does not bring them to "
                "the other ranks. Call engine.evaluate(batch) or engine.step first, which do"
            )

    def publish_masters(self, counters: Counters, names: Collection[str]) -> None:
        """Give all ranks what was written to masters. names: `written_masters` of all ranks."""
        indices = [
            at for at, bucket in enumerate(self.buckets) if any(each.name in names for each in bucket.plan.slots)
        ]
        self._publish(indices, "written parameters of bucket", counters)
        self.written_masters.clear()

    def found_written(self, *, compares: bool = True) -> list[str]:
        """Parameters that hold other values than the engine gave them; what is lost is named once. Not `compares`: of
        those that are not lost only the ones to which torch has counted a write."""
        found = counted = self._counted()
        if compares:
            reads_all = self._reads_all
            found = [*found, *(name for each in self._casts for name in each.other_than_casts(reads_all=reads_all))]
        for each in self.sharded:
            if each.lost:
                found = found + sorted(each.lost)
                each.lost = set()
        self._is_learned |= len(found) > len(counted) and not set(found) <= set(counted)
        return list(dict.fromkeys(found))

    def forget(self, names: Collection[str]) -> None:
        """Writes to these were refused; see `adopt_writes`."""
        now = self._versions_now()
        lost = self._kinds.keys() & names
        self._versions = [now[at] if name in lost else self._versions[at] for at, name in enumerate(self._watched)]

    def _counted(self) -> list[str]:
        """Parameters to which torch has counted a write."""
        now = self._versions_now()
        if now == self._versions:
            return []
        return [name for name, one, other in zip(self._watched, now, self._versions, strict=True) if one != other]

    def _versions_now(self) -> list[int]:
        with DisableTorchFunctionSubclass():  # sharded or not
            return [*map(version_of, self._watched.values())]

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Of the values of those parameters that are here."""
        held = self._watched
        return {name: digest_of_values(held[name]) for name in names if name in held}

    @cached_property
    def own_masters(self) -> list[str]:
        """Whole parameters that have no other master. A write that torch does not count shows in no cast of theirs."""
        buckets = (each for each in self.buckets if not (each.has_master or isinstance(each, ShardedBucket)))
        return [*(slot.name for each in buckets for slot in each.plan.slots), *self._in_no_bucket]

    @torch.no_grad()
    def digest_where_due(self) -> str:
        """Of all `own_masters`, in the looks that compare everything; empty in others. Waits for a device."""
        # Data ranks hold the same values. The first steps show most programs that write to one rank's alone; a digest
        # reads the model, and later steps rarely do.
        if not (is_due(self._num_looks) and self.own_masters):
            return ""
        held = [self._watched[name].detach() for name in self.own_masters]
        lines = [digest_of_values(each) for each in held if is_on_host(each)]
        # A device adds up bits faster than values leave it.
        if sums := [bits_in(each.reshape(-1)).sum() for each in held if not is_on_host(each)]:
            lines += map(str, torch.stack(sums).tolist())
        return digest_of_lines(lines)

    @torch.no_grad()
    def write(self, name: str, values: torch.Tensor) -> bool:
        """Take over the values of a parameter, in its own shape; whether it is here."""
        if name not in self._slots:
            return False
        bucket, slot = self._slots[name]
        bucket.write(slot, values)
        return True

    # Updates --------------------------------------------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """Whether some of the values here are of other owners."""
        return self.owners.size > 1

    @property
    def publishes_in_parts(self) -> bool:
        """Whether a bucket can travel to other ranks, or to the device, while the next one is updated."""
        if self.is_offloaded:
            return sum(each.plan.trainable for each in self.buckets) > 1
        whole = sum(each.plan.trainable and not isinstance(each, ShardedBucket) for each in self.buckets)
        return self.owners.size > 1 and self.owners.progresses_alone and whole > 1

    def bucket_of(self, owned: Owned) -> int:
        """The number of the bucket in which an owned stretch is."""
        return self._numbers[owned.segment.name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {slot.name: at for at, bucket in enumerate(self.buckets) for slot in bucket.plan.slots}

    def publish(
        self,
        counters: Counters,
        *,
        trained: TrainedSet = ALL,
        before: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Cast the updated masters into the working copy, once per owned element, and give them to all ranks.

        Of buckets with something `trained`. before: what updates a bucket by its number; the buckets before are on
        their way then. meanwhile: is called while they are on their way, and may read masters.
        """
        trainable = [index for index, bucket in enumerate(self.buckets) if bucket.plan.trainable]
        if trained is not ALL:
            trainable = [at for at in trainable if trained.meets(slot.name for slot in self.buckets[at].plan.slots)]
        if self.publishes_in_parts:
            # The smallest first: nothing travels while it is updated. Links are slower than updates, which write the
            # owned part of a bucket where links move all of it.
            trainable.sort(key=lambda index: self.buckets[index].plan.num_elements)
        self._publish(trainable, "parameters of bucket", counters, before, meanwhile)

    def settle(self) -> None:
        """Wait until no device reads the host's memory any more: somebody else than an update is about to write."""
        if self.is_offloaded:
            synchronize(self.owners.device)

    def publish_restored(self, counters: Counters) -> None:
        """Publish masters that were written from outside, frozen ones too."""
        self._publish(range(len(self.buckets)), "restored parameters of bucket", counters)

    @torch.no_grad()
    def _publish(
        self,
        indices: Sequence[int],
        subject: str,
        counters: Counters,
        before: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        works = []
        for index in indices:
            if before is not None:
                before(index)
            bucket = self.buckets[index]
            # Before the transfer, so that the wire carries the narrow dtype and no rank casts what it does not own.
            bucket.publish()
            counters.cast_elements += bucket.num_owned if bucket.is_cast else 0
            # What is sharded is not sent here: the next forward gathers each unit, perhaps several times.
            if self.owners.size > 1 and not isinstance(bucket, ShardedBucket):
                counters.all_gathers += 1
                # Begun for all buckets before the first is waited for: one bucket travels while the next is cast.
                works.append(
                    self.owners.all_gather(
                        bucket.working, bucket.part, counts=bucket.plan.counts, purpose=f"{subject} {index}"
                    )
                )
        if meanwhile is not None:
            meanwhile()
        for work in works:
            work.wait()
        note_masters([self.buckets[index] for index in indices])

    def _places_now(self) -> list[int]:
        """For each parameter a value that stays the same until it gets another storage."""
        with DisableTorchFunctionSubclass():  # sharded or not
            return [place_of(each) for place_of, each in zip(self._place_functions, self._all, strict=True)]

    @torch.no_grad()
    def _fill(
        self,
        bucket: WholeBucket,
        waiting: Collection[str],
        whole: Collection[str],
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        for slot in bucket.plan.slots:
            self._slots[slot.name] = bucket, slot
            parameter = self._parameters[slot.name]
            values = parameter.detach()
            if slot.name not in waiting:
                bucket.write(slot, values)
            if (segment := bucket.segments.get(slot.name)) is not None and bucket.plan.trainable:
                span = slice(segment.start, segment.start + segment.run.num_elements)
                # Not the model's parameter, which has all elements, in the working dtype. It views the master, so that
                # the optimizer, which updates in place, updates that.
                view = bucket.master[span].view(values.shape) if slot.name in whole else bucket.master[span]
                is_part = tuple(view.shape) != shapes[slot.name]
                held = master(view, bucket.master_memory, is_part=is_part)
                self.owned.append(Owned(segment=segment, parameter=held))
            # A gradient from before has the dtype, and maybe the shape, of the parameter as it was.
            parameter.grad = None
            parameter.data = bucket.working[slot.run.start : slot.run.stop].view(values.shape)
        bucket.free()


def whole(name: str, tensor: torch.Tensor) -> dict[Piece, torch.Tensor]:
    """A tensor as one piece that holds all its elements."""
    return {Piece(name=name, dtype=dtype_name(tensor.dtype), global_shape=tuple(tensor.shape)): tensor}


def placed(
    name: str, tensor: torch.Tensor, spec: Parameter, segment: Segment | None = None
) -> dict[Piece, torch.Tensor]:
    """The pieces, with views, of a tensor that has one element for each of a parameter, or of a segment of it.

    A parameter that is cut along tp has the pieces of its portion: several where that is made of several boxes.
    """
    dtype = dtype_name(tensor.dtype)
    run = None if segment is None else (segment.run.start, segment.run.stop)
    # A whole parameter is a piece without a run, whichever partition made it: the same checkpoint bytes.
    if run == (0, spec.num_elements):
        run = None
    local = tensor if run is not None else tensor.view(spec.shape)
    if spec.portion is None:
        return {Piece(name=name, dtype=dtype, global_shape=spec.shape, run=run): local}
    flat = tensor.view(-1)
    pieces = {}
    # The portion's own elements are a dense block here; in the global tensor they may be several boxes (q, k and v of
    # one fused matrix).
    for piece, part in spec.portion.pieces(name, dtype, run):
        held = local
        if part is not None:
            block = flat[part.start : part.start + math.prod(part.block)].view(part.block)
            held = block[Box(part.offset, piece.shape).slices()]
        pieces[piece] = held
    return pieces
