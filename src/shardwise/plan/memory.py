"""What a plan costs a rank: bytes held and bytes sent, and where the gradients are in memory.

With N elements, d owners, k microbatches, bfloat16 compute and AdamW; u is the largest bucket or unit, in elements:

    stage    working   gradients               master   Adam   on their way          gathered   sent per update
    0        2N        2N (k=1), 4N (k>1)      4N       8N     0, a                  -          (d-1)/d N (2 or 4 + 4)
    1        2N        2N (k=1), 4N (k>1)      4N/d     8N/d   0, 2a                 -          (d-1)/d N (2 or 4 + 2)
    2        2N        4N/d                    4N/d     8N/d   4u, + 4u/d if k>1, 2a -          (d-1)/d N (2k + 2)
    3        2N/d      4N/d                    4N/d     8N/d   4u, + 4u/d if k>1, 2a 4u         (d-1)/d N (2k + 2g)

a: on accelerators, where the parts of others are held until they are added: (d-1)/d u (2 or 4) (`held_by_sum`).
g: how often each unit is gathered (`plan.residency`). N = 1e9, d = 8, k = 4, u = 2e7: stage 1 holds 2 + 4 + 0.5 + 1 GB,
stage 3 holds 0.25 + 0.5 + 0.5 + 1 + 0.09 + 0.08 GB. Stage 0 is one owner with d replicas: it sends gradients twice (a
reduce-scatter and an all-gather of float32 sums) and no working copies. A running average of the weights takes as much
as their masters. Activations do not count.

With `offload` a device holds no masters, no Adam and no average, and with "parameters" at stage 3 no working copy but
what is gathered. The host holds them, and in addition 4N/d of gradients that came down and 2N/d of casts that go up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.buckets import Bucket, OwnedLayout, Ownership
from shardwise.plan.dtypes import itemsize_bytes, promote
from shardwise.plan.specs import Offload, Precision, Sums


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaRegion:
    """The place of one bucket's gradients in the arena, in bytes from its beginning."""

    gradient_dtype: str
    gradient_start_bytes: int
    """The gradient of the whole bucket, as backward leaves it."""
    reduced_start_bytes: int
    """The owner's part of the reduced gradient, in the master's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """One block of memory for all gradients of a rank.

    A gradient that is accumulated in the master's dtype is reduced in place (p). A narrower one (g) cannot: its owned
    part grows. So their reduced parts are packed at the front, each over gradients that were reduced before it. Those
    that stay in place are behind all of them, so that nothing is packed over their results:

        2 owners, k = 1; buckets of 64 elements: g0 and g2 in bfloat16, p1 in float32. The arena of owner 1

        byte     0          128        256        384                   640
        before   | headroom | g0       | g2       | p1                  |
        after    | r0       | r2       | (free)   |          | r1       |

    Buckets are reduced in their order, so r2 may overwrite g0. Without the headroom r0 would overwrite g0 itself, while
    the collective still reads it.
    """

    num_bytes: int
    regions: tuple[ArenaRegion, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes that a rank holds for the parameters of a model, without activations.

    Messages between stages of a pipeline are activations. Between devices, a rank holds one more from each neighbour,
    which it receives ahead.
    """

    working_bytes: int
    """Working copies on the device (in runs without a second copy: the masters too)."""
    gradient_bytes: int
    """The arena in which gradients are added up."""
    master_bytes: int
    """Masters held apart from the working copies, on the device."""
    owned_elements: int
    """Trainable elements that this rank updates: optimizer state has its own factor of them."""
    reducing_bytes: int = 0
    """Gradients on their way to owners: copies of a bucket in a narrower dtype; what accelerators receive before they
    add it; at stages 2 and 3 two buffers (of the largest bucket, or of those of a unit), and a part of a sum where
    microbatches are merged."""
    gathered_bytes: int = 0
    """Stage 3: of the two largest units, the most that is gathered at a time where no unit is inside another. Of all
    units where they are kept."""
    updating_bytes: int = 0
    """While matrices are updated whose parts several ranks hold: whole masters and gradients, and messages of parts."""
    average_bytes: int = 0
    """The running average of the trained weights; on the host where the masters are there."""
    frozen_bytes: int = 0
    """Frozen parameters in no flat buffer, as they were given: whole on this rank, with what packed weights carry."""
    host_bytes: int = 0
    """What is in the host's memory and not on the device (`offload`), without optimizer state, which is there too:
    masters, their gradients, casts and owned parts of working copies that move up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that a rank sends per update."""

    reduce_bytes: int
    """Gradients, to their owners."""
    gather_bytes: int
    """Working copies, from their owners."""


