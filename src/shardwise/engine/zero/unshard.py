"""Gathers units and lets them go, around the forwards and backwards of their modules, as `Residency` says (stage 3).

One microbatch over three units; a unit after its use stays until the next one is gathered:

    forward    gather 0   run 0 | free 0  gather 1   run 1 | free 1  gather 2   run 2 |
    backward   (2 is here)              run 2, reduce 2 | free 2  gather 1   run 1, reduce 1 | free 1  gather 0   run 0
    forward of the next microbatch      (0 is here)   run 0 | ...

Unit 1 on one of 2 owners: 1000 elements in float32, 4000 bytes. Its part (2000) and run of the gradient (2000) are
here all the time. In memory besides, in bytes:

    what happens                              calls                      whole copy   gradient   `num_uses`
    forward of 1 begins                       use: gather, wait, open          4000          0            1
    forward of 1 ends                         drop: close                      4000          0            0
    forward of 2 begins                       use: free                           0          0            0
    gradient of an output of 1 is complete    begin_backward, use              4000          0            1
    gradients of its parameters come          GradReduce.collect               4000       4000            1
    gradient of an input of 1 is complete     end_backward: drop, reduce       4000       4000            0
    backward of 0 begins                      use: free                           0       4000            0
    reduction of 0 begins                     GradReduce._land                    0          0            0

The next unit, as the last pass had it, is gathered while this one runs, where transfers progress without help. In a
backward the gather goes ahead of the gradients of the unit whose room it takes:

    link       | gather 1   | reduce 3 | gather 0 | reduce 2 | ..      a backward waits for a gather, and for no
    device     | backward 3 | backward 2     | backward 1 | ..         reduction

A forward or a loss may take gradients itself (`torch.autograd.grad`, `torch.func`). No hook sees what their graph
saves. From then on what is gathered stays to the end of the pass (`hold`), also in the next step. The gradients of the
units that were differentiated are reduced at the end of the microbatch.

All data ranks gather and reduce in one order, that of their modules. Channels refuse another one, at the latest with
the next exchange, and so before an update. Where peers' memory is read in place, no rank waits: the parts do not change
between the exchanges that open and close a step or an evaluation.
"""

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.agreement import json_as, understood
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.passes import Backward, Joint, Passes, unpack
from shardwise.engine.forward.sharded_parameters import Copy, sharded_class
from shardwise.engine.torch_private import (
    COMPILER,
    at_end_of_backward,
    graph_task,
    pop_saved_hooks,
    push_saved_hooks,
    skip_code,
    storage_id,
    top_saved_hooks,
)
from shardwise.engine.zero.bucket_memory import ShardedBucket
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.reduce import GradReduce
from shardwise.errors import CallMismatchError, ModelError
from shardwise.plan.residency import BACKWARD, FORWARD, RECOMPUTATION, Order, Residency, count_gathers
from shardwise.plan.units import Unit

_DONE = "done"
_ANNOUNCED = (_DONE, "hold", "reduce", "use", "drop")
_Announcement: TypeAlias = tuple[str, str, int]
"""What all ranks do now, in which phase, and the number of the unit, or of the stage that ends; -1: all of them."""
_NO_TASK = -2
"""No task of autograd has this number."""


