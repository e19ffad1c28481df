"""Gradients that live only as their owner's run: reduced after every microbatch (stages 2 and 3).

The life of a gradient, once per microbatch:

    backward -> p.grad --[1]--> bucket (whole, working dtype) --[2]--> part of the sum --[3]--> run (owned)

[1] as soon as autograd has finished a parameter, its gradient is copied into its bucket, for which a buffer is taken,
    and `p.grad` is dropped; at stage 3 small ones stay in `p.grad` to the end of the backward of their unit
[2] one reduce-scatter per bucket and microbatch, in one order on all ranks
[3] written by the first microbatch, and added by the others, in the dtype of accumulation

Two buffers in turn, for four buckets that backward completes one after the other (stage 2; at stage 3 a buffer has all
buckets of a unit). The first gradient of b2 waits for b0, which gives A back:

    backward    | b0        | b1        | b2        | b3        |
    buffer A    | fills b0  | reduce b0 | fills b2  | reduce b2 |
    buffer B                | fills b1  | reduce b1 | fills b3  | reduce b3
    waits                                 b0^         b1^           b2, b3 in `reduce`

Where transfers go on only while somebody waits, or the sum needs the scratch, the launch of b1 waits for b0 already.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn

from shardwise.comm import Channel, Work
from shardwise.comm.agreement import a_list, texts_in, understood
from shardwise.comm.device_sums import sums_of
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import take_gradient, take_gradients, values_of
from shardwise.engine.reports import Counters
from shardwise.engine.trained_parameters import ALL, TrainedSet
from shardwise.engine.zero.flat_params import Mark, Owned, Run
from shardwise.engine.zero.grad_copies import MOST_ELEMENTS, GradCopies
from shardwise.engine.zero.grad_reduce import (
    Collectors,
    GradPerUpdate,
    OwnedGradients,
    PartsTaker,
    sum_over_replicas,
    twice_in_one_backward,
)
from shardwise.engine.zero.uneven_microbatches import Passes
from shardwise.errors import ModelError
from shardwise.plan import Bucket, Ownership, Precision
from shardwise.plan.memory import buffer_bytes, buffered_dtype, places_in_buffers, run_dtype

_NUM_KEPT = 2
"""One fills while the other is reduced."""


Views: TypeAlias = "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"
"""The flat place of a bucket in a buffer, and those of its parameters by name."""


@dataclass(kw_only=True, slots=True, eq=False)
class GradBuffer:
    """Memory for the gradients of buckets that come together: of one, or of those of a unit."""

    group: int
    memory: torch.Tensor
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
        self.free: list[torch.Tensor] = []
        self._views: dict[tuple[int, int], Views] = {}
        """(bucket, address of a buffer) -> the views of the bucket there: buffers come again in every microbatch."""

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
            memory = self.free.pop() if self.free else self._take()
            count = self._sizes[group]
            buffer = self._held[group] = GradBuffer(group=group, memory=memory, num_to_launch=count, num_to_land=count)
        return buffer

    def part(self, bucket: int, buffer: GradBuffer, dtype: torch.dtype) -> torch.Tensor:
        """The place of a bucket in its buffer."""
        place = self._places[bucket]
        return buffer.memory[place.start_bytes : place.stop_bytes].view(dtype)

    def views(self, bucket: int, buffer: GradBuffer, make: Callable[[], Views]) -> Views:
        """The views of a bucket in a buffer, as `make` made them once."""
        key = bucket, buffer.memory.data_ptr()
        if (found := self._views.get(key)) is None:
            found = self._views[key] = make()
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
            self.free.append(buffer.memory)

    def forget(self) -> None:
        """What is in use belongs to an update that was given up."""
        # It does not go back to `free`: a transfer that nobody waited for may still read it.
        self._held.clear()
        self._num_taken = len(self.free)
        self._forget_views()

    def trim(self) -> None:
        """Give back what is seldom needed."""
        # Backward may fill several buckets side by side: those of a block and of the module around it, say. More so in
        # the first update, where a bucket waits for parameters that no backward reaches (`expect`).
        if len(self.free) > self._num_kept:
            self._num_taken -= len(self.free[self._num_kept :])
            del self.free[self._num_kept :]
            self._forget_views()

    def _take(self) -> torch.Tensor:
        self._num_taken += 1
        return self._owners.allocate(self._num_bytes)

    def _forget_views(self) -> None:
        """Of buffers that are given back: views keep the memory."""
        kept = {each.data_ptr() for each in self.free}
        self._views = {key: views for key, views in self._views.items() if key[1] in kept}


@dataclass(kw_only=True, slots=True, eq=False)
class _Pending:
    """A bucket on its way through one microbatch."""

    index: int
    bucket: Bucket
    names: frozenset[str]
    stage: int
    wire: torch.dtype
    master: torch.dtype
    purpose: str
    missing: set[str] = field(default_factory=set)
    """Parameters that are waited for before the reduction starts."""
    touched: set[str] = field(default_factory=set)
    buffer: GradBuffer | None = None
    flat: torch.Tensor | None = None
    """Its place in the buffer."""
    views: Mapping[str, torch.Tensor] = field(default_factory=dict)
    quiet: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Parameters without a hook: their gradients are taken when the reduction starts."""
    is_launched: bool = False
    is_left_out: bool = False
    """Nothing of it is trained in this update."""
    num_rounds: int = 0
    """Reductions of this update so far."""
    is_taken: bool = False
    """Whether the reduced part has left for the host."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Flight:
    """A reduction that was started and not waited for."""

    pending: _Pending
    buffer: GradBuffer
    target: torch.Tensor
    work: Work
    is_first: bool


class GradPerMicrobatch(Passes):
    """All gradients of one rank; `microbatch_done` ends each microbatch, `reduce` the update."""

    moves_in_step = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ownership: Ownership,
        precision: Precision,
        *,
        owners: Channel,
        replicas: Channel,
        counters: Counters,
        late: Collection[str] = (),
        stage_of: Mapping[str, int] | None = None,
        starts_when_complete: bool = True,
        taker: PartsTaker | None = None,
    ) -> None:
        """`late`: parameters whose gradients are complete only at the end of the update. In separate buckets, they stay
        whole until then. `stage_of`: which backward finishes a parameter, where a rank has several stages.
        `starts_when_complete`: reduce a bucket when its last gradient has come; False: when the caller says so.
        """
        self._precision = precision
        self._owners = owners
        self._replicas = replicas
        self._counters = counters
        self._starts_when_complete = starts_when_complete
        self._taker = taker
        trainable = [bucket for bucket in ownership.buckets if bucket.trainable]
        is_late = [any(slot.name in late for slot in bucket.slots) for bucket in trainable]
        self._ownership = _restricted(
            ownership, [each for each, is_so in zip(trainable, is_late, strict=True) if not is_so]
        )
        # A tie between stages of a pipeline has its gradient together at the end of the update only (`StageTies`), so
        # that its buckets are reduced as at stage 1.
        self._whole = GradPerUpdate(
            {name: each for name, each in parameters.items() if name in late},
            _restricted(ownership, [each for each, is_so in zip(trainable, is_late, strict=True) if is_so]),
            precision,
            owners=owners,
            replicas=replicas,
            counters=counters,
            late=late,
            taker=taker,
        )
        self.buffers = GradBuffers(self._ownership, precision, owners, by_unit=not starts_when_complete)
        self._pending = [
            _Pending(
                index=index,
                bucket=bucket,
                names=frozenset(slot.name for slot in bucket.slots),
                stage=stage_of[bucket.slots[0].name] if stage_of else 0,
                # One microbatch, whatever k: nothing is added up before the gradient travels.
                wire=torch_dtype(buffered_dtype(bucket, precision)),
                master=torch_dtype(bucket.master),
                purpose=f"gradients of bucket {index}" + ("" if starts_when_complete else f" of unit {bucket.unit!r}"),
            )
            for index, bucket in enumerate(self._ownership.buckets)
        ]
        self._of = {name: pending for pending in self._pending for name in pending.names}
        self._by_stage: dict[int, list[_Pending]] = {}
        for pending in self._pending:
            self._by_stage.setdefault(pending.stage, []).append(pending)
        with torch._C.DisableTorchFunctionSubclass():  # what is at rest has a shape, and refuses the rest
            self._shapes = {name: values_of(parameters[name]).shape for name in self._of}
        self._parameters = [parameters[name] for name in self._of]
        self._runs: list[torch.Tensor] = []
        self._scratch = torch.empty(0, device=owners.device)
        self._scratch_views: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._reduced: list[torch.Tensor] = []
        self._num_microbatches = 0
        self._touched: set[str] = set()
        self._is_collecting = False
        self._trains = False
        self._waits = False
        """Whether no bucket is reduced before the end of a backward."""
        self._flights: deque[_Flight] = deque()
        self._most_flights = 0
        """Those that go on while the next one is started."""
        if owners.progresses_alone:
            self._most_flights = len(ownership.buckets) if sums_of(owners) is None else 1
        self._trained = ALL
        self._unused: frozenset[str] = frozenset()
        self._place: dict[int, int] = {}
        """Buckets in the order in which their first backward on the first rank completed them, then the others."""
        self._completed: list[int] = []
        """Buckets in the order in which the first microbatch completed them."""
        # The parameters that no rank used in the last update, alike on all ranks, are not waited for. If one is used
        # again, its bucket may have left without it: such a gradient is a stray.
        self._strays: dict[str, torch.Tensor] = {}
        self._copies = GradCopies()
        self._owned = OwnedGradients()
        # A hook costs the host as much as a small gradient: where the caller says when all have come, small ones have
        # none.
        for pending in () if starts_when_complete else self._pending:
            pending.quiet = {name: parameters[name] for name in _small(pending.bucket)}
        self._quiet = {
            at: {name: each for pending in held for name, each in pending.quiet.items()}
            for at, held in self._by_stage.items()
        }
        """The same of all buckets of a stage."""
        quiet = set().union(*self._quiet.values())
        self.collectors = Collectors({name: parameters[name] for name in self._of if name not in quiet}, self)

    # What the engine and ties across stages ask -------------------------------------------------------------------

    def views_of(self, owned: Sequence[Owned]) -> Mapping[str, torch.Tensor]:
        """See `GradReduce`."""
        return self._owned.views(owned, [*self._reduced, *self._whole.reduced], self._part_of)

    def runs_of(self, runs: Sequence[Run[Mark]]) -> Sequence[tuple[torch.Tensor, Mark]]:
        """See `GradReduce`."""
        found = self._owned.runs(runs)
        if self._trained is ALL:
            return found
        return [each for each, run in zip(found, runs, strict=True) if not self._is_left_out(run[0])]

    def _is_left_out(self, name: str) -> bool:
        pending = self._of.get(name)
        return self._whole.leaves_out(name) if pending is None else pending.is_left_out

    def _part_of(self, name: str) -> torch.Tensor:
        pending = self._of.get(name)
        return self._whole.part_of(name) if pending is None else self._reduced[pending.index]

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """See `GradReduce`."""
        own = [part for part, pending in zip(self._reduced, self._pending, strict=True) if not pending.is_left_out]
        return [*own, *self._whole.parts]

    @property
    def touched(self) -> frozenset[str]:
        """Parameters that got a gradient since `begin`."""
        return self._whole.touched | self._touched

    def view(self, name: str) -> torch.Tensor:
        """The sum so far for a parameter that is `late`, in its own shape."""
        return self._whole.view(name)

    def place(self, name: str, gradient: torch.Tensor) -> None:
        """Take a sum made elsewhere for that of a parameter that is `late`."""
        self._whole.place(name, gradient)

    def expect_last(self) -> None:
        """The next backward is the last of this update."""
        self._whole.expect_last()

    def begin(self, num_microbatches: int, trained: TrainedSet = ALL) -> None:
        """See `GradReduce`."""
        if trained is not self._trained:
            self._trained = trained
            for pending in self._pending:
                pending.is_left_out = not trained.meets(pending.names)
            self.buffers.expect([each.index for each in self._pending if not each.is_left_out])
        # The runs have the dtype of accumulation, which one microbatch does not need: only that changes with k.
        is_other = not self._runs or (num_microbatches == 1) != (self._num_microbatches == 1)
        if is_other or any(reduced is not run for reduced, run in zip(self._reduced, self._runs, strict=False)):
            self._owned.forget()  # given back, or copies in the dtype of the masters, made for one update
        self._reduced = []
        self._whole.begin(num_microbatches, trained)
        self._copies.forget()
        if is_other:
            self._lay_out(num_microbatches)
        self._num_microbatches = num_microbatches
        self._touched.clear()
        self._strays.clear()
        self._completed.clear()
        # An update that raised may have left a transfer behind, which nobody needs.
        self._flights.clear()
        self.buffers.forget()
        with torch._C.DisableTorchFunctionSubclass():  # at rest or not
            for parameter in self._parameters:
                parameter.grad = None  # of a backward of the user's own, which this update does not count
        for pending in self._pending:
            pending.num_rounds, pending.is_taken = 0, False
            pending.buffer, pending.flat, pending.views = None, None, {}
            self._open(pending)
        self._is_collecting = True

    def expect(self, touched: Collection[str]) -> None:
        """Learn from an update: what no rank had a gradient for is not waited for in the next one.

        `touched`: the same on all ranks. After the first update buckets go in the order in which its backward completed
            them on the first rank. That order may differ from the parameters' order in the model.
        """
        missed = self._of.keys() - touched
        if self._trained.names is not None:  # of the others nothing was learnt
            missed = (missed & self._trained.names) | (self._unused - self._trained.names)
        self._unused = frozenset(missed)
        new = {each.index for each in self._pending if not each.is_left_out}.difference(self._place)
        if self._starts_when_complete and new:
            # Autograd goes back through the forward, and the plan knows only the order of registration. A bucket that
            # is complete early and stands late in the order waits, and holds a buffer. One exchange, in the first
            # update, gives all ranks the order of rank 0: with orders of their own, they would sum unlike buckets.
            self._counters.exchanges += 1
            mine, purpose = json.dumps(self._completed).encode(), "order of gradients"
            order = understood(self._owners.exchange(mine, purpose=purpose), a_list, purpose=purpose)[0]
            for index in dict.fromkeys([*(each for each in order if each in new), *sorted(new)]):
                self._place[index] = len(self._place)
            for pending in self._by_stage.values():
                pending.sort(key=lambda each: self._place.get(each.index, len(self._place)))

    def reduce(self) -> None:
        """Leave the sums over all microbatches and data ranks in the owned parts that `views_of` gives."""
        self._is_collecting = False
        self._add_strays()
        self._land_all()
        self.buffers.trim()
        for pending, run in zip(self._pending, self._runs, strict=True):
            if pending.is_left_out:
                self._reduced.append(run)
                continue
            if not pending.num_rounds:
                run.zero_()
            # No copy where the dtypes agree: the engine takes the mean and clips in the run itself, which the first
            # microbatch of the next update overwrites.
            reduced = run.to(pending.master)
            purpose = f"gradients of bucket {pending.index} over replicas"
            sum_over_replicas(reduced, reduced, self._replicas, purpose=purpose, counters=self._counters)
            self._reduced.append(reduced)
            if self._taker is not None and not pending.is_taken:
                self._taker.send(pending.bucket, reduced)
        self._whole.reduce()

    # Microbatches -------------------------------------------------------------------------------------------------

    def begin_pass(self, *, trains: bool, is_agreed: bool = True) -> None:
        """See `Passes`."""
        self._trains = trains

    def begin_microbatch(self, *, is_joint: bool) -> None:
        """See `Passes`."""
        # A backward of several stages at once may complete their buckets in any order, and who skips it knows one.
        self._waits = not is_joint and len(self._by_stage) > 1

    def end_pass(self, *, has_failed: bool = False) -> None:
        """See `Passes`."""
        self._trains = False

    def skip_microbatch(self) -> None:
        """See `Passes`."""
        # With nothing collected each bucket is launched with zeros, in the same order as on the ranks that compute.
        self.microbatch_done()

    def microbatch_done(self, stage: int | None = None) -> None:
        """See `Passes`: what is left of the microbatch is reduced."""
        if not self._trains:
            return
        # As their backwards go, which is how ranks that skip the microbatch have to do it.
        stages = sorted(self._by_stage, reverse=True) if stage is None else [stage]
        for pending in [each for at in stages for each in self._by_stage.get(at, ())]:
            if not pending.is_launched:
                self._launch(pending)
            self._open(pending)
        # Of all buckets at once: there is seldom one.
        for at in stages:
            for name, gradient in take_gradients(self._quiet.get(at, {})).items():
                self._touched.add(name)
                self._stray(name, gradient)

    def finish(self, indices: Sequence[int]) -> None:
        """Reduce these buckets now: nothing more comes in this microbatch. Numbers count trainable buckets that are
        not `late`."""
        for index in indices:
            if self._trains and not self._pending[index].is_launched:
                self._launch(self._pending[index])
                self._counters.early_reductions += 1

    def index_of(self, name: str) -> int | None:
        """The number of the bucket of a parameter; None for one that is not reduced by microbatch."""
        pending = self._of.get(name)
        return None if pending is None else pending.index

    def collect(self, name: str, parameter: torch.Tensor) -> None:
        """Take a finished gradient over from autograd; outside of an update it is the user's."""
        if not self._is_collecting or (gradient := take_gradient(parameter)) is None:
            return
        pending = self._of[name]
        self._touched.add(name)
        if pending.is_launched:
            self._stray(name, gradient)
            return
        # Taken with the first gradient and not at `begin`, so that two buffers can serve all buckets.
        if pending.buffer is None:
            self._give_buffer(pending)
        self._copies.put(pending.views[name], gradient, adds=name in pending.touched)
        pending.touched.add(name)
        pending.missing.discard(name)
        if not pending.missing and pending.num_rounds == 0 and pending.index not in self._place:
            self._completed.append(pending.index)
        if self._starts_when_complete and not pending.missing and not self._waits:
            self._launch_complete(pending.stage)

    def _launch_complete(self, stage: int) -> None:
        """Start the reductions whose turn it is: buckets go in one order on all ranks."""
        for pending in self._by_stage[stage]:
            if pending.is_launched:
                continue
            # The later ones may be complete; but another rank may have completed them in another order, and the
            # collectives of one channel are matched by their order.
            if pending.missing:
                return
            self._launch(pending)
            self._counters.early_reductions += 1

    def _open(self, pending: _Pending) -> None:
        pending.missing = set(pending.names - self._unused)
        if self._trained.names is not None:
            pending.missing &= self._trained.names
        pending.touched.clear()
        pending.is_launched = pending.is_left_out

    def _give_buffer(self, pending: _Pending) -> None:
        # A single bucket is still on its way from the last microbatch when the next one fills it: its buffer comes back
        # with the wait. So does that of two others while a third is filled.
        while self._flights and self.buffers.is_short(pending.index):
            self._land()
        buffer = self.buffers.give(pending.index)
        pending.buffer = buffer
        pending.flat, pending.views = self.buffers.views(pending.index, buffer, lambda: self._views_of(pending, buffer))

    def _views_of(self, pending: _Pending, buffer: GradBuffer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        flat = self.buffers.part(pending.index, buffer, pending.wire)
        return flat, {
            slot.name: flat[slot.start : slot.start + slot.num_elements].view(self._shapes[slot.name])
            for slot in pending.bucket.slots
        }

    def _launch(self, pending: _Pending) -> None:
        """Start the reduction of a bucket, after the one before it."""
        assert not pending.is_taken, "it would add to a mean that has left"
        self._copies.flush()
        if pending.buffer is None:
            self._give_buffer(pending)
        if gradients := take_gradients(pending.quiet):
            with torch.no_grad():
                torch._foreach_copy_([pending.views[name] for name in gradients], list(gradients.values()))
            pending.touched.update(gradients)
            self._touched.update(gradients)
        buffer = pending.buffer
        assert buffer is not None
        assert pending.flat is not None
        if len(pending.touched) < len(pending.views):
            for name, view in pending.views.items():
                if name not in pending.touched:  # other ranks may have a gradient for it
                    view.zero_()
        run = self._runs[pending.index]
        is_first = pending.num_rounds == 0
        master = pending.master
        # The first part of the sum is written where the sum is; later ones are added from a scratch, in the order of
        # the microbatches, which is the order in which one process adds them.
        is_scratch = not is_first or run.dtype != master
        self._make_way(is_scratch=is_scratch)
        target = self._scratch_of(run.numel(), master) if is_scratch else run
        self._counters.reduce_scatters += 1
        work = self._owners.reduce_scatter(
            target,
            pending.flat,
            counts=pending.bucket.counts,
            purpose=pending.purpose,
        )
        self._flights.append(_Flight(pending=pending, buffer=buffer, target=target, work=work, is_first=is_first))
        self.buffers.launched(buffer)
        pending.buffer, pending.flat, pending.views = None, None, {}
        pending.is_launched = True
        pending.num_rounds += 1

    def _make_way(self, *, is_scratch: bool) -> None:
        """Wait for reductions that the next one must not overtake; `is_scratch`: it adds to the run from a scratch."""
        # Where transfers go on alone, to wait here would hold up the backward. The two buffers limit how many go on.
        # So does what a channel between devices holds until the wait. There is one scratch. Elsewhere a transfer goes
        # on while somebody waits, and two at a time gain nothing.
        most = self._most_flights
        if is_scratch or any(each.target is not self._runs[each.pending.index] for each in self._flights):
            most = 0
        while len(self._flights) > most:
            self._land()

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Wait for the reduction that was started first, and add what it gave to the run."""
        flight = self._flights.popleft()
        # Until then peers, or a kernel of the transfer, may read the buffer, which `landed` gives to the next bucket.
        flight.work.wait()
        self.buffers.landed(flight.buffer)
        run = self._runs[flight.pending.index]
        if flight.target is not run:
            if flight.is_first:  # a run in the dtype of accumulation, where the sum comes in that of the master
                run.copy_(flight.target)
            else:
                run.add_(flight.target)
        if self._taker is not None and self._is_last(flight.pending):
            flight.pending.is_taken = True
            self._taker.send(flight.pending.bucket, run)

    def _is_last(self, pending: _Pending) -> bool:
        """Whether nothing changes the run of a bucket any more: no microbatch, no stray, no replica, no cast."""
        return (
            pending.num_rounds == self._num_microbatches
            and self._unused.isdisjoint(pending.names)
            and self._replicas.size == 1
            and self._runs[pending.index].dtype == pending.master
        )

    def _scratch_of(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for one part of a sum: one reduction that needs it is in flight."""
        # Not allocated with one microbatch in the master's dtype, which needs none; then at once for the largest.
        if (view := self._scratch_views.get((num_elements, dtype))) is not None:
            return view
        num_bytes = num_elements * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            largest = max(
                pending.bucket.counts[self._owners.rank] * torch_dtype(pending.bucket.master).itemsize
                for pending in self._pending
            )
            self._scratch = torch.empty(largest, dtype=torch.uint8, device=self._owners.device)
        view = self._scratch_views[num_elements, dtype] = self._scratch[:num_bytes].view(dtype)
        return view

    def _lay_out(self, num_microbatches: int) -> None:
        self._runs = []  # free before taking the new ones
        self._scratch_views.clear()
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self._owners.device)
        dtypes, counts, starts = [], [], [0]
        for pending in self._pending:
            dtypes.append(torch_dtype(run_dtype(pending.bucket, self._precision, num_microbatches=num_microbatches)))
            counts.append(pending.bucket.counts[self._owners.rank])
            # Where torch would begin a new tensor: kernels round by that.
            starts.append(starts[-1] + -(-counts[-1] * dtypes[-1].itemsize // 64) * 64)
        # In one memory, so that few calls of torch divide them and take their norm.
        memory = torch.zeros(starts[-1], dtype=torch.uint8, device=self._owners.device)
        for start, dtype, count in zip(starts, dtypes, counts, strict=False):
            self._runs.append(memory[start : start + count * dtype.itemsize].view(dtype))

    # Gradients that come after their bucket -----------------------------------------------------------------------

    @torch.no_grad()
    def _stray(self, name: str, gradient: torch.Tensor) -> None:
        """Keep a gradient that comes after the reduction of its bucket: no rank had one for it in the last update."""
        if name not in self._unused:
            raise ModelError(self._too_late(name))
        # Kept whole on this rank: other ranks may have none, and cannot join a reduction in the midst of backward. The
        # sum over microbatches is taken here, before that over ranks, so that the last bit may differ.
        if name in self._strays:
            self._strays[name].add_(gradient)
        else:
            dtype = torch.promote_types(gradient.dtype, torch_dtype(self._precision.accumulate))
            self._strays[name] = gradient.to(dtype if self._num_microbatches > 1 else gradient.dtype, copy=True)

    def _too_late(self, name: str) -> str:
        if self._starts_when_complete:
            return twice_in_one_backward(name)
        return (
            f"a backward came to parameter {name!r} once more, after the gradients of its unit "
            f"{self._of[name].bucket.unit!r} had been summed over the ranks and freed (stage 3). Reentrant activation "
            "checkpoints do so: give them use_reentrant=False. Or name the module around all uses of the unit in "
            "sharding.units"
        )

    def _add_strays(self) -> None:
        """One more reduction for the buckets of gradients that came late on some rank."""
        # All ranks agreed on `_unused`, so that all of them exchange here or none does.
        if not self._unused or not self._trained.meets(self._unused):
            return
        self._counters.exchanges += 1
        mine, purpose = json.dumps(sorted(self._strays)).encode(), "gradients of parameters that were not used before"
        answers = self._owners.exchange(mine, purpose=purpose)
        names = {name for given in understood(answers, texts_in, purpose=purpose) for name in given}
        for pending in self._pending:
            if names.isdisjoint(pending.names):
                continue
            self._open(pending)
            self._give_buffer(pending)
            for name in self._strays.keys() & pending.names:
                pending.views[name].copy_(self._strays[name])
                pending.touched.add(name)
            self._launch(pending)


def _small(bucket: Bucket) -> list[str]:
    """Parameters of a bucket whose gradients may wait for all of it, in their own memory."""
    found, num_elements = [], 0
    for slot in bucket.slots:
        if slot.num_elements <= MOST_ELEMENTS >> 2 and num_elements + slot.num_elements <= MOST_ELEMENTS:
            found.append(slot.name)
            num_elements += slot.num_elements
    return found


def _restricted(ownership: Ownership, buckets: Sequence[Bucket]) -> Ownership:
    return replace(ownership, buckets=tuple(buckets))