def gradient_dtype(bucket: Bucket, precision: Precision, *, num_microbatches: int) -> str:
    """The dtype of a bucket's gradient buffer.

    One microbatch needs no accumulation: its gradients stay in the working dtype, and lose nothing.
    """
    return bucket.working if num_microbatches == 1 else promote(bucket.working, precision.accumulate)


def wire_dtype(bucket: Bucket, precision: Precision, *, num_microbatches: int) -> str:
    """The dtype in which gradients travel: the narrower of the buffer's and `precision.reduce`.

    Parameters wider than the plan's masters (float64, complex) keep their own dtype all the way.
    """
    held = gradient_dtype(bucket, precision, num_microbatches=num_microbatches)
    # A cast to `precision.reduce` may only lose what the plan gives up knowingly: never the digits of a parameter whose
    # own dtype is wider than the plan's masters, and never by widening, which sends more for nothing.
    narrows = bucket.master == precision.master and promote(held, precision.reduce) == held
    return precision.reduce if narrows else held


def buffered_dtype(bucket: Bucket, precision: Precision) -> str:
    """The dtype of a gradient that is reduced after every microbatch, on its way."""
    return wire_dtype(bucket, precision, num_microbatches=1) if len(bucket.counts) > 1 else bucket.working


def run_dtype(bucket: Bucket, precision: Precision, *, num_microbatches: int) -> str:
    """The dtype of the owner's run of a gradient that is reduced after every microbatch (stages 2 and 3)."""
    return bucket.master if num_microbatches == 1 else promote(bucket.working, precision.accumulate)


