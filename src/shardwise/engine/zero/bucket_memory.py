"""The memory of buckets: working copies, the masters of what a rank owns, and what is gathered for a while (stage 3).

`flat_params` says how they fit together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from typing_extensions import override

from shardwise.comm import Channel
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.writes import bits_in, differ_from_cast, is_small, spread_over, take_what_differs
from shardwise.engine.torch_private import storage_id
from shardwise.engine.zero.masters import MasterMemory
from shardwise.errors import ModelError, in_words
from shardwise.plan import Bucket, Segment, Slot
from shardwise.plan.memory import sharded_run_bytes
from shardwise.plan.specs import Offload


def page_locked(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in page-locked memory of the host. Raises ModelError where there is no more."""
    try:
        return torch.zeros(num_elements, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise ModelError(
            f"sharding.offload: the host gives no {num_elements * dtype.itemsize:,} bytes of page-locked memory "
            f"({in_words(error)}). Raise its limit (ulimit -l, the memory of the container), take more data ranks, or "
            "leave sharding.offload out"
        ) from error


class WholeBucket:
    """A working copy that is whole on every rank, and the master of the owned part."""

    def __init__(
        self,
        number: int,
        plan: Bucket,
        owner: int,
        working: torch.Tensor,
        part: torch.Tensor | None = None,
        *,
        offload: bool = False,
    ) -> None:
        """part: the owned elements of the working copy; None: a view of it. offload: masters are on the host."""
        self.number = number
        self.plan = plan
        self.working = working
        own = plan.part(owner)
        self.part = working[own.start : own.stop] if part is None else part
        # bfloat16 has 8 significant bits: an update of 1e-3 of a value would be rounded away each time, and never add
        # up. Where both have one dtype a second copy would hold the same bits: the optimizer steps on the working copy.
        self.is_cast = plan.master != plan.working
        """Whether the working copy has another dtype than the master."""
        rises = offload and plan.trainable and self.part.device.type != "cpu"
        self.has_master = self.is_cast or rises
        """Whether the master is held apart; else it is a view of the working copy."""
        self.master = self.part
        num_elements, dtype = plan.counts[owner], torch_dtype(plan.master)
        if self.is_cast:
            self.master = torch.zeros(num_elements, dtype=dtype, device="cpu" if offload else working.device)
        elif rises:
            self.master = page_locked(num_elements, dtype)
        # Page-locked is what moves between host and device, and nothing else.
        self._cast = page_locked(num_elements, self.part.dtype) if rises and self.is_cast else None
        self.segments = {segment.name: segment for segment in plan.segments(owner)}
        """What this rank owns of each parameter."""
        self.num_owned = sum(segment.run.num_elements for segment in self.segments.values())
        self.master_memory = MasterMemory(self.master)

    def other_than_casts(self, *, reads_all: bool) -> list[str]:
        """Owned parameters with elements in the working copy that are not the cast of their master.

        Not `reads_all`: some elements show whether there are any. A device is not waited for then.
        """
        step = 1 if reads_all or is_small(self.part) else spread_over(self.part.numel())
        is_near = self.part.device.type == "cpu"
        if not (is_near or reads_all) or not differ_from_cast(self.part[::step], self.master[::step]):
            return []
        spans = {name: _span(each) for name, each in self.segments.items()}
        return [name for name, each in spans.items() if differ_from_cast(self.part[each], self.master[each])]

    def write(self, slot: Slot, values: torch.Tensor) -> None:
        """Take over the values of a parameter, as far as they are here."""
        # The master takes the given values and not the working copy, which has rounded them already.
        self.working[slot.run.start : slot.run.stop].copy_(values.reshape(-1))
        self._write_owned(self.master, slot, values)

    def publish(self) -> None:
        """Make the owned part of the working copy from the master."""
        # In the next update the host writes to what moves up here. It has waited by then for gradients, which the
        # device computed later.
        if self._cast is not None:
            self.part.copy_(self._cast.copy_(self.master), non_blocking=True)
        elif self.has_master:
            self.part.copy_(self.master, non_blocking=True)

    def adopt(self, name: str) -> None:
        """Take values that were written into the working copy of a parameter over into its master.

        Of those that are the cast of their master, the master keeps its bits: a clamp rounds nothing else.
        """
        if self.has_master and (segment := self.segments.get(name)) is not None:
            take_what_differs(self.part[_span(segment)], self.master[_span(segment)])

    def free(self) -> None:
        """Give back memory that is not held all the time: none."""

    def _write_owned(self, target: torch.Tensor, slot: Slot, values: torch.Tensor) -> None:
        if (segment := self.segments.get(slot.name)) is not None:
            target[_span(segment)].copy_(values.reshape(-1)[segment.run.start : segment.run.stop])


class ShardedBucket(WholeBucket):
    """A working copy that is cut over the ranks until it is gathered.

    owner 0   | part of bucket 0 | part of bucket 1 | ..     in memory that the peers read in place, if they can
    owner 1   | part of bucket 0 | part of bucket 1 | ..
                     |
                     +--> whole bucket 0, on every rank, from `fill` to `free`; the parameters are views of it
    """

    def __init__(
        self,
        number: int,
        plan: Bucket,
        owners: Channel,
        working: torch.Tensor,
        part: torch.Tensor,
        sources: Sequence[torch.Tensor],
        *,
        offload: bool = False,
        rising: torch.Stream | None = None,
    ) -> None:
        """sources: the runs of all owners, where all share memory; else none. rising: moves the part up to the device,
        where it is on the host."""
        super().__init__(number, plan, owners.rank, working, part, offload=offload)
        self._rising = rising
        self._owners = owners
        self._sources = sources
        self._targets = working.split(list(plan.counts))
        self._memory = working.untyped_storage()
        self._num_bytes = working.numel() * working.element_size()
        self._purpose = ""
        self._is_filled = False
        self._is_pinned = False
        self._bits = bits_in(self._targets[owners.rank]), bits_in(part)
        """What this rank has of the gathered elements, and where it has them from."""
        self._is_compared = False
        self.lost: set[str] = set()
        """Parameters that somebody wrote to while they were gathered."""
        # The address of the C++ storage object: it stays while the memory comes and goes. `data_ptr` changes with each
        # `fill`, and means nothing in between.
        self.storage: int = storage_id(working.untyped_storage())
        """What tells the memory of the working copy from that of other tensors, gathered or not."""

    @property
    def arrives_alone(self) -> bool:
        """Whether what `fill` begins goes on while this rank computes."""
        return self._owners.progresses_alone or self._rising is not None

    @property
    def reads_in_place(self) -> bool:
        """Whether this rank reads the peers' runs without their doing: they must not write meanwhile."""
        return bool(self._sources)

    @property
    def span(self) -> tuple[int, int]:
        """The addresses where the elements begin and end, while they are gathered."""
        start = self.working.data_ptr()
        return start, start + self._num_bytes

    @override
    def write(self, slot: Slot, values: torch.Tensor) -> None:
        self._write_owned(self.part, slot, values)
        self._write_owned(self.master, slot, values)

    def fill(self, counters: Counters, *, unit: str) -> Callable[[], object] | None:
        """Begin to gather all elements; what waits for them, or None where they are here already."""
        # The storage object stays and only its memory comes and goes: the parameters, and what autograd saved of them,
        # are views of it. A new tensor for each gather would leave those views without values. The parameters have
        # version counters of their own (`.data` was set), so that autograd does not take a refill for a write to them.
        # No `no_grad`: nothing here requires a gradient, and the context would cost the host more than the rest.
        if not self._is_pinned:
            self._memory.resize_(self._num_bytes)
        self._is_filled = True
        counters.all_gathers += self._owners.size > 1
        if self._sources:
            # No transfer, and nothing to wait for: peers write their parts between an exchange that ends a pass and one
            # that begins the next (`Unshard.begin_pass`).
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)
            return None
        if not self._purpose:
            self._purpose = f"parameters of unit {unit!r}, bucket {self.number}"
        if self._rising is None:
            return self._owners.all_gather(self.working, self.part, counts=self.plan.counts, purpose=self._purpose).wait
        # Not behind the kernels that are queued from here on: a unit that is gathered ahead moves while another runs.
        # The memory may have had another use before, so not before the kernels that were queued.
        self._rising.wait_event(torch.accelerator.current_stream(self.working.device).record_event())
        own = self._targets[self._owners.rank]
        with self._rising:
            own.copy_(self.part, non_blocking=True)
            if self._owners.size > 1:
                return self._owners.all_gather(self.working, own, counts=self.plan.counts, purpose=self._purpose).wait
        mark, device = self._rising.record_event(), self.working.device
        return lambda: torch.accelerator.current_stream(device).wait_event(mark)

    def free(self) -> None:
        """Give the memory of all elements back; views of it are filled with the next `fill`."""
        # The views keep shape and strides, and torch checks nothing: an operation on one ends the process with a
        # segmentation fault. Hence the class of sharded parameters, and saved tensors that gather first (`Saved`).
        if self._is_filled and self._is_compared and not torch.equal(*self._bits):
            self._note_lost()
        self._is_filled = False
        if not self._is_pinned:
            try:
                self._memory.resize_(0)
            except RuntimeError:
                # A forward has made an array of it (`numpy`): then it stays for good.
                self._is_pinned = not self._memory.resizable()
                if not self._is_pinned:
                    raise

    def turn_to(self, *, reads_all: bool) -> None:
        """Whether `free` compares what it lets go, from now on."""
        self._is_compared = reads_all and self.part.device == self.working.device

    def _note_lost(self) -> None:
        differs = torch.ne(*self._bits)
        self.lost.update(name for name, each in self.segments.items() if differs[_span(each)].any())


