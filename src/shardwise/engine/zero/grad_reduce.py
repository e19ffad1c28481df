"""From backward to the owner's part of the gradient: what all stages share, and the reduction once per update.

The life of a gradient at stages 0 and 1 (`GradPerUpdate`; `grad_per_microbatch` has that of stages 2 and 3):

    backward -> p.grad --[1]--> arena (whole bucket) --[2]--> arena (owned part, master dtype) -> optimizer

[1] as soon as autograd has finished a parameter, its gradient is copied (first microbatch) or added (later ones) into
    its view of the bucket, and `p.grad` is dropped
[2] one reduce-scatter per bucket and update, started while backward runs where transfers progress alone

The order of the sums, where g01 is the gradient of rank 0 in microbatch 1. Float addition is not associative, so that
with several microbatches the last bits of the two ways differ. Each is the same on all ranks and in every run.

    stages 0 and 1   (g00 + g01) + (g10 + g11)     microbatches on each rank, then ranks in their order
    stages 2 and 3   (g00 + g10) + (g01 + g11)     ranks for each microbatch, then microbatches
"""

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.comm import Channel, Work
from shardwise.comm.device_sums import sums_of
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import take_gradient, values_of
from shardwise.engine.reports import Counters
from shardwise.engine.trained_parameters import ALL, TrainedSet
from shardwise.engine.zero.flat_params import Mark, Owned, Run
from shardwise.engine.zero.grad_copies import GradCopies
from shardwise.errors import ModelError
from shardwise.plan import Arena, Bucket, Ownership, Precision, plan_arena
from shardwise.plan.memory import wire_dtype


class Collectors:
    """A hook on each parameter, which gives its gradient to the collector.

    A model that is put under another plan keeps the hooks. They do nothing once the collector is gone, and do not keep
    it alive.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], collector: "Collector") -> None:
        # The collector itself in a hook would be kept, and with it all gradients, for as long as the model lives.
        reference = weakref.ref(collector)
        self._parameters = parameters
        self._hooks = {name: _Giving(reference, name) for name in parameters}
        self._had_hooks = [name for name, each in parameters.items() if each._post_accumulate_grad_hooks]
        """Those whose list of hooks is torch's. Handles of its hooks know it, so it stays."""
        self._handles = {name: self._put_on(name) for name in parameters}

    def stay_last(self) -> None:
        """Let hooks that a model has put on its parameters since, in its first forward, see the gradient first."""
        # Such a hook may sum the gradient over ranks, say. Ours drops `p.grad`, and a hook behind it would find None.
        for name in self._had_hooks:
            handle = self._handles[name]
            if next(reversed(self._parameters[name]._post_accumulate_grad_hooks)) != handle.id:
                handle.remove()
                self._handles[name] = self._put_on(name)

    def _put_on(self, name: str) -> RemovableHandle:
        parameter = self._parameters[name]
        if not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = _BeforeOurs()
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._hooks[name])
        return handle


class _BeforeOurs(OrderedDict[int, Any]):
    """The hooks of a parameter: those that users put there later come before ours, which takes the gradient away."""

    def __setitem__(self, key: int, hook: Any) -> None:
        ours = [(each, self.pop(each)) for each in list(self) if isinstance(self[each], _Giving)]
        super().__setitem__(key, hook)
        for each, held in ours:
            super().__setitem__(each, held)


class _Giving:
    """The hook of one parameter."""

    def __init__(self, reference: "weakref.ref[Collector]", name: str) -> None:
        self.collector = reference
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        if (collector := self.collector()) is not None:
            collector.collect(self._name, parameter)


def is_of_engine(parameter: torch.Tensor) -> bool:
    """Whether an engine takes the gradients of a parameter."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(each, _Giving) and each.collector() is not None for each in hooks)


class Collector(Protocol):
    """Who takes gradients."""

    def collect(self, name: str, parameter: torch.Tensor) -> None:
        """Take a finished gradient over from autograd; outside of an update it is the user's."""


class GradReduce(Collector, Protocol):
    """The gradients of one rank."""

    collectors: Collectors
    """The hooks through which autograd gives finished gradients."""

    @property
    def touched(self) -> frozenset[str]:
        """Parameters that got a gradient since `begin`."""

    def begin(self, num_microbatches: int, trained: TrainedSet = ALL) -> None:
        """Forget the gradients of the last update and make room for those of `num_microbatches`.

        Buckets without a parameter that is `trained` are left alone.
        """

    def expect_last(self) -> None:
        """The next backward is the last of this update."""

    def expect(self, touched: Collection[str]) -> None:
        """Learn from an update. `touched`: what any rank had a gradient for, the same on all ranks."""

    def view(self, name: str) -> torch.Tensor:
        """The sum so far for a parameter of several stages, in its own shape."""

    def place(self, name: str, gradient: torch.Tensor) -> None:
        """Take a sum made elsewhere for that of a parameter of several stages: after the last backward."""

    def reduce(self) -> None:
        """Sum the gradients over all data ranks and leave the owned parts in what `views_of` gives."""

    def views_of(self, owned: Sequence[Owned]) -> Mapping[str, torch.Tensor]:
        """The reduced gradients of all that is owned, by name, in the shapes of the masters; valid after `reduce`."""

    def runs_of(self, runs: Sequence[Run[Mark]]) -> Sequence[tuple[torch.Tensor, Mark]]:
        """The same in as few flat tensors as can be, and whether each counts; asked for after `views_of`."""

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """The owned parts of all buckets with something trained, flat, valid after `reduce`."""