def sharded_run_bytes(bucket: Bucket, owner: int) -> int:
    """Bytes of an owner's run of a working copy that is cut (stage 3), up to where the next one may begin."""
    # torch allocates at multiples of 64 bytes, and vector kernels round by the alignment of what they read: with
    # another one, results would differ from those of one process in the last digit.
    return -(-bucket.counts[owner] * itemsize_bytes(bucket.working) // 64) * 64


def held_by_sum(num_elements: int, num_ranks: int, *, wire: str, total: str, sums: Sums | None) -> int:
    """Bytes that a rank holds until it has its part of a sum, of `num_elements`.

    wire: the dtype that travels. total: that of the sum. sums: who adds; None: the channel, as parts come, on the CPU.
    """
    if num_ranks == 1 or sums is None:
        return 0
    if sums == "exact":
        return (num_ranks - 1) * num_elements * itemsize_bytes(wire)
    return num_elements * itemsize_bytes(wire) if wire != total else 0


def _held_by_owners(bucket: Bucket, owner: int, *, wire: str, sums: Sums | None) -> int:
    return held_by_sum(bucket.counts[owner], len(bucket.counts), wire=wire, total=bucket.master, sums=sums)


def _held_by_replicas(bucket: Bucket, owner: int, ownership: Ownership, *, wire: str, sums: Sums | None) -> int:
    num_ranks = ownership.num_replicas
    return held_by_sum(bucket.counts[owner] // num_ranks, num_ranks, wire=wire, total=bucket.master, sums=sums)


def _held_once_per_update(
    ownership: Ownership,
    owner: int,
    precision: Precision,
    *,
    num_microbatches: int,
    sums: Sums | None,
    goes_ahead: bool,
) -> int:
    """The most that is held in addition to the arena while its buckets are reduced (stages 0 and 1)."""
    copied = of_replicas = 0
    of_owners: list[int] = []
    was_copied, num_travelling = True, 1
    is_one_owner, is_one_rank = ownership.num_owners == 1, ownership.num_owners * ownership.num_replicas == 1
    for bucket in (each for each in ownership.buckets if each.trainable):
        held = gradient_dtype(bucket, precision, num_microbatches=num_microbatches)
        wire = wire_dtype(bucket, precision, num_microbatches=num_microbatches)
        is_copied = wire != held and not is_one_rank
        copied = max(copied, bucket.num_elements * itemsize_bytes(wire) if is_copied else 0)
        of_owners.append(_held_by_owners(bucket, owner, wire=wire, sums=sums))
        # Over replicas goes the sum over owners or, with one owner, the gradient itself.
        between = wire if is_one_owner else bucket.master
        of_replicas = max(of_replicas, _held_by_replicas(bucket, owner, ownership, wire=between, sums=sums))
        # Where transfers go on alone two buckets are on their way at a time, unless one of them has a copy.
        if goes_ahead and not (is_copied or was_copied):
            num_travelling = 2
        was_copied = is_copied
    # The channels keep what they have taken for the next step.
    return copied + num_travelling * max(of_owners, default=0) + of_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlace:
    """The place of the gradient of one bucket on its way, in a buffer that serves several buckets in turn."""

    group: int
    """Buckets of one group come together, and have a buffer together."""
    start_bytes: int
    stop_bytes: int


def places_in_buffers(ownership: Ownership, precision: Precision, *, by_unit: bool) -> list[BufferPlace]:
    """The places of the trainable buckets. `by_unit`: those of one unit come together; else each comes alone."""
    places: list[BufferPlace] = []
    last_of: dict[object, BufferPlace] = {}
    for index, bucket in enumerate(bucket for bucket in ownership.buckets if bucket.trainable):
        key = bucket.unit if by_unit and bucket.unit is not None else index
        before = last_of.get(key)
        start = 0 if before is None else before.stop_bytes
        num_bytes = bucket.num_elements * itemsize_bytes(buffered_dtype(bucket, precision))
        group = index if before is None else before.group
        last_of[key] = BufferPlace(group=group, start_bytes=start, stop_bytes=start + num_bytes)
        places.append(last_of[key])
    return places


def buffer_bytes(ownership: Ownership, precision: Precision, *, by_unit: bool) -> int:
    """Bytes of a buffer for gradients on their way: of the largest bucket, or of those of the largest unit."""
    return max((each.stop_bytes for each in places_in_buffers(ownership, precision, by_unit=by_unit)), default=0)


def plan_arena(ownership: Ownership, owner: int, precision: Precision, *, num_microbatches: int) -> Arena:
    """Lay out the gradients of the trainable buckets for one owner."""
    # One block and not one buffer per bucket: a rank's reduced parts need no memory besides the gradients.
    buckets = [bucket for bucket in ownership.buckets if bucket.trainable]
    dtypes = [gradient_dtype(bucket, precision, num_microbatches=num_microbatches) for bucket in buckets]
    # When bucket n is reduced, the results of 0 .. n must end at or before its gradient: headroom + grown >= packed,
    # where packed counts results up to n and grown counts gradients before n (of those that do not stay in place).
    headroom = packed = grown = 0
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        if dtype != bucket.master:
            packed += bucket.counts[owner] * itemsize_bytes(bucket.master)
            headroom = max(headroom, packed - grown)
            grown += bucket.num_elements * itemsize_bytes(dtype)
    # A multiple of 64 keeps the gradients behind it as well aligned as slots are in their buckets.
    headroom = -(-headroom // 64) * 64
    regions = []
    packed, growing, staying = 0, headroom, headroom + grown
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        num_bytes = bucket.num_elements * itemsize_bytes(dtype)
        if dtype == bucket.master:
            start, staying = staying, staying + num_bytes
            reduced_start = start + bucket.part(owner).start * itemsize_bytes(dtype)
        else:
            start, growing = growing, growing + num_bytes
            reduced_start, packed = packed, packed + bucket.counts[owner] * itemsize_bytes(bucket.master)
        regions.append(ArenaRegion(gradient_dtype=dtype, gradient_start_bytes=start, reduced_start_bytes=reduced_start))
    return Arena(num_bytes=staying, regions=tuple(regions))


def _on_host(bucket: Bucket, owner: int, offload: Offload) -> int:
    """Bytes of the host's memory for one bucket. "parameters": with the owned part of its working copy."""
    own, is_cast = bucket.counts[owner], bucket.master != bucket.working
    master = own * itemsize_bytes(bucket.master)
    gradient = master if bucket.trainable else 0
    if offload == "parameters":
        return gradient + sharded_run_bytes(bucket, owner) + (master if is_cast else 0)
    cast = own * itemsize_bytes(bucket.working) if is_cast and bucket.trainable else 0
    return gradient + cast + (master if is_cast or bucket.trainable else 0)


def footprint(
    layout: OwnedLayout,
    owner: int,
    precision: Precision,
    *,
    num_microbatches: int,
    keeps: bool = False,
    sums: Sums | None = None,
    goes_ahead: bool = True,
    offload: Offload | None = None,
) -> Footprint:
    """Bytes that the buffers of one owner take.

    keeps: what was gathered stays until the update (stage 3). sums: who adds over ranks; None: the channel, as parts
    come (CPU). goes_ahead: whether transfers go on alone. offload: what is on the host; None also where the ranks have
    no devices.
    """
    ownership, by_unit = layout.ownership, bool(layout.units)
    whole, cut = layout.by_lateness()
    trainable = [bucket for bucket in cut.buckets if bucket.trainable]
    runs = of_owners = of_replicas = num_direct = 0
    for bucket in trainable:
        dtype = run_dtype(bucket, precision, num_microbatches=num_microbatches)
        # The optimizer gets a copy of a run in another dtype than the master's.
        copied = itemsize_bytes(bucket.master) if dtype != bucket.master else 0
        runs += bucket.counts[owner] * (itemsize_bytes(dtype) + copied)
        wire = buffered_dtype(bucket, precision)
        num_direct += dtype == bucket.master
        of_owners = max(of_owners, _held_by_owners(bucket, owner, wire=wire, sums=sums))
        of_replicas = max(of_replicas, _held_by_replicas(bucket, owner, ownership, wire=bucket.master, sums=sums))
    # One buffer fills in backward while the other is reduced. Peaks above that are given back (`GradBuffers.trim`).
    places = places_in_buffers(cut, precision, by_unit=by_unit)
    num_buffers = min(2, len({place.group for place in places}))
    scratch = max((bucket.counts[owner] * itemsize_bytes(bucket.master) for bucket in trainable), default=0)
    # The unit that runs and the next one: the two largest are the most that these can be.
    gathered = dict.fromkeys((unit.name for unit in layout.units), 0)
    working = on_host = masters = owned = 0
    for bucket in ownership.buckets:
        itemsize = itemsize_bytes(bucket.working)
        if bucket.unit in gathered:
            gathered[bucket.unit] += bucket.num_elements * itemsize
            working += sharded_run_bytes(bucket, owner) if offload != "parameters" else 0
        else:
            working += bucket.num_elements * itemsize
        if offload is not None:
            on_host += _on_host(bucket, owner, offload if bucket.unit in gathered else "state")
        elif bucket.master != bucket.working:
            masters += bucket.counts[owner] * itemsize_bytes(bucket.master)
        owned += sum(each.run.num_elements for each in bucket.segments(owner)) if bucket.trainable else 0
    once = _held_once_per_update(
        whole, owner, precision, num_microbatches=num_microbatches, sums=sums, goes_ahead=goes_ahead
    )
    return Footprint(
        working_bytes=working,
        gradient_bytes=runs + plan_arena(whole, owner, precision, num_microbatches=num_microbatches).num_bytes,
        master_bytes=masters,
        owned_elements=owned,
        reducing_bytes=num_buffers * buffer_bytes(cut, precision, by_unit=by_unit)
        + (scratch if num_microbatches > 1 else 0)
        # Two sums that go straight into their runs are on their way at a time, where transfers go on alone.
        + max((2 if goes_ahead and num_direct > 1 else 1) * of_owners + of_replicas, once),
        gathered_bytes=sum(sorted(gathered.values())[0 if keeps else -2 :]),
        host_bytes=on_host,
    )


def average_bytes(ownership: Ownership, owner: int) -> int:
    """Bytes of one owner's running average of the weights."""
    return sum(each.counts[owner] * itemsize_bytes(each.master) for each in ownership.buckets if each.trainable)


def traffic(
    layout: OwnedLayout,
    owner: int,
    precision: Precision,
    *,
    num_microbatches: int,
    gathers: Mapping[str, int] | None = None,
) -> Traffic:
    """Bytes that the rank of one owner sends per update. gathers: unit -> how often it is gathered (stage 3)."""
    whole, cut = layout.by_lateness()
    ownership, replicas = layout.ownership, layout.ownership.num_replicas
    reduce_bytes = gather_bytes = 0
    for bucket in (each for each in whole.buckets if each.trainable):
        wire = itemsize_bytes(wire_dtype(bucket, precision, num_microbatches=num_microbatches))
        own = bucket.counts[owner]
        reduce_bytes += (bucket.num_elements - own) * wire
        gather_bytes += (ownership.num_owners - 1) * own * itemsize_bytes(bucket.working)
        # Owners of the same part add up their sums: a reduce-scatter and an all-gather over the replicas. With one
        # owner there was no sum before, so that the first of the two carries gradients in their wire dtype.
        first = wire if ownership.num_owners == 1 else itemsize_bytes(bucket.master)
        reduce_bytes += (replicas - 1) * (own // replicas) * (first + itemsize_bytes(bucket.master))
    for bucket in cut.buckets:
        own, working = bucket.counts[owner], itemsize_bytes(bucket.working)
        # Without units: once, after the update, when owners publish what they changed. Under stage 3 nothing is
        # published; the next forward gathers.
        times = int(bucket.trainable)
        if gathers is not None and bucket.unit is not None:
            times = gathers.get(bucket.unit, times)
        gather_bytes += times * (ownership.num_owners - 1) * own * working
        if bucket.trainable:
            wire = itemsize_bytes(buffered_dtype(bucket, precision))
            reduce_bytes += num_microbatches * (bucket.num_elements - own) * wire
            # Once per update, not per microbatch: replicas add up the owners' sums of all microbatches.
            reduce_bytes += 2 * (replicas - 1) * (own // replicas) * itemsize_bytes(bucket.master)
    return Traffic(reduce_bytes=reduce_bytes, gather_bytes=gather_bytes)