@dataclass(kw_only=True, slots=True, eq=False)
class GatheredUnit:
    """A unit on this rank."""

    number: int
    plan: Unit
    buckets: tuple[ShardedBucket, ...]
    reductions: tuple[int, ...]
    """The numbers of its buckets among those that are reduced."""
    parameters: tuple[tuple[nn.Parameter, type, type], ...]
    """Each with its class while it is gathered, and while it is not."""
    storages: frozenset[int]
    stage: int
    num_forwards: int = field(init=False, default=0)
    """Forwards that need it now: only in these its parameters can be read as those of any module."""
    waits: list[Callable[[], object]] = field(init=False, default_factory=list)
    """For the transfers that were begun for it and not waited for."""

    def name_at(self, view: torch.Tensor) -> str:
        """The parameter behind `view`, while the unit is gathered."""
        # By its place in memory: a view of a detached tensor knows no base.
        place = storage_id(view.untyped_storage()), view.storage_offset()
        for name, (parameter, _, _) in zip(self.plan.parameters, self.parameters, strict=True):
            start = parameter.storage_offset()
            if storage_id(parameter.untyped_storage()) == place[0] and start <= place[1] < start + parameter.numel():
                return name
        return self.plan.name

    def gather(self, counters: Counters) -> None:
        """Take memory and begin the transfers."""
        for bucket in self.buckets:
            if (wait := bucket.fill(counters, unit=self.plan.name)) is not None:
                self.waits.append(wait)

    def wait(self) -> None:
        """End the transfers: the values are here."""
        for wait in self.waits:
            wait()
        self.waits.clear()

    def free(self) -> None:
        """Give the memory back."""
        self.wait()  # a transfer that nobody waited for would write to memory that others have by then
        for bucket in self.buckets:
            bucket.free()

    def open(self) -> None:
        """Forwards that read its parameters follow.

        The class of the parameters changes: they are plain ones while they are gathered.
        """
        # One class that looks up whether it is gathered would do without the swap. It would cost 11 us in every
        # operation that takes a parameter (measured with F.linear); the swap costs 0.2 us per parameter and call of a
        # module. And torch's modules leave their fused kernels where an argument has a torch function of its own.
        for parameter, kind, _ in self.parameters:
            parameter.__class__ = kind

    def close(self) -> None:
        """No forward reads them any more."""
        for parameter, _, sharded in self.parameters:
            parameter.__class__ = sharded


class UnitCall:
    """One call of a module whose backward needs its units again.

    A unit may be called several times before the first backward, and each call has its own backward:

        forward    call 1 of U   call 2 of U                              uses 1, 0, 1, 0
        backward                               call 2 of U   call 1 of U  uses 1, 0, 1, 0; reduced after call 1

        TO_COME --begin--> RUNNING --end--> DONE --resume, for a saved tensor--> RUNNING

    A backward that a forward or a loss runs itself is another task of autograd. It changes no state: the units are
    gathered, and stay.
    """

    __slots__ = (
        *("_unshard", "backward", "entered", "has_hooks", "left", "microbatch", "spans_around"),
        *("recomputes", "starts_graph", "units"),
    )

    def __init__(self, unshard: "Unshard", units: Sequence[GatheredUnit], microbatch: int, entered: int) -> None:
        self.units = units
        self.microbatch = microbatch
        self.entered = entered
        """When its forward began, and ended, in the count of all calls."""
        self.left = entered
        self.recomputes = graph_task() != -1
        """Whether its forward runs in a backward, whose next one inside is the one that counts (reentrant)."""
        self.has_hooks = False
        """Whether the hooks of saved tensors were installed for it."""
        self.spans_around: tuple[tuple[int, int, UnitCall], ...] = ()
        """During its forward: the memory of the calls around it."""
        self.starts_graph = False
        """Whether the graph of the backward begins with an input of the call."""
        self._unshard = unshard
        self.backward = Backward.TO_COME

    def begin(self, _: object = None) -> None:
        """The backward of the call begins."""
        # Each output of the call and each saved tensor of it comes here; the first one counts.
        if graph_task() != self._unshard.task and not self.recomputes:
            self._unshard.hold(self)
        elif self.backward is Backward.TO_COME:
            self._begin()
            # No gradient of an input marks the end of such a call: that of a leaf is complete as soon as it is known,
            # before those of parameters that the call used earlier.
            if self.starts_graph:
                at_end_of_backward(self.end)

    def resume(self) -> None:
        """The backward of the call needs the units, even if it seemed to have ended."""
        # A value that a module keeps on itself may enter the loss past its outputs, and a call may have several inputs:
        # its end is a guess then. To gather once more costs time; to read memory without bytes would end the process.
        if self.backward is Backward.DONE and (graph_task() == self._unshard.task or self.recomputes):
            self._begin()
            at_end_of_backward(self.end)
        self.begin()

    def _begin(self) -> None:
        self.backward = Backward.RUNNING
        self._unshard.begin_backward(self)

    def end(self, _: object = None) -> None:
        """Everything in the call has its gradient, if it gets one."""
        if self.backward is Backward.RUNNING and (graph_task() == self._unshard.task or self.recomputes):
            self.backward = Backward.DONE
            self._unshard.end_backward(self)

    def close(self) -> list[GatheredUnit]:
        """The backward around it has ended; what it did not let go itself."""
        held = list(self.units) if self.backward is Backward.RUNNING else []
        self.backward = Backward.DONE
        return held


