"""From backward to the owner's part of the gradient: added up before the reduction, or after it.

before, at stages 0 and 1:

    backward -> p.grad --[1]--> arena (whole bucket) --[2]--> arena (owned part, master dtype) -> optimizer

    [1] as soon as autograd has finished a parameter, its gradient is copied (first microbatch) or added (later ones)
        into its view of the bucket, and `p.grad` is dropped. Small ones in the dtype of their sum stay in `p.grad` to
        the end of the backward, and are taken together: the host is spared a hook for each
    [2] one reduce-scatter per bucket and update, started while backward runs where transfers progress alone

after, at stages 2 and 3, once per microbatch:

    backward -> p.grad --[1]--> bucket (whole, working dtype) --[2]--> part of the sum --[3]--> run (owned)

    [1] the same, into one of a few buffers (`grad_buffers`); at stage 3 small gradients stay in `p.grad` to the end of
        the backward of their unit
    [2] one reduce-scatter per bucket and microbatch, in one order on all ranks
    [3] written by the first microbatch, and added by the others, in the dtype of accumulation

A tie between stages of a pipeline has its gradient together at the end of the update only (`StageTies`), so that its
buckets are reduced as at stage 1.

The order of the sums, where g01 is the gradient of rank 0 in microbatch 1. Float addition is not associative, so that
with several microbatches the last bits of the two ways differ. Each is the same on all ranks and in every run.

    before   (g00 + g01) + (g10 + g11)     microbatches on each rank, then ranks in their order
    after    (g00 + g10) + (g01 + g11)     ranks for each microbatch, then microbatches
"""

import json
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm import Channel, Work
from shardwise.comm.agreement import json_as, understood
from shardwise.comm.device.sums import sums_of
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.inventory import take_gradient, take_gradients
from shardwise.engine.forward.passes import Passes
from shardwise.engine.forward.trained_parameters import ALL, TrainedSet
from shardwise.engine.torch_private import DisableTorchFunctionSubclass
from shardwise.engine.zero.flat_params import Mark, Owned, Run
from shardwise.engine.zero.grad_buffers import (
    MOST_ELEMENTS,
    GradBuffer,
    GradBuffers,
    GradCopies,
    HostGradients,
    OwnedGradients,
)
from shardwise.engine.zero.grad_hooks import Collectors, is_hooked, taken_by
from shardwise.errors import ModelError
from shardwise.plan import Arena, Bucket, OwnedLayout, Precision, plan_arena
from shardwise.plan.memory import buffered_dtype, run_dtype, wire_dtype