class PartsTaker(Protocol):
    """Who takes the reduced part of each bucket, as soon as there is one."""

    def send(self, bucket: Bucket, part: torch.Tensor) -> None:
        """The owned part of a bucket has its last value."""


class OwnedGradients:
    """Views of the reduced gradients. They are made once: buffers serve many updates."""

    def __init__(self) -> None:
        self._parts: Sequence[torch.Tensor] = ()
        """The owned parts of buckets that are viewed."""
        self._views: dict[str, torch.Tensor] = {}
        self._runs: dict[int, tuple[Sequence[Run[Any]], list[tuple[torch.Tensor, Any]]]] = {}
        """By the list of runs that was asked for."""

    def views(
        self, owned: Sequence[Owned], parts: Sequence[torch.Tensor], part_of: Callable[[str], torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The gradients of what is owned, by name. `parts`: the owned parts of all buckets. `part_of`: the one with a
        parameter."""
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            self._views, self._runs = {}, {}
            for each in owned:
                segment = each.segment
                span = slice(segment.start, segment.start + segment.run.num_elements)
                self._views[segment.name] = part_of(segment.name)[span].view(each.parameter.shape)
            self._parts = list(parts)
        return self._views

    def runs(self, runs: Sequence[Run[Mark]]) -> Sequence[tuple[torch.Tensor, Mark]]:
        """The same gradients as flat runs."""
        known = self._runs.get(id(runs))
        if known is None or known[0] is not runs:
            made = [(self._views[name].as_strided((size,), (1,)), counts) for name, size, counts in runs]
            known = self._runs[id(runs)] = runs, made
        return known[1]

    def forget(self) -> None:
        """The buffers are given back: views would keep them."""
        self._parts, self._views, self._runs = (), {}, {}


def twice_in_one_backward(name: str) -> str:
    """What to say of a gradient that comes after the reduction of its bucket has begun."""
    return (
        f"parameter {name!r} got a gradient twice in one backward, after its bucket was reduced; use "
        "non-reentrant activation checkpointing (use_reentrant=False)"
    )


class GradPerUpdate:
    """All gradients of one rank, in one arena; laid out anew when the number of microbatches asks for it."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        ownership: Ownership,
        precision: Precision,
        *,
        owners: Channel,
        replicas: Channel,
        counters: Counters,
        late: Collection[str] = (),
        taker: PartsTaker | None = None,
    ) -> None:
        """`late`: parameters whose gradient is not complete when the backward that finished them was the last."""
        self._taker = taker
        self._buckets = [bucket for bucket in ownership.buckets if bucket.trainable]
        self._ownership = ownership
        self._precision = precision
        self._owners = owners
        # The arena is read by peers: it is allocated by the channel that moves it (at stage 0 owners are one rank).
        self._memory = owners if owners.size > 1 else replicas
        self._replicas = replicas
        self._counters = counters
        self._late = frozenset(late)
        self._arena = torch.empty(0, dtype=torch.uint8, device=owners.device)
        self._layout: Arena | None = None
        self._shapes = {name: values_of(parameter).shape for name, parameter in parameters.items()}
        self._buffers: list[torch.Tensor] = []
        self._wire: list[torch.dtype] = []
        self.reduced: list[torch.Tensor] = []
        """The owned part of each trainable bucket, valid after `reduce`."""
        self._places: dict[str, tuple[int, torch.Tensor]] = {}
        """Parameter -> the number of its bucket, and its view of the arena."""
        self._touched: set[str] = set()
        self._pending: list[set[str]] = []
        self._is_collecting = False
        self._works: list[Work | None] = []
        self._num_complete = 0
        self._starts_early = False
        self._bucket_of = {slot.name: index for index, bucket in enumerate(self._buckets) for slot in bucket.slots}
        self._parameters = [parameters[name] for name in self._bucket_of]
        self._copies = GradCopies()
        self._owned = OwnedGradients()
        self._trained = ALL
        self._left_out: frozenset[int] = frozenset()
        """Buckets with nothing that is trained in this update."""
        self.collectors = Collectors({name: parameters[name] for name in self._bucket_of}, self)

    def views_of(self, owned: Sequence[Owned]) -> Mapping[str, torch.Tensor]:
        """See `GradReduce`."""
        return self._owned.views(owned, self.reduced, self.part_of)

    def runs_of(self, runs: Sequence[Run[Mark]]) -> Sequence[tuple[torch.Tensor, Mark]]:
        """See `GradReduce`."""
        found = self._owned.runs(runs)
        if not self._left_out:
            return found
        return [each for each, run in zip(found, runs, strict=True) if not self.leaves_out(run[0])]

    def leaves_out(self, name: str) -> bool:
        """Whether the bucket of a parameter has nothing that is trained in this update."""
        return self._bucket_of[name] in self._left_out

    def part_of(self, name: str) -> torch.Tensor:
        """The owned part of the bucket of a parameter, valid after `reduce`."""
        return self.reduced[self._bucket_of[name]]

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """See `GradReduce`."""
        return [each for at, each in enumerate(self.reduced) if at not in self._left_out]

    @property
    def touched(self) -> frozenset[str]:
        """Parameters that got a gradient since `begin`."""
        return frozenset(self._touched)

    def view(self, name: str) -> torch.Tensor:
        """The sum so far for a parameter that is `touched`, in its own shape."""
        self._copies.flush()
        return self._places[name][1]

    def place(self, name: str, gradient: torch.Tensor) -> None:
        """Take a sum made elsewhere for that of a parameter: before `reduce`, after the last backward."""
        view = self.view(name)
        # The sum may have been made in the view itself (`StageTies.collect`).
        if gradient is not view:
            view.copy_(gradient)
        self._touched.add(name)

    def begin(self, num_microbatches: int, trained: TrainedSet = ALL) -> None:
        """See `GradReduce`."""
        if trained is not self._trained:
            self._trained = trained
            self._left_out = frozenset(
                at for at, bucket in enumerate(self._buckets) if not trained.meets(slot.name for slot in bucket.slots)
            )
        layout = plan_arena(self._ownership, self._owners.rank, self._precision, num_microbatches=num_microbatches)
        self._copies.forget()
        # One microbatch needs no float32 sums, so that the arena of k = 1 is smaller: the size follows the step.
        if layout != self._layout:
            self._lay_out(layout, num_microbatches)
        self._touched.clear()
        self._is_collecting = True
        for parameter in self._parameters:
            parameter.grad = None  # of a backward of the user's own, which this update does not count
        self._starts_early = False
        self._works = []
        self._num_complete = 0

    def expect_last(self) -> None:
        """The next backward is the last of this update: buckets it completes may be reduced at once."""
        # Alone there is nothing to wait for, and a taker wants parts as soon as they are there.
        is_alone = self._owners.size * self._replicas.size == 1
        self._starts_early = self._owners.progresses_alone or (is_alone and self._taker is not None)
        self._pending = [{slot.name for slot in bucket.slots} for bucket in self._buckets]
        if self._trained.names is not None:
            self._pending = [names & self._trained.names for names in self._pending]

    def expect(self, touched: Collection[str]) -> None:
        """`touched`: what any rank had a gradient for. Buckets are reduced at the end, and wait for nothing."""

    def reduce(self) -> None:
        """Sum the gradients over all data ranks and leave the owned parts in `reduced`."""
        self.stop()
        # All are started before the first is waited for, so that the wire never rests. Where a transfer progresses only
        # while somebody waits for it, that gains nothing, and the results of one would overwrite the input of another.
        if self._owners.progresses_alone:
            while len(self._works) < len(self._buckets):
                self._launch()
        for index in range(len(self._buckets)):
            if index == len(self._works):
                self._launch()
            self._complete(index)

    def stop(self) -> None:
        """From now on gradients are the user's again."""
        self._is_collecting = False

    def collect(self, name: str, parameter: torch.Tensor) -> None:
        """Take a finished gradient over from autograd; outside of an update it is the user's."""
        if not self._is_collecting or (gradient := take_gradient(parameter)) is None:
            return
        index, view = self._places[name]
        # A reentrant checkpoint runs a backward of its own inside, and completes a shared parameter twice. The first
        # part has left already; to add the second one to the buffer would change what a transfer reads.
        if index < len(self._works):
            raise ModelError(twice_in_one_backward(name))
        # Copied, not added to zeros: that would cost a pass over the arena per update, and -0.0 its sign.
        self._copies.put(view, gradient, adds=name in self._touched)
        self._touched.add(name)
        # A `late` parameter gets parts of its gradient from other stages after this backward: it stays pending here,
        # and its bucket waits for `reduce`.
        if self._starts_early and name not in self._late:
            pending = self._pending[index]
            pending.discard(name)
            if not pending:
                self._launch_complete()

    def _launch_complete(self) -> None:
        """Start the reductions whose turn it is."""
        while len(self._works) < len(self._buckets) and not self._pending[len(self._works)]:
            self._counters.early_reductions += len(self._works) not in self._left_out
            self._launch()

    def _lay_out(self, layout: Arena, num_microbatches: int) -> None:
        self._layout = layout
        self._places, self._buffers, self.reduced = {}, [], []
        self._owned.forget()
        # Freed before the new one is taken. Both together would make the peak of a run at its first change of k.
        self._arena = torch.empty(0, dtype=torch.uint8, device=self._owners.device)
        self._arena = self._memory.allocate(layout.num_bytes)
        for index, (bucket, region) in enumerate(zip(self._buckets, layout.regions, strict=True)):
            dtype = torch_dtype(region.gradient_dtype)
            # `reduced` may lie in the memory of other buckets: the arena is packed while it is reduced (see the figure
            # of `plan.memory.Arena`), so buckets are reduced in their order, whatever backward completes first.
            buffer = self._typed(region.gradient_start_bytes, bucket.num_elements, dtype)
            self._buffers.append(buffer)
            for slot in bucket.slots:
                view = buffer[slot.run.start : slot.run.stop].view(self._shapes[slot.name])
                self._places[slot.name] = index, view
            own = bucket.counts[self._owners.rank]
            self.reduced.append(self._typed(region.reduced_start_bytes, own, torch_dtype(bucket.master)))
        self._wire = [
            torch_dtype(wire_dtype(bucket, self._precision, num_microbatches=num_microbatches))
            for bucket in self._buckets
        ]

    def _typed(self, start_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._arena[start_bytes : start_bytes + num_elements * dtype.itemsize].view(dtype)

    def _launch(self) -> None:
        """Start the reduction of the next bucket; buckets go in one order on all ranks, whatever backward did first."""
        self._copies.flush()
        index = len(self._works)
        if index in self._left_out:
            self._works.append(None)
            return
        bucket = self._buckets[index]
        buffer = self._buffers[index]
        # What is held until a wait is that of one or two buckets, and not of all: of one where a narrower copy travels
        # than is summed, of two where a channel between devices holds what it has received.
        if index and any(self._wire[at] != self._buffers[at].dtype for at in (index - 1, index)):
            self._complete(index - 1)
        elif index > 1 and sums_of(self._owners) is not None:
            self._complete(index - 2)
        # What this rank has no gradient for is zeros, because other ranks may have one: all reduce all buckets.
        for slot in bucket.slots:
            if slot.name not in self._touched:
                buffer[slot.run.start : slot.run.stop].zero_()
        if self._owners.size == 1:
            self._works.append(None)
            if self._taker is not None and self._replicas.size == 1:
                self._complete(index)
            return
        self._counters.reduce_scatters += 1
        self._works.append(
            self._owners.reduce_scatter(
                self.reduced[index],
                buffer.to(self._wire[index]),
                counts=bucket.counts,
                purpose=f"gradients of bucket {index}",
            )
        )

    def _complete(self, index: int) -> None:
        """Wait for the buckets up to this one, in order, and finish what their owners do."""
        # In order because `_finish` holds collectives over replicas, which all ranks call in one order.
        for at in range(self._num_complete, index + 1):
            if (work := self._works[at]) is not None:
                work.wait()
                self._works[at] = None
            self._num_complete = at + 1
            self._finish(at)
            if self._taker is not None:
                self._taker.send(self._buckets[at], self.reduced[at])

    def _finish(self, index: int) -> None:
        """Where owners hold a part again (replicas), add up their sums; where it stayed here, change its dtype."""
        if index in self._left_out:
            return
        reduced, buffer = self.reduced[index], self._buffers[index]
        if self._replicas.size == 1:
            if self._owners.size == 1 and reduced.dtype != buffer.dtype:
                reduced.copy_(buffer)
            return
        source = buffer.to(self._wire[index]) if self._owners.size == 1 else reduced
        purpose = f"gradients of bucket {index} over replicas"
        sum_over_replicas(reduced, source, self._replicas, purpose=purpose, counters=self._counters)


def sum_over_replicas(
    reduced: torch.Tensor, source: torch.Tensor, replicas: Channel, *, purpose: str, counters: Counters
) -> None:
    """Leave in `reduced`, on every replica, the sum of what all of them have in `source`."""
    if replicas.size == 1:
        return
    # Two halves of an all-reduce: each element is summed on one rank, so that all replicas get the same bits. Parts are
    # padded to a multiple of the replicas (`plan.buckets`).
    share = reduced.numel() // replicas.size
    mine = reduced[replicas.rank * share : (replicas.rank + 1) * share]
    counters.reduce_scatters += 1
    replicas.reduce_scatter(mine, source, purpose=purpose).wait()
    counters.all_gathers += 1
    replicas.all_gather(reduced, mine, purpose=purpose).wait()
