"""Buckets and owners: which parameters share a flat buffer, and who owns which elements of it.

A bucket is a flat buffer that one collective moves. Its elements are cut into one part per owner, in owner order. For
parameters w0, w1 and w2 of 10, 40 and 16 elements, filled from the last to the first, and 2 owners:

    element   0         16                    48      56    64        74             96
    slice     | w2 (16) | w1 (40) . . . . . . . . . . | pad | w0 (10) | pad . . . . . |
              | <-- owner 0: w2, w1[0:32] --> | <-- owner 1: w1[32:40], w0 ---------> |   counts 48, 48

    element   0                   40    48        64        74    80
    whole     | w1 (40) . . . . . | pad | w2 (16) | w0 (10) | pad |
              | <-- owner 0: w1 ------> | <-- owner 1: w2, w0 --> |                       counts 48, 32

`slice` cuts parameters, and suits optimizers that work element by element. `whole` cuts none. Under both, what an
optimizer must see whole is cut for no owner. Padding belongs to no parameter: no norm, optimizer or file ever reads it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.matrix_homes import Home, share_out
from shardwise.plan.outlines import Parameter
from shardwise.plan.specs import Sharding
from shardwise.plan.units import Unit
from shardwise.space import Run

# Kernels load 16 to 64 bytes at a time, and round by the alignment of what they read. Aligned slots keep the views of
# parameters fit for them, and their results those of a tensor that torch allocated itself.
ALIGNMENT_ELEMENTS = 16
"""Slots and parts start at multiples of this: 32 bytes of a 2-byte dtype, 64 of float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter in its bucket."""

    name: str
    start: int
    num_elements: int

    @property
    def run(self) -> Run:
        """Its elements of the bucket."""
        return Run(self.start, self.start + self.num_elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of a parameter within the part of one owner."""

    name: str
    run: Run
    """Row-major elements of the parameter."""
    start: int
    """Where they begin in the owner's part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Parameters of one dtype fused in one flat buffer."""

    working: str
    master: str
    trainable: bool
    slots: tuple[Slot, ...]
    counts: tuple[int, ...]
    """Elements of each owner's part, padding included."""
    unit: str | None = None
    """What its parameters are gathered and reduced with; None: nothing in particular."""

    @property
    def num_elements(self) -> int:
        """Elements of the buffer, padding included."""
        return sum(self.counts)

    def part(self, owner: int) -> Run:
        """The elements of the bucket that `owner` owns."""
        start = sum(self.counts[:owner])
        return Run(start, start + self.counts[owner])

    def segments(self, owner: int) -> Iterator[Segment]:
        """The stretches of parameters in the part of `owner`, in order; empty stretches are left out."""
        part = self.part(owner)
        for slot in self.slots:
            if (shared := slot.run.intersect(part)) is not None and shared.num_elements:
                yield Segment(name=slot.name, run=shared.shift(-slot.start), start=shared.start - part.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """All buckets of a model, in the order in which backward completes them."""

    num_owners: int
    num_replicas: int
    buckets: tuple[Bucket, ...]
    homes: Mapping[str, Home] = field(default_factory=dict)
    """Of parameters that one of several ranks with their parts, or copies, updates as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedLayout:
    """Where one rank's parameters and gradients are."""

    ownership: Ownership
    stage: int = 0
    """As it is carried out: where there is one owner, nothing is cut."""
    units: tuple[Unit, ...] = ()
    """Of what is gathered by units (stage 3)."""
    late: frozenset[str] = frozenset()
    """Parameters whose gradients are complete only at the end of an update, because several stages use them."""
    stage_of: Mapping[str, int] = field(default_factory=dict)
    """Stage of the pipeline whose backward finishes a parameter."""

    def by_lateness(self) -> tuple[Ownership, Ownership]:
        """The buckets whose gradients are reduced once per update, and the others (stages 2 and 3)."""
        # Late: a tie between stages of a pipeline, whose gradient is summed over the stages first. It cannot go to its
        # owner microbatch by microbatch, so its bucket has an arena as under stage 1.
        buckets: dict[bool, list[Bucket]] = {True: [], False: []}
        for bucket in self.ownership.buckets:
            buckets[self.stage < 2 or any(slot.name in self.late for slot in bucket.slots)].append(bucket)
        whole, cut = (replace(self.ownership, buckets=tuple(buckets[is_late])) for is_late in (True, False))
        return whole, cut


def plan_ownership(
    parameters: Sequence[Parameter],
    sharding: Sharding,
    *,
    num_owners: int,
    num_replicas: int,
    units: Mapping[str, str] | None = None,
    work: Mapping[str, int] | None = None,
    num_homes: int = 1,
) -> Ownership:
    """Fuse the parameters into buckets of at most `sharding.bucket_bytes` and give every element one owner.

    Buckets follow the parameters from last to first, because backward completes them in that order. `units`: parameter
    -> what it is gathered and reduced with; those of different units share no bucket. Under stage 3 no rank holds whole
    working copies, so parameters that are neither trained nor cast are in buckets too. `work`: of one update, for each
    parameter that its optimizer must see whole. `num_homes`: how many ranks have parts or copies of what one owner has.
    """
    units, work = units or {}, work or {}
    # A frozen parameter in its own dtype needs no buffer: nothing reduces, casts or publishes it. Under stage 3 it must
    # be cut all the same, or every rank would hold all of it.
    fused = [parameter for parameter in reversed(parameters) if parameter.fused or sharding.stage == 3]
    groups: list[list[Parameter]] = []
    # Backward can reduce a bucket when its last member has a gradient. Groups fill side by side (one per kind), so they
    # are put in order by their last members, and not by their first.
    last_of: list[int] = []  # position of the last member of each group
    open_groups: dict[tuple[str | bool | None, ...], tuple[int, int]] = {}  # which group, and bytes in it
    for position, parameter in enumerate(fused):
        # A parameter that is cut along tp may have another size on other ranks. It would shift the whole parameters
        # behind it. In a bucket of their own those have the same slots and owners on all ranks along tp.
        unit = units.get(parameter.name)
        is_whole = num_owners > 1 and (sharding.partition == "whole" or parameter.name in work)
        kind = (parameter.working, parameter.master, parameter.trainable, parameter.portion is None, unit, is_whole)
        size_bytes = parameter.num_elements * itemsize_bytes(parameter.working)
        # One group of each kind is open at a time. A parameter of another kind between two members does not close it:
        # norms in float32 between bfloat16 matrices would otherwise leave one small bucket per layer.
        at, held_bytes = open_groups.get(kind, (-1, 0))
        if at < 0 or held_bytes + size_bytes > sharding.bucket_bytes:
            at, held_bytes = len(groups), 0
            groups.append([])
            last_of.append(position)
        open_groups[kind] = (at, held_bytes + size_bytes)
        groups[at].append(parameter)
        last_of[at] = position
    in_order = sorted(range(len(groups)), key=last_of.__getitem__)
    # Over all buckets together: balanced bucket by bucket, the first owner would get the largest matrix of each.
    owner_of, homes = share_out(
        [
            (each, _master_bytes(each))
            for each in fused
            if each.name in work or (sharding.partition == "whole" and num_owners > 1)
        ],
        work,
        num_owners=num_owners,
        num_homes=num_homes,
    )
    buckets = tuple(
        replace(_bucket(groups[at], owner_of, num_owners, num_replicas), unit=units.get(groups[at][0].name))
        for at in in_order
    )
    return Ownership(num_owners=num_owners, num_replicas=num_replicas, buckets=buckets, homes=homes)


def _master_bytes(parameter: Parameter) -> int:
    return math.prod(parameter.global_shape) * itemsize_bytes(parameter.master)


def _bucket(members: Sequence[Parameter], owner_of: Mapping[str, int], num_owners: int, num_replicas: int) -> Bucket:
    # Replicas of an owner add up their sums of its part by reduce-scatter and all-gather: the part must divide by them.
    unit = ALIGNMENT_ELEMENTS * num_replicas
    if num_owners == 1 or members[0].name not in owner_of:
        # Equal parts: NCCL has one collective for those, and needs several transfers for parts of several sizes.
        slots, end = _slots(members, 0)
        counts = (_round_up(end, unit * num_owners) // num_owners,) * num_owners
    else:
        by_owner = sorted(members, key=lambda each: owner_of[each.name])  # stable: the order within an owner stays
        held = {owner: list(group) for owner, group in groupby(by_owner, key=lambda each: owner_of[each.name])}
        slots, lengths, end = [], [], 0
        for owner in range(num_owners):
            added, stop = _slots(held.get(owner, []), end)
            slots += added
            lengths.append(_round_up(stop - end, unit))
            end += lengths[-1]
        counts = tuple(lengths)
    first = members[0]
    return Bucket(
        working=first.working, master=first.master, trainable=first.trainable, slots=tuple(slots), counts=counts
    )


def _slots(members: Sequence[Parameter], start: int) -> tuple[list[Slot], int]:
    lengths = [_round_up(each.num_elements, ALIGNMENT_ELEMENTS) for each in members]
    starts = list(accumulate(lengths, initial=start))
    slots = [
        Slot(name=each.name, start=at, num_elements=each.num_elements)
        for each, at in zip(members, starts, strict=False)  # `starts` also holds the end
    ]
    return slots, starts[-1]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
