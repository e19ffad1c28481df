"""The memory of one bucket on one rank.

WholeBucket     the working copy of all elements, here all the time (stages 0 to 2)
ShardedBucket   the working copy of the owned run; that of all elements from `fill` to `free` (stage 3)

owner 0   | run of bucket 0 | run of bucket 1 | ..      in memory that the peers read in place, if they can
owner 1   | run of bucket 0 | run of bucket 1 | ..
                 |
                 +--> whole bucket 0, on every rank, from `fill` to `free`; the parameters are views of it
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from shardwise.comm import Channel, Work
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.counters import Counters
from shardwise.engine.given_dtensors import values_of
from shardwise.plan import Bucket, Segment, Slot


class WholeBucket:
    """A working copy that is whole on every rank, and the master of the owned part."""

    is_whole = True

    def __init__(self, plan: Bucket, owner: int, working: torch.Tensor, part: torch.Tensor | None = None) -> None:
        """part: the owned elements of the working copy; None: they are a view of it."""
        self.plan = plan
        self.working = working
        own = plan.part(owner)
        self.part = working[own.start : own.stop] if part is None else part
        self.has_master = plan.master != plan.working
        """Whether the master is held apart: where both have one dtype it is a view, and no second copy."""
        self.master = self.part
        if self.has_master:
            self.master = torch.zeros(plan.counts[owner], dtype=torch_dtype(plan.master), device=working.device)
        self.segments = {segment.name: segment for segment in plan.segments(owner)}
        """What this rank owns of each parameter."""
        self.num_owned = sum(segment.run.num_elements for segment in self.segments.values())

    def write(self, slot: Slot, values: torch.Tensor) -> None:
        """Take over the values of a parameter, as far as they are here."""
        self.working[slot.run.start : slot.run.stop].copy_(values.reshape(-1))
        self._write_owned(self.master, slot, values)

    def adopt(self, name: str) -> None:
        """Take values that were written into the working copy of a parameter over into its master."""
        if self.has_master and (segment := self.segments.get(name)) is not None:
            self.master[_span(segment)].copy_(self.part[_span(segment)])

    def free(self) -> None:
        """Give back memory that is not held all the time: none."""

    def place_of(self, parameter: torch.Tensor) -> int:
        """What stays the same as long as nobody gives the parameter another storage."""
        return values_of(parameter).data_ptr()

    def _write_owned(self, target: torch.Tensor, slot: Slot, values: torch.Tensor) -> None:
        if (segment := self.segments.get(slot.name)) is not None:
            target[_span(segment)].copy_(values.reshape(-1)[segment.run.start : segment.run.stop])


class ShardedBucket(WholeBucket):
    """A working copy of which each rank holds its run, until it is gathered."""

    is_whole = False

    def __init__(
        self,
        number: int,
        plan: Bucket,
        owners: Channel,
        working: torch.Tensor,
        part: torch.Tensor,
        sources: Sequence[torch.Tensor],
    ) -> None:
        """sources: the runs of all owners, where all share memory; else none."""
        super().__init__(plan, owners.rank, working, part)
        self._number = number
        self._owners = owners
        self._sources = sources
        self._targets = working.split(list(plan.counts))
        self.storage: int = working.untyped_storage()._cdata
        """What tells the memory of the working copy from that of other tensors, gathered or not."""

    @property
    def reads_in_place(self) -> bool:
        """Whether this rank reads the peers' runs without their doing: they must not write meanwhile."""
        return bool(self._sources)

    def write(self, slot: Slot, values: torch.Tensor) -> None:
        """See `WholeBucket`."""
        self._write_owned(self.part, slot, values)
        self._write_owned(self.master, slot, values)

    def place_of(self, parameter: torch.Tensor) -> int:
        """See `WholeBucket`. Its address changes whenever it is gathered."""
        storage: int = parameter.untyped_storage()._cdata
        return storage

    @torch.no_grad()
    def fill(self, counters: Counters, *, unit: str) -> Work | None:
        """Begin to gather all elements; None where they are here already."""
        # The storage object stays and only its memory comes and goes: the parameters, and what autograd saved of them,
        # are views of it.
        self.working.untyped_storage().resize_(self.working.numel() * self.working.element_size())
        counters.all_gathers += 1
        if self._sources:
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)
            return None
        purpose = f"parameters of unit {unit!r}, bucket {self._number}"
        return self._owners.all_gather(self.working, self.part, counts=self.plan.counts, purpose=purpose)

    def free(self) -> None:
        """Give the memory of all elements back; views of it are filled with the next `fill`."""
        self.working.untyped_storage().resize_(0)


def make_buckets(
    plans: Sequence[Bucket], unit_of: Mapping[str, str], owners: Channel
) -> Iterator[tuple[WholeBucket, ShardedBucket | None]]:
    """The memory of each bucket, and the same once more where it is sharded: where its parameters have a unit.

    One after the other: what is sharded is freed before the next takes memory.
    """
    runs = _runs({at: plan for at, plan in enumerate(plans) if plan.slots[0].name in unit_of}, owners)
    for index, plan in enumerate(plans):
        dtype = torch_dtype(plan.working)
        num_bytes = plan.num_elements * dtype.itemsize
        if index in runs:
            working = torch.empty(num_bytes, dtype=torch.uint8, device=owners.device).view(dtype)
            sharded = ShardedBucket(index, plan, owners, working, *runs[index])
            yield sharded, sharded
        else:
            yield WholeBucket(plan, owners.rank, owners.allocate(num_bytes).view(dtype)), None


def _runs(sharded: Mapping[int, Bucket], owners: Channel) -> dict[int, tuple[torch.Tensor, list[torch.Tensor]]]:
    """This rank's run of every bucket, and those of all owners where they share memory.

    The runs of an owner follow each other in one piece of memory: peers map one piece for each owner.
    """
    if not sharded:
        return {}
    starts = [
        list(accumulate((_run_bytes(bucket, owner) for bucket in sharded.values()), initial=0))
        for owner in range(owners.size)
    ]
    num_bytes = max(each[-1] for each in starts)
    # CPU ranks of one host map each other's runs: a gather is then one copy per owner, and wakes nobody up.
    shared = owners.share(num_bytes) if num_bytes and owners.device.type == "cpu" else None
    own = owners.allocate(starts[owners.rank][-1]) if shared is None else shared[owners.rank]

    def run(memory: torch.Tensor, at: int, bucket: Bucket, owner: int) -> torch.Tensor:
        dtype, start = torch_dtype(bucket.working), starts[owner][at]
        return memory[start : start + bucket.counts[owner] * dtype.itemsize].view(dtype)

    return {
        index: (
            run(own, at, bucket, owners.rank),
            [run(memory, at, bucket, owner) for owner, memory in enumerate(shared or ())],
        )
        for at, (index, bucket) in enumerate(sharded.items())
    }


def _run_bytes(bucket: Bucket, owner: int) -> int:
    """Bytes of an owner's run, up to where the next one may begin."""
    # torch allocates at multiples of 64 bytes, and vector kernels round by the alignment of what they read: with
    # another one, results would differ from those of one process in the last digit.
    return -(-bucket.counts[owner] * torch_dtype(bucket.working).itemsize // 64) * 64


def _span(segment: Segment) -> slice:
    return slice(segment.start, segment.start + segment.run.num_elements)