_MOST_IN_ARENA = 1 << 18
"""Elements of a bucket of the arena whose gradients wait beside it. Its parts in the arena are there in any case."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Pending:
    """A bucket on its way through one microbatch, or through all of an update."""

    index: int
    """Among those that are added up before their reduction, or among the others."""
    bucket: Bucket
    adds_before: bool
    stage: int
    wire: torch.dtype
    purpose: str
    total: torch.Tensor
    """The owned part of its sum: of the arena, or the run."""
    reduced: torch.Tensor
    """The same in the dtype of the master, valid after `reduce`."""
    names: frozenset[str] = field(init=False)
    master: torch.dtype = field(init=False)
    missing: set[str] = field(init=False, default_factory=set)
    """Parameters that are waited for before the reduction starts."""
    touched: set[str] = field(init=False, default_factory=set)
    buffer: GradBuffer | None = field(init=False, default=None)
    flat: torch.Tensor | None = field(init=False, default=None)
    """Its place in the arena or in a buffer."""
    views: Mapping[str, torch.Tensor] = field(init=False, default_factory=dict)
    quiet: Mapping[str, nn.Parameter] = field(init=False, default_factory=dict)
    """Parameters without a hook: their gradients are taken when the reduction starts."""
    small: Mapping[str, nn.Parameter] = field(init=False, default_factory=dict)
    """Those that may be without one, of a bucket that is added up before."""
    is_launched: bool = field(init=False, default=False)
    is_left_out: bool = field(init=False, default=False)
    """Nothing of it is trained in this update."""
    num_rounds: int = field(init=False, default=0)
    """Reductions of this update so far."""
    is_taken: bool = field(init=False, default=False)
    """Whether the reduced part has left for the host."""

    def __post_init__(self) -> None:
        self.names = frozenset(slot.name for slot in self.bucket.slots)
        self.master = torch_dtype(self.bucket.master)


@dataclass(kw_only=True, slots=True, eq=False)
class _Flight:
    """A reduction that was started and not waited for."""

    pending: _Pending
    buffer: GradBuffer | None
    target: torch.Tensor
    work: Work | None
    """None where all is on this rank."""
    is_apart: bool
    """Whether it takes memory besides: a copy in a narrower dtype, or a scratch for what is added."""


class GradReduce(Passes):
    """All gradients of one rank; `microbatch_done` ends each microbatch, `reduce` the update."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: OwnedLayout,
        precision: Precision,
        *,
        owners: Channel,
        replicas: Channel,
        counters: Counters,
        taker: HostGradients | None = None,
    ) -> None:
        """taker: gets the owned part of each bucket as soon as it has its last value.

        At stages 2 and 3 what is not `late` is reduced after each microbatch. At stage 3 the caller says when.
        """
        self._precision = precision
        self._owners, self._replicas = owners, replicas
        self._counters = counters
        self._late = layout.late
        self.moves_in_step = layout.stage >= 2
        self._starts_when_complete = layout.stage < 3
        self._taker = taker
        self._nothing = torch.empty(0, dtype=torch.uint8, device=owners.device)
        before, after = (
            replace(each, buckets=tuple(bucket for bucket in each.buckets if bucket.trainable))
            for each in layout.by_lateness()
        )
        self._ownership = before
        """Of what is added up before."""
        self.buffers = GradBuffers(after, precision, owners, by_unit=not self._starts_when_complete)
        self._before = self._pendings(before.buckets, adds_before=True, stage_of={})
        self._after = self._pendings(after.buckets, adds_before=False, stage_of=layout.stage_of)
        self._all = [*self._after, *self._before]
        self._of = {name: pending for pending in self._all for name in pending.names}
        self._by_stage: dict[int, list[_Pending]] = {}
        """Those that are added up after, in the order in which they are reduced."""
        for pending in self._after:
            self._by_stage.setdefault(pending.stage, []).append(pending)
        with DisableTorchFunctionSubclass():  # what is at rest has a shape, and refuses the rest
            self._shapes = {name: parameters[name].shape for name in self._of}
        self._parameters = taken_by(self, [parameters[name] for name in self._of])
        self._arena = self._nothing
        self._layout: Arena | None = None
        self.num_microbatches = 0  # of this update, or of the last one
        self._touched: set[str] = set()
        self._is_collecting = self._trains = self._starts_early = False
        """The last: whether buckets that are complete are reduced at once, and not at the end of a backward."""
        self._flights: deque[_Flight] = deque()
        self._most_flights = 0
        """Those that go on while the next one is started."""
        if owners.progresses_alone:
            self._most_flights = len(layout.ownership.buckets) if sums_of(owners) is None else 1
        self._trained = ALL
        self._unused: set[str] = set()
        """Parameters that no rank used in the last update: the same on all ranks."""
        self._place: dict[int, int] = {}
        """Buckets in the order in which their first backward on the first rank completed them, then the others."""
        self._completed: list[int] = []
        """Buckets in the order in which the first microbatch completed them."""
        self._copies = GradCopies()
        self._owned = OwnedGradients()
        self._quiet: dict[int, dict[str, nn.Parameter]] = {at: {} for at in self._by_stage}
        """Parameters without a hook, of all buckets of a stage."""
        self._find_small(parameters)
        self._collectors = Collectors({name: parameters[name] for name in self._of}, self)
        """The hooks through which autograd gives finished gradients."""

    def _find_small(self, parameters: Mapping[str, nn.Parameter]) -> None:
        # A hook costs the host as much as a small gradient. Small ones have none where the caller says when all have
        # come, and where no bucket is reduced before the last backward has ended.
        for pending in () if self._starts_when_complete else self._after:
            pending.quiet = {name: parameters[name] for name in _small(pending.bucket, MOST_ELEMENTS)}
            self._quiet[pending.stage] |= pending.quiet
        for pending in () if self._owners.progresses_alone or self._taker is not None else self._before:
            small = _small(pending.bucket, _MOST_IN_ARENA)
            pending.small = {name: parameters[name] for name in small if name not in self._late}

    def _put_on_hooks(self) -> None:
        """Put a hook on each parameter whose gradient cannot stay where autograd adds it up."""
        for pending in self._before:
            # In the dtype of the parameter. A hook of the user's is to see the gradient of one microbatch: it has ours
            # behind it, which takes that away.
            is_alike = pending.flat is not None and pending.flat.dtype == torch_dtype(pending.bucket.working)
            pending.quiet = {name: each for name, each in pending.small.items() if is_alike and not is_hooked(each)}
        self._collectors.stand_on_all_but({name for each in self._all for name in each.quiet})

    def _pendings(self, buckets: Sequence[Bucket], *, adds_before: bool, stage_of: Mapping[str, int]) -> list[_Pending]:
        return [
            _Pending(
                index=index,
                bucket=bucket,
                adds_before=adds_before,
                stage=stage_of.get(bucket.slots[0].name, 0),
                # Of one microbatch, whatever k, where nothing is added up before the gradient travels.
                wire=torch_dtype(buffered_dtype(bucket, self._precision)),
                purpose=f"gradients of bucket {index}"
                + ("" if adds_before or self._starts_when_complete else f" of unit {bucket.unit!r}"),
                total=self._nothing,
                reduced=self._nothing,
            )
            for index, bucket in enumerate(buckets)
        ]

    # What the engine and ties across stages ask -------------------------------------------------------------------

    def views_of(self, owned: Sequence[Owned]) -> Mapping[str, torch.Tensor]:
        """The reduced gradients of all that is owned, by name, in the shapes of the masters; valid after `reduce`."""
        return self._owned.views(owned, [each.reduced for each in self._all], lambda name: self._of[name].reduced)

    def runs_of(self, runs: Sequence[Run[Mark]]) -> Sequence[tuple[torch.Tensor, Mark]]:
        """The same in as few flat tensors as can be, and whether each counts; asked for after `views_of`."""
        found = self._owned.runs(runs)
        if self._trained is ALL:
            return found
        return [each for each, run in zip(found, runs, strict=True) if not self._of[run[0]].is_left_out]

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """The owned parts of all buckets with something trained, flat, valid after `reduce`."""
        return [each.reduced for each in self._all if not each.is_left_out]

    @property
    def touched(self) -> frozenset[str]:
        """Parameters that got a gradient since `begin`; asked for after the last backward."""
        self.take_small()
        return frozenset(self._touched)

    def view(self, name: str) -> torch.Tensor:
        """The sum for a parameter of several stages, in its own shape; asked for as `touched` is."""
        self._copies.flush()
        return self._of[name].views[name]

    def place(self, name: str, gradient: torch.Tensor) -> None:
        """Take a sum made elsewhere for that of a parameter of several stages: after the last backward."""
        view = self.view(name)
        # The sum may have been made in the view itself (`StageTies.collect`).
        if gradient is not view:
            view.copy_(gradient)
        self._touched.add(name)
        self._of[name].touched.add(name)

    def begin(self, num_microbatches: int, trained: TrainedSet = ALL) -> None:
        """Forget the gradients of the last update and make room for those of `num_microbatches`.

        Buckets without a parameter that is `trained` are left alone.
        """
        if trained is not self._trained:
            self._trained = trained
            for pending in self._all:
                pending.is_left_out = not trained.meets(pending.names)
            self.buffers.expect([each.index for each in self._after if not each.is_left_out])
        self._copies.forget()
        if self._before:
            self._lay_out_arena(num_microbatches)
        if self._after:
            self._lay_out_runs(num_microbatches)
        self.num_microbatches = num_microbatches
        self._touched.clear()
        self._completed.clear()
        # An update that raised may have left a transfer behind, which nobody needs.
        self._flights.clear()
        self.buffers.forget()
        with DisableTorchFunctionSubclass():  # at rest or not
            for parameter in self._parameters:
                parameter.grad = None  # of a backward of the user's own, which this update does not count
        for pending in self._all:
            pending.num_rounds, pending.is_taken = 0, False
            if not pending.adds_before:
                pending.buffer, pending.flat, pending.views = None, None, {}
            self._open(pending)
        self._put_on_hooks()
        self._starts_early = self.moves_in_step and self._starts_when_complete
        self._is_collecting = True

    def expect_last(self) -> None:
        """The next backward is the last of this update: buckets it completes may be reduced at once."""
        if self.moves_in_step:
            return
        # Alone there is nothing to wait for, and a taker wants parts as soon as they are there.
        is_alone = self._owners.size * self._replicas.size == 1
        self._starts_early = self._owners.progresses_alone or (is_alone and self._taker is not None)
        for pending in self._before:
            pending.missing = set(pending.names if self._trained.names is None else pending.names & self._trained.names)

    def expect(self, touched: Collection[str]) -> None:
        """Learn from an update: for buckets with something that no rank had a gradient for no other one waits.

        `touched`: the same on all ranks. After the first update buckets go in the order in which its backward completed
            them on the first rank. That order may differ from the parameters' order in the model.
        """
        if not self._starts_when_complete:  # the caller says when
            return
        missed = set().union(*[each.names for each in self._after]).difference(touched)
        if self._trained.names is not None:  # of the others nothing was learnt
            missed = (missed & self._trained.names) | (self._unused - self._trained.names)
        new = {each.index for each in self._after if not each.is_left_out}.difference(self._place)
        if new:
            # Autograd goes back through the forward, and the plan knows only the order of registration. A bucket that
            # is complete early and stands late in the order waits, and holds a buffer. One exchange, in the first
            # update, gives all ranks the order of rank 0: with orders of their own, they would sum unlike buckets.
            self._counters.exchanges += 1
            mine, purpose = json.dumps(self._completed).encode(), "order of gradients"
            order = understood(self._owners.exchange(mine, purpose=purpose), json_as(list[int]), purpose=purpose)[0]
            for index in dict.fromkeys([*(each for each in order if each in new), *sorted(new)]):
                self._place[index] = len(self._place)
        if new or missed != self._unused:
            self._unused = missed
            for held in self._by_stage.values():
                # Last the buckets that backward may never complete.
                held.sort(
                    key=lambda each: (not missed.isdisjoint(each.names), self._place.get(each.index, len(self._place)))
                )

    def reduce(self) -> None:
        """Leave the sums over all microbatches and data ranks in the owned parts that `views_of` gives."""
        self.stop()
        self._land_all()
        self.buffers.trim()
        for pending in self._after:
            if pending.is_left_out:
                continue
            if not pending.num_rounds:
                pending.total.zero_()
            # No copy where the dtypes agree: the engine takes the mean and clips in the run itself, which the first
            # microbatch of the next update overwrites.
            pending.reduced = pending.total.to(pending.master)
            self._sum_over_replicas(pending, pending.reduced)
            if self._taker is not None and not pending.is_taken:
                self._taker.send(pending.bucket, pending.reduced)
        for pending in self._before:
            if not pending.is_launched:
                self._launch(pending)
        self._land_all()

    def stop(self) -> None:
        """From now on gradients are the user's again."""
        self.take_small()
        self._is_collecting = False

    def give_up(self) -> None:
        """The same after an error: what has come is of no use."""
        for pending in self._before if self._is_collecting else ():
            take_gradients(pending.quiet)
        self._is_collecting = False

    # Microbatches -------------------------------------------------------------------------------------------------

    @override
    def begin_pass(self, *, trains: bool, is_agreed: bool = True) -> None:
        self._trains = trains

    @override
    def begin_microbatch(self, *, is_joint: bool) -> None:
        # A backward of several stages at once may complete their buckets in any order, and who skips it knows one.
        self._starts_early = self._starts_when_complete and (is_joint or len(self._by_stage) <= 1)

    @override
    def end_pass(self, *, has_failed: bool = False) -> None:
        self._trains = False

    @override
    def skip_microbatch(self) -> None:
        # With nothing collected each bucket is launched with zeros, in the same order as on the ranks that compute.
        self.microbatch_done()

    def microbatch_done(self, stage: int | None = None) -> None:
        """Reduce what is left of the microbatch."""
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
            if late := take_gradients(self._quiet.get(at, {})):
                raise ModelError(self._too_late(next(iter(late))))

    def finish(self, indices: Sequence[int]) -> None:
        """Reduce the buckets with these numbers now (`index_of`): nothing more comes in this microbatch."""
        for index in indices:
            if self._trains and not self._after[index].is_launched:
                self._launch(self._after[index])
                self._counters.early_reductions += 1

    def index_of(self, name: str) -> int | None:
        """The number of the bucket of a parameter; None for one that is not reduced by microbatch."""
        pending = self._of.get(name)
        return None if pending is None or pending.adds_before else pending.index

    def collect(self, name: str, parameter: torch.Tensor) -> None:
        """Take a finished gradient over from autograd; outside of an update it is the user's."""
        if not self._is_collecting or (gradient := take_gradient(parameter)) is None:
            return
        if self._trained.names is not None and name not in self._trained.names:
            return  # a forward turned its `requires_grad` on again
        pending = self._of[name]
        self._touched.add(name)
        if pending.is_launched:
            raise ModelError(self._too_late(name))
        # Taken with the first gradient and not at `begin`, so that two buffers can serve all buckets.
        if pending.flat is None:
            self._give_buffer(pending)
        # Copied, not added to zeros: that would cost a pass over memory, and -0.0 its sign.
        self._copies.put(pending.views[name], gradient, adds=name in pending.touched)
        pending.touched.add(name)
        # A `late` parameter gets parts of its gradient from other stages after this backward: its bucket waits for
        # `reduce`.
        if name in self._late:
            return
        pending.missing.discard(name)
        if not pending.missing:
            if self.moves_in_step and pending.num_rounds == 0 and pending.index not in self._place:
                self._completed.append(pending.index)
            if self._starts_early:
                self._launch_complete(self._before if pending.adds_before else self._by_stage[pending.stage])

    def _launch_complete(self, turns: Sequence[_Pending]) -> None:
        """Start the reductions whose turn it is: buckets go in one order on all ranks."""
        for pending in turns:
            if pending.is_launched:
                continue
            # The later ones may be complete; but another rank may have completed them in another order, and the
            # collectives of one channel are matched by their order.
            if pending.missing:
                return
            self._launch(pending)
            self._counters.early_reductions += 1

    def _open(self, pending: _Pending) -> None:
        pending.missing = set(pending.names if self._trained.names is None else pending.names & self._trained.names)
        pending.touched.clear()
        pending.is_launched = pending.is_left_out

    def _give_buffer(self, pending: _Pending) -> None:
        # A single bucket is still on its way from the last microbatch when the next one fills it: its buffer comes back
        # with the wait. So does that of two others while a third is filled.
        while self._flights and self.buffers.is_short(pending.index):
            self._land()
        buffer = self.buffers.give(pending.index)
        pending.buffer = buffer
        pending.flat, pending.views = self.buffers.views(
            pending.index,
            buffer,
            lambda: self._views_in(self.buffers.part(pending.index, buffer, pending.wire), pending.bucket),
        )

    def _views_in(self, flat: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The place of a bucket, and those of its parameters by name."""
        return flat, {
            slot.name: flat[slot.start : slot.start + slot.num_elements].view(self._shapes[slot.name])
            for slot in bucket.slots
        }

    def _launch(self, pending: _Pending) -> None:
        """Start the reduction of a bucket, after the one before it."""
        assert not pending.is_taken, "it would add to a mean that has left"
        self._copies.flush()
        if pending.flat is None:
            self._give_buffer(pending)
        if not pending.adds_before:
            self._take_quiet(pending)
        flat, target = pending.flat, pending.total
        assert flat is not None
        if len(pending.touched) < len(pending.views):
            for name, view in pending.views.items():
                if name not in pending.touched:  # other ranks may have a gradient for it
                    view.zero_()
        # The first part of the sum is written where the sum is; later ones are added from a scratch, in the order of
        # the microbatches, which is the order in which one process adds them.
        is_scratch = pending.num_rounds > 0 or target.dtype != pending.master
        is_apart = is_scratch or flat.dtype != pending.wire
        self._make_way(is_apart=is_apart)
        if is_scratch:
            target = self.buffers.scratch(target.numel(), pending.master)
        work = None
        if self._owners.size > 1 or not pending.adds_before:
            self._counters.reduce_scatters += 1
            source = flat if flat.dtype == pending.wire else flat.to(pending.wire)
            work = self._owners.reduce_scatter(target, source, counts=pending.bucket.counts, purpose=pending.purpose)
        self._flights.append(
            _Flight(pending=pending, buffer=pending.buffer, target=target, work=work, is_apart=is_apart)
        )
        pending.is_launched = True
        pending.num_rounds += 1
        if pending.buffer is not None:
            self.buffers.launched(pending.buffer)
            pending.buffer, pending.flat, pending.views = None, None, {}
        elif work is None and self._taker is not None and self._replicas.size == 1:
            self._land_all()

    def take_small(self) -> None:
        """Take what waits in `p.grad` to where the gradients of a bucket are added up."""
        for pending in self._before if self._is_collecting else ():
            self._take_quiet(pending)

    def _take_quiet(self, pending: _Pending) -> None:
        """Take the gradients that autograd has added up by itself."""
        gradients = take_gradients(pending.quiet)
        if self._trained.names is not None:
            gradients = {name: each for name, each in gradients.items() if name in self._trained.names}
        if gradients:
            later = {name: gradients.pop(name) for name in pending.touched.intersection(gradients)}
            with torch.no_grad():
                if gradients:
                    torch._foreach_copy_([pending.views[name] for name in gradients], list(gradients.values()))
                if later:
                    torch._foreach_add_([pending.views[name] for name in later], list(later.values()))
            pending.touched.update(gradients)
            self._touched.update(gradients)

    def _make_way(self, *, is_apart: bool) -> None:
        """Wait for reductions that the next one must not overtake; `is_apart`: it takes memory besides."""
        # Where transfers go on alone, to wait here would hold up the backward. The two buffers limit how many go on.
        # So does what a channel between devices holds until the wait, and a copy in a narrower dtype. There is one
        # scratch. Elsewhere a transfer goes on while somebody waits: two at a time gain nothing, and in the arena the
        # results of one would overwrite the input of another.
        most = self._most_flights
        if is_apart or any(each.is_apart for each in self._flights):
            most = 0
        while len(self._flights) > most:
            self._land()

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Wait for the reduction that was started first, and bring what it gave to the sum of the owner."""
        flight = self._flights.popleft()
        pending = flight.pending
        total = pending.total
        # Until then peers, or a kernel of the transfer, may read the buffer, which `landed` gives to the next bucket.
        if flight.work is not None:
            flight.work.wait()
        if flight.buffer is None:
            self._sum_in_arena(pending)
        else:
            self.buffers.landed(flight.buffer)
            if flight.target is not total:
                if pending.num_rounds > 1:
                    total.add_(flight.target)
                else:  # a run in the dtype of accumulation, where the sum comes in that of the master
                    total.copy_(flight.target)
        if self._taker is not None and self._is_last(pending):
            pending.is_taken = True
            self._taker.send(pending.bucket, total)

    def _sum_in_arena(self, pending: _Pending) -> None:
        """Where owners hold a part again (replicas), add up their sums; where it stayed here, change its dtype."""
        assert pending.flat is not None
        if self._owners.size > 1:
            self._sum_over_replicas(pending, pending.total)
        elif self._replicas.size > 1:
            self._sum_over_replicas(pending, pending.flat.to(pending.wire))
        elif pending.flat.dtype != pending.master:
            pending.total.copy_(pending.flat)

    def _sum_over_replicas(self, pending: _Pending, source: torch.Tensor) -> None:
        """Leave in the reduced part, on every replica, the sum of what all of them have in `source`."""
        reduced, replicas = pending.reduced, self._replicas
        if replicas.size == 1:
            return
        # Two halves of an all-reduce: each element is summed on one rank, so that all replicas get the same bits. Parts
        # are padded to a multiple of the replicas (`plan.buckets`).
        share = reduced.numel() // replicas.size
        mine = reduced[replicas.rank * share : (replicas.rank + 1) * share]
        purpose = f"gradients of bucket {pending.index} over replicas"
        self._counters.reduce_scatters += 1
        replicas.reduce_scatter(mine, source, purpose=purpose).wait()
        self._counters.all_gathers += 1
        replicas.all_gather(reduced, mine, purpose=purpose).wait()

    def _is_last(self, pending: _Pending) -> bool:
        """Whether nothing changes the sum of a bucket any more: no microbatch, no replica, no cast."""
        return pending.adds_before or (
            pending.num_rounds == self.num_microbatches
            and self._replicas.size == 1
            and pending.total.dtype == pending.master
        )

    # Memory -------------------------------------------------------------------------------------------------------

    def _lay_out_arena(self, num_microbatches: int) -> None:
        layout = plan_arena(self._ownership, self._owners.rank, self._precision, num_microbatches=num_microbatches)
        # One microbatch needs no float32 sums, so that the arena of k = 1 is smaller: the size follows the step.
        if layout == self._layout:
            return
        self._layout = layout
        # Freed before the new one is taken. Both together would make the peak of a run at its first change of k.
        self._owned.forget()
        for pending in self._before:
            pending.flat, pending.views = None, {}
            pending.total = pending.reduced = self._nothing
        self._arena = self._nothing
        # Peers read it: it is allocated by the channel that moves it (at stage 0 owners are one rank).
        self._arena = (self._owners if self._owners.size > 1 else self._replicas).allocate(layout.num_bytes)
        for pending, region in zip(self._before, layout.regions, strict=True):
            # `reduced` may lie in the memory of other buckets: the arena is packed while it is reduced (see the figure
            # of `plan.memory.Arena`), so buckets are reduced in their order, whatever backward completes first.
            bucket, dtype = pending.bucket, torch_dtype(region.gradient_dtype)
            flat = self._typed(region.gradient_start_bytes, bucket.num_elements, dtype)
            pending.flat, pending.views = self._views_in(flat, bucket)
            own = bucket.counts[self._owners.rank]
            pending.total = pending.reduced = self._typed(region.reduced_start_bytes, own, pending.master)
            pending.wire = torch_dtype(wire_dtype(bucket, self._precision, num_microbatches=num_microbatches))

    def _typed(self, start_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._arena[start_bytes : start_bytes + num_elements * dtype.itemsize].view(dtype)

    def _lay_out_runs(self, num_microbatches: int) -> None:
        # The runs have the dtype of accumulation, which one microbatch does not need: only that changes with k.
        is_other = not self.num_microbatches or (num_microbatches == 1) != (self.num_microbatches == 1)
        if is_other or any(each.reduced is not each.total for each in self._after):
            self._owned.forget()  # given back, or copies in the dtype of the masters, made for one update
        for pending in self._after:
            pending.reduced = pending.total
        if not is_other:
            return
        for pending in self._after:
            pending.total = pending.reduced = self._nothing  # free before taking the new ones
        self.buffers.forget_scratch()
        dtypes, counts, starts = [], [], [0]
        for pending in self._after:
            dtypes.append(torch_dtype(run_dtype(pending.bucket, self._precision, num_microbatches=num_microbatches)))
            counts.append(pending.bucket.counts[self._owners.rank])
            # Where torch would begin a new tensor: kernels round by that.
            starts.append(starts[-1] + -(-counts[-1] * dtypes[-1].itemsize // 64) * 64)
        # In one memory, so that few calls of torch divide them and take their norm.
        memory = torch.zeros(starts[-1], dtype=torch.uint8, device=self._owners.device)
        for pending, start, dtype, count in zip(self._after, starts, dtypes, counts, strict=False):
            pending.total = pending.reduced = memory[start : start + count * dtype.itemsize].view(dtype)

    def _too_late(self, name: str) -> str:
        if self._starts_when_complete:
            return (
                f"parameter {name!r} got a gradient twice in one backward, after its bucket was reduced; use "
                "non-reentrant activation checkpointing (use_reentrant=False)"
            )
        return (
            f"a backward came to parameter {name!r} once more, after the gradients of its unit "
            f"{self._of[name].bucket.unit!r} had been summed over the ranks and freed (stage 3). Reentrant activation "
            "checkpoints do so: give them use_reentrant=False. Or name the module around all uses of the unit in "
            "sharding.units"
        )


class SmallGradients(Passes):
    """Stages 0 and 1: between microbatches no gradient waits in `p.grad`, where a forward may clear it or hook it."""

    def __init__(self, gradients: GradReduce) -> None:
        # Layers of modules keep this for as long as the model lives.
        self._gradients = weakref.ref(gradients)

    @override
    def microbatch_done(self, stage: int | None = None) -> None:
        if (gradients := self._gradients()) is not None:
            gradients.take_small()

    @override
    def end_pass(self, *, has_failed: bool = False) -> None:
        if has_failed and (gradients := self._gradients()) is not None:
            gradients.give_up()


def _small(bucket: Bucket, most: int) -> list[str]:
    """Parameters of a bucket whose gradients may wait for all of it, in their own memory: `most` elements."""
    found, num_elements = [], 0
    for slot in bucket.slots:
        if slot.num_elements <= most >> 2 and num_elements + slot.num_elements <= most:
            found.append(slot.name)
            num_elements += slot.num_elements
    return found