def make_buckets(
    plans: Sequence[Bucket], unit_of: Mapping[str, str], owners: Channel, offload: Offload | None = None
) -> Iterator[WholeBucket]:
    """The memory of each bucket, which is sharded where its parameters have a unit."""
    # A generator: the caller fills a bucket with the values of its parameters and frees it, before the next takes
    # memory. A list would hold the whole model at stage 3.
    sharded = {at: plan for at, plan in enumerate(plans) if plan.slots[0].name in unit_of}
    runs = _runs(sharded, owners, on_host=offload == "parameters")
    rising = torch.Stream(owners.device) if sharded and offload == "parameters" else None
    for index, plan in enumerate(plans):
        dtype = torch_dtype(plan.working)
        num_bytes = plan.num_elements * dtype.itemsize
        if index in runs:
            working = torch.empty(num_bytes, dtype=torch.uint8, device=owners.device).view(dtype)
            yield ShardedBucket(index, plan, owners, working, *runs[index], offload=offload is not None, rising=rising)
        else:
            # The channel gathers into it, and may have memory that it moves faster (shared between processes).
            room = owners.allocate(num_bytes).view(dtype)
            yield WholeBucket(index, plan, owners.rank, room, offload=offload is not None)


def _runs(
    sharded: Mapping[int, Bucket], owners: Channel, *, on_host: bool
) -> dict[int, tuple[torch.Tensor, list[torch.Tensor]]]:
    """This rank's run of every bucket, and those of all owners where they share memory.

    The runs of an owner follow each other in one piece of memory: peers map one piece for each owner.
    """
    if not sharded:
        return {}
    starts = [
        list(accumulate((sharded_run_bytes(bucket, owner) for bucket in sharded.values()), initial=0))
        for owner in range(owners.size)
    ]
    num_bytes = max(each[-1] for each in starts)  # `share` asks all ranks for one number
    # CPU ranks of one host map each other's runs: a gather is then one copy per owner, and wakes nobody up.
    shared = owners.share(num_bytes) if num_bytes and owners.device.type == "cpu" else None
    if shared is not None:
        own = shared[owners.rank]
    elif on_host:
        own = page_locked(starts[owners.rank][-1], torch.uint8)
    else:
        own = owners.allocate(starts[owners.rank][-1])

    def run(memory: torch.Tensor, at: int, bucket: Bucket, owner: int) -> torch.Tensor:
        dtype, start = torch_dtype(bucket.working), starts[owner][at]
        # `.data`: masters are views of it, and a write to those of one bucket is to count for no other.
        return memory[start : start + bucket.counts[owner] * dtype.itemsize].view(dtype).data

    return {
        index: (
            run(own, at, bucket, owners.rank),
            [run(memory, at, bucket, owner) for owner, memory in enumerate(shared or ())],
        )
        for at, (index, bucket) in enumerate(sharded.items())
    }


def _span(segment: Segment) -> slice:
    return slice(segment.start, segment.start + segment.run.num_elements)