class Unshard(Passes):
    """The units of one rank. See `Passes` for what goes on around microbatches."""

    moves_in_step = True
    gathers = True
    advice = (
        "under stage 3 all data ranks gather and reduce the same units in the same order. If the data choose the "
        "modules that run (experts, skipped layers), name one module around all of them in sharding.units"
    )

    def __init__(
        self,
        params: FlatParams,
        gradients: GradReduce,
        units: Sequence[Unit],
        parameters: Mapping[str, nn.Parameter],
        *,
        counters: Counters,
        stage_of: Mapping[str, int],
        keeps: bool,
        microbatch: Callable[[], int],
    ) -> None:
        """`keeps`: what was gathered once stays until the end of the pass. microbatch: the one of this rank's calls."""
        self._params = params
        self._reads_in_place = any(each.reads_in_place for each in params.sharded)
        self._gradients = gradients
        self._owners = params.owners
        self._counters = counters
        self.task = _NO_TASK
        """That of autograd in which the backward of a microbatch goes on, or went on last."""
        self.residency = Residency(keeps=keeps, ahead=all(each.arrives_alone for each in params.sharded))
        self._microbatch = microbatch
        self._bucket_at = {bucket.plan.slots[0].name: at for at, bucket in enumerate(params.sharded)}
        """The number of a bucket, by its first parameter."""
        self.units = tuple(self._unit(number, plan, parameters, stage_of) for number, plan in enumerate(units))
        self._first_stage = min((unit.stage for unit in self.units), default=sys.maxsize)
        """Of those of this rank that have units."""
        self._spans: tuple[tuple[int, int, UnitCall], ...] = ()
        """Of the calls whose forward runs now, from the inside out: where the memory of their units begins and ends."""
        self._copy: Copy | None = None
        """The last copy of a parameter that a forward got instead of a view."""
        self.is_in_pass = False
        """Whether all data ranks run the model: a step, an evaluation or a prediction goes on."""
        self._trains = False
        self._outstanding: dict[int, dict[int, int]] = {}
        """Microbatch -> unit -> calls whose backward has not ended."""
        self._open: list[UnitCall] = []
        """The calls whose backward goes on."""
        self._num_calls = 0
        self._announced: dict[bytes, _Announcement] = {}
        self._gathered = Counter[int]()
        """How often each unit was gathered in this step, or in the last one."""
        self.is_followed = False

    def _unit(
        self, number: int, plan: Unit, parameters: Mapping[str, nn.Parameter], stage_of: Mapping[str, int]
    ) -> GatheredUnit:
        at = sorted(self._bucket_at[name] for name in plan.parameters if name in self._bucket_at)
        buckets = tuple(self._params.sharded[each] for each in at)
        reductions = {self._gradients.index_of(name): None for name in plan.parameters}
        members = []
        for name in plan.parameters:
            kind = self._params.kind_of(name)
            assert kind is not None
            members.append((parameters[name], kind, sharded_class(kind)))
        return GatheredUnit(
            number=number,
            plan=plan,
            buckets=buckets,
            reductions=tuple(sorted(each for each in reductions if each is not None)),
            parameters=tuple(members),
            storages=frozenset(each.storage for each in buckets),
            stage=stage_of[plan.parameters[0]],
        )

    # Passes and microbatches ----------------------------------------------------------------------------------------

    @override
    def begin_pass(self, *, trains: bool, is_agreed: bool = True) -> None:
        # Steps and evaluations begin with an exchange of weights. A prediction does not: a peer may still cast masters
        # into the part that this rank is about to read. It also shows whether all ranks are about to predict.
        if not is_agreed:
            self._counters.exchanges += 1
            self._owners.exchange(b"", purpose="parameters are written")
        self.release()  # nothing gathered before may stay: its values may be those of before an update
        self.is_in_pass = True
        self._trains = trains
        if trains:
            self._gathered.clear()
            self.residency.begin_training()
        self._gradients.begin_pass(trains=trains)

    @override
    def end_pass(self, *, has_failed: bool = False) -> None:
        self.is_in_pass = False
        self._gradients.end_pass()
        # To wait for a peer that has failed would hide the error behind a timeout.
        if has_failed:
            self._gathered.clear()
            for unit in self.units:
                if unit.waits:
                    unit.waits.clear()
                    self.residency.resident.pop(unit.number, None)  # and keeps its memory, to which one may write
        self.release()

    def release(self) -> None:
        """Let go of everything, whatever state it is in."""
        self._copy = None
        for number in self.residency.release():
            self.units[number].free()
        for unit in self.units:
            if unit.num_forwards:
                unit.num_forwards = 0
                unit.close()
        self._open.clear()
        self._outstanding.clear()
        self.is_followed = False

    def microbatch_done(self, stage: int | None = None) -> None:
        """Reshard and reduce what the microbatch has left open.

        Raises ModelError where a forward wrote to what it got as a copy of a parameter.
        """
        self.watch(None)
        # The backward of a call may end without notice: where no input of it needs a gradient, say.
        for call in self._open:
            for unit in call.close():
                self.drop(unit, BACKWARD)
        self._open.clear()
        if self.is_followed:
            self._exchange(json.dumps([_DONE, "", -1 if stage is None else stage]).encode())
            self.is_followed = not self._is_last(stage)
        self._finish(stage)

    def _is_last(self, stage: int | None) -> bool:
        """Whether the backward of a microbatch on this stage is the last one of this rank."""
        return stage is None or stage <= self._first_stage

    def _finish(self, stage: int | None) -> None:
        # What is outstanding now never comes: outputs that the loss does not use. Of this stage only: the other stages
        # of this rank may have their backwards of the same microbatch still to come.
        calls = self._outstanding.get(self._microbatch(), {})
        for unit in self.units:
            if stage is None or unit.stage == stage:
                calls.pop(unit.number, None)
        self._gradients.microbatch_done(stage)

    @override
    def joint_of(self, num_microbatches: int) -> Sequence[Joint]:
        self._counters.exchanges += 1
        purpose = "number of predictions"
        counts = understood(self._owners.exchange(b"%d" % num_microbatches, purpose=purpose), int, purpose=purpose)
        return [Joint.ALL if at < min(counts) else Joint.SOME for at in range(max(counts))]

    @override
    def begin_microbatch(self, *, is_joint: bool) -> None:
        self.is_followed = not is_joint and self._has_followers

    def skip_microbatch(self) -> None:
        """Gather and reduce what the others do, as they say it."""
        if self._has_followers:
            self._follow()
        else:
            self._finish(None)

    def _follow(self) -> None:
        """Gather and reduce what other ranks announce, until they end, or none announces any more."""
        while said := next(filter(None, self._exchange(b"")), None):
            what, phase, number = said
            if what == _DONE:
                stage = None if number < 0 else number
                self._finish(stage)
                if self._is_last(stage):
                    return
                continue
            unit = self.units[number]
            # The same calls as on the ranks that compute: collectives are matched by their order.
            if what == "hold":
                self.residency.hold()
            elif what == "reduce":
                self._reduce(unit)
            elif what == "use":
                self.use(unit, phase)
            else:
                self.drop(unit, phase)

    @contextmanager
    @override
    def generating(self, *, once: bool) -> Iterator[None]:
        self.begin_pass(trains=False, is_agreed=False)
        try:
            if once:
                for unit in self.units:
                    self.use(unit, RECOMPUTATION)
            # No rank knows who has more forwards. So all announce what they do, and those that have finished follow.
            self.is_followed = not once and self._has_followers
            yield
            if self.is_followed:
                self.is_followed = False
                self._follow()
            self.watch(None)
        except BaseException:
            self.end_pass(has_failed=True)
            raise
        self.end_pass()

    @property
    def _has_followers(self) -> bool:
        """Whether ranks that skip a microbatch have something to do in it."""
        return self._trains or not self._reads_in_place

    def _announce(self, what: str, phase: str, unit: GatheredUnit) -> None:
        """Tell the ranks that skip this microbatch what all of them do now."""
        # One exchange per use, which is slow, and rare: only microbatches that some ranks skip have it.
        if self.is_followed and (what == "reduce" or not self._reads_in_place):
            self._exchange(json.dumps([what, phase, unit.number]).encode())

    def _exchange(self, value: bytes) -> list[_Announcement | None]:
        """What each rank announces; None for a rank that follows.

        Raises CallMismatchError, the same on all ranks, where two announce unlike things.
        """
        self._counters.exchanges += 1
        purpose = "the next step of a microbatch that not all ranks compute"
        said = understood(self._owners.exchange(value, purpose=purpose), self._announced_in, purpose=purpose)
        if len(set(filter(None, said))) > 1:
            lines = [f"  - rank {rank}: {self._in_words(each)}" for rank, each in enumerate(said) if each]
            raise CallMismatchError("data ranks go through a microbatch in different ways:\n" + "\n".join(lines))
        return said

    def _announced_in(self, answer: bytes) -> _Announcement | None:
        if not answer:
            return None
        # Each forward announces the same units again, in the same bytes: they are read once.
        if (known := self._announced.get(answer)) is None:
            what, phase, number = known = json_as(tuple[str, str, int])(answer)
            if what not in _ANNOUNCED or number < -1 or (what != _DONE and not 0 <= number < len(self.units)):
                raise ValueError(f"{what} of {number} in {phase}")
            self._announced[answer] = known
        return known

    def _in_words(self, said: _Announcement) -> str:
        what, phase, number = said
        return "the microbatch ends" if what == _DONE else f"{what} unit {self.units[number].plan.name!r} in {phase}"

    def gathers_in(self, num_microbatches: int, schedule: Sequence[tuple[str, int]] | None) -> dict[str, int]:
        """How often each unit is gathered in an update: as often as in the last one, if it had as many microbatches.

        Else by the order of the model. schedule: forwards and backwards ("F", "B") by stage of the pipeline; None: one
        after the other.
        """
        found = self._gathered
        if not found or num_microbatches != self._gradients.num_microbatches:
            stages: dict[int, list[int]] = {}
            for unit in sorted(self.units, key=lambda unit: unit.stage):
                stages.setdefault(unit.stage, []).append(unit.number)
            one = [*(("F", at) for at in stages), *(("B", at) for at in reversed(stages))]
            found = count_gathers(
                stages,
                one * num_microbatches if schedule is None else schedule,
                keeps=self.residency.keeps,
                ahead=self.residency.ahead,
            )
        return {unit.plan.name: found[unit.number] for unit in self.units}

    # Calls ------------------------------------------------------------------------------------------------------------

    def call(self, units: Sequence[GatheredUnit]) -> UnitCall:
        """A call that has begun, and whose backward may follow."""
        self._num_calls += 1
        return UnitCall(self, units, self._microbatch(), self._num_calls)

    def expect_backward(self, call: UnitCall) -> None:
        """The backward of a call will begin if what it gave is used."""
        self._count(call.units, call.microbatch)

    def reduce_at_end(self, units: Sequence[GatheredUnit]) -> None:
        """Gradients of the units may come from what is no call: wait for the end of the microbatch's backward."""
        # One call more than will ever end, so that the count stays above 0 until `microbatch_done`.
        self._count(units, self._microbatch())

    def _count(self, units: Sequence[GatheredUnit], microbatch: int) -> None:
        calls = self._outstanding.setdefault(microbatch, {})
        for unit in units:
            calls[unit.number] = calls.get(unit.number, 0) + 1

    def begin_backward(self, call: UnitCall) -> None:
        """Gather the units of a call, and end calls that autograd has passed."""
        # Autograd goes back in time: a call whose forward began after this one had ended has had its backward. A call
        # inside of this one began before its end, and stays open.
        if self._open:
            for later in [each for each in self._open if each.entered > call.left]:
                later.end()
        self._open.append(call)
        for unit in call.units:
            self.use(unit, BACKWARD)

    def end_backward(self, call: UnitCall) -> None:
        """Reduce the gradients of a unit when no other call of it is to come."""
        self._open.remove(call)
        calls = self._outstanding.get(call.microbatch, {})
        for unit in call.units:
            self.drop(unit, BACKWARD)
            # A tied or recurrent unit has several calls in a microbatch; its gradients are sums over all of them. If it
            # were reduced after the first, the rest would come too late (`GradReduce.collect`).
            left = calls[unit.number] = calls.get(unit.number, 1) - 1
            if not left and self._trains:
                self._reduce(unit)

    @override
    def begin_backward_of(self, roots: Sequence[torch.Tensor]) -> None:
        for root in roots:
            root.register_hook(self._note_task)

    def _note_task(self, _: torch.Tensor) -> None:
        self.task = graph_task()

    def hold(self, call: UnitCall) -> None:
        """Something other than the backward of the microbatch needs the units of a call: they stay from here on."""
        # A graph that is differentiated twice saves parameters once more, and where no hook packs them. Nothing shows
        # when it is used last. In the next step too, which gathers each unit once then, as `keep_gathered` does: most
        # programs take such gradients in each step.
        if not self.residency.is_held:
            self._announce("hold", FORWARD, call.units[0])
            self.residency.hold()
        self._count(call.units, call.microbatch)  # reduced with the end of the microbatch
        for unit in call.units:
            if not self.residency.resident.get(unit.number):
                self.use(unit, BACKWARD)
                self.drop(unit, BACKWARD)

    @override
    def hold_calls(self) -> None:
        for _, _, call in self._spans:
            self.hold(call)

    def watch(self, copy: Copy | None) -> None:
        """A forward got a copy of a parameter; whether it wrote to the last one is known now. Raises ModelError."""
        # The last one only: to keep all copies of a forward would keep their memory.
        before, self._copy = self._copy, copy
        if before is not None:
            before.check()

    def _reduce(self, unit: GatheredUnit) -> None:
        if self.is_followed:
            self._announce("reduce", BACKWARD, unit)
        if orders := self.residency.reduce(unit.number):
            self._carry_out(orders)
        self._gradients.finish(unit.reductions)

    def check_in_pass(self, units: Sequence[GatheredUnit]) -> None:
        """Raise ModelError for a call of the model that no step, evaluation or prediction makes. The other ranks may be
        writing their parts, and would not gather with this one.
        """
        if not self.is_in_pass:
            raise ModelError(
                f"the model is called outside of step, evaluate, predict and generate, and unit {units[0].plan.name!r} "
                "of its parameters is cut over ranks (stage 3). Call engine.predict(inputs) or engine.generate(inputs) "
                "on all ranks, or read whole tensors with sw.full(engine)"
            )

    def begin_saving(self, call: UnitCall) -> None:
        """From here to `end_saving`: what autograd saves of parameters begins the backward of the call when it is asked
        for. The units are gathered all the time."""
        # Two functions and no context: every call of a module comes here.
        call.spans_around = self._spans
        self._spans = (*[(*each.span, call) for unit in call.units for each in unit.buckets], *self._spans)
        # Hooks of others (activation checkpoints) stay alone: torch calls the innermost hooks only. Around a unit in a
        # unit ours are installed already, and find the inner call in `_spans`.
        call.has_hooks = top_saved_hooks(True) is None
        if call.has_hooks:
            if COMPILER in sys.modules:
                _keep_hooks_eager()
            push_saved_hooks(self.pack_saved, unpack)

    def end_saving(self, call: UnitCall) -> None:
        """The forward of a call ends, by a return or by an error."""
        if call.has_hooks:
            pop_saved_hooks()
        self._spans, call.spans_around = call.spans_around, ()
        call.left = self._num_calls

    # Autograd saves a weight to compute the gradient of an input. Kept as the tensor itself, it would be read after
    # `free`; kept as a copy, it would hold all units until their backward, which is what stage 3 is there to avoid.
    @override
    def pack_saved(self, tensor: torch.Tensor) -> object:
        # By the place in memory, as autograd saves views of a parameter too (`weight.t()`). The innermost call that has
        # the unit: its backward begins and ends within that of the calls around it.
        place = tensor.data_ptr()
        for start, stop, call in self._spans:
            if start <= place < stop:
                return tensor, call
        return tensor.detach()  # an activation, as most are

    @contextmanager
    def holding(self, parameter: torch.Tensor) -> Iterator[None]:
        """A parameter has its values inside, whatever module reads it. What it takes is not counted."""
        # For the proof of a plan of tensor parallelism. It runs once, and is no part of the traffic of an update.
        units = [each for each in self.units if any(held is parameter for held, _, _ in each.parameters)]
        counted, gathered = self._counters, self._gathered
        self._counters, self._gathered = Counters(), Counter()
        try:
            with self.using(units, RECOMPUTATION):
                yield
        finally:
            self._counters, self._gathered = counted, gathered

    # Units ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, units: Sequence[GatheredUnit], phase: str) -> Iterator[None]:
        """The units are gathered inside."""
        for unit in units:
            self.use(unit, phase)
        try:
            yield
        finally:
            for unit in units:
                self.drop(unit, phase)

    def use(self, unit: GatheredUnit, phase: str) -> None:
        """Somebody needs the unit from now on."""
        # Before the gather, which is a collective: the ranks that follow must be on their way to it.
        if self.is_followed:
            self._announce("use", phase, unit)
        if orders := self.residency.begin(phase, unit.number):
            self._carry_out(orders)
        # Autograd reads what it saved, which views the memory; only forwards read the parameters themselves.
        if phase != BACKWARD:
            unit.num_forwards += 1
            if unit.num_forwards == 1:
                unit.open()

    def drop(self, unit: GatheredUnit, phase: str) -> None:
        """Somebody needs it no more."""
        self.residency.end(unit.number)
        if self.is_followed:
            self._announce("drop", phase, unit)
        if phase != BACKWARD:
            unit.num_forwards -= 1
            if not unit.num_forwards:
                unit.close()

    def _carry_out(self, orders: Sequence[Order]) -> None:
        units = self.units
        for what, number in orders:
            if what == "gather":
                self._gathered[number] += self._trains
                units[number].gather(self._counters)
            elif what == "wait":
                units[number].wait()
            else:
                units[number].free()


@functools.cache
def _keep_hooks_eager() -> None:
    """Keep torch's compiler from the hook of saved tensors: it would compile it with what is compiled."""
    # By its code, once. `torch.compiler.disable` wraps the function, and would cost more in every call than the hook.
    skip_code(Unshard.pack_saved.__code__)
