"""When units are gathered and let go: before and after the forwards and backwards of their modules (stage 3).

One microbatch over three units; a unit that nobody uses stays until the next one is gathered:

    forward    gather 0   run 0 | free 0  gather 1   run 1 | free 1  gather 2   run 2 |
    backward   (2 is here)              run 2, reduce 2 | free 2  gather 1   run 1, reduce 1 | free 1  gather 0   run 0
    forward of the next microbatch      (0 is here)   run 0 | ...

The next unit, as the last pass had it, is gathered while this one runs, where transfers progress by themselves.

All data ranks gather and reduce in one order, that of their modules; channels refuse another one, at the latest with
the next exchange, and so before an update. Where peers' memory is read in place, nobody waits for anybody: the parts do
not change from the exchange that opens a step or an evaluation to the one that closes it.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.counters import Counters
from shardwise.engine.zero.grad_per_microbatch import GradPerMicrobatch
from shardwise.engine.zero.sharded_params import ShardedParams, sharded_class
from shardwise.engine.zero.unit_calls import GatheredUnit, Saved, UnitCall, unpack
from shardwise.engine.zero.view_copies import Copy
from shardwise.errors import MismatchError, ModelError
from shardwise.plan.gathers import Use
from shardwise.plan.units import Unit

FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"
_END = b"end"


class Unshard:
    """The units of one rank. See `Sharded` for what goes on around microbatches."""

    def __init__(
        self,
        buffers: ShardedParams,
        gradients: GradPerMicrobatch,
        units: Sequence[Unit],
        parameters: Mapping[str, nn.Parameter],
        *,
        owners: Channel,
        counters: Counters,
        stage_of: Mapping[str, int],
        keeps: bool,
    ) -> None:
        """`keeps`: what was gathered once stays until the end of the pass."""
        self._buffers = buffers
        self._gradients = gradients
        self._owners = owners
        self._counters = counters
        self._keeps = keeps
        self.microbatch: Callable[[], int] = lambda: 0
        """The microbatch that this rank works on, where a schedule mixes several."""
        self.units = tuple(self._unit(number, plan, parameters, stage_of) for number, plan in enumerate(units))
        self._resident: list[GatheredUnit] = []
        self._calls: list[UnitCall] = []
        """The calls whose forward runs now, from the outside in."""
        self._copy: Copy | None = None
        """The last copy of a parameter that a forward got instead of a view."""
        self._eager_pack: Callable[[torch.Tensor], object] | None = None
        self.is_in_pass = False
        """Whether all data ranks run the model: a step, an evaluation or a prediction goes on."""
        self._trains = False
        self._next: dict[tuple[str, int], GatheredUnit] = {}
        """(phase, unit) -> the unit that was used after it."""
        self._last_use: tuple[str, int] | None = None
        self._outstanding: dict[int, dict[int, int]] = {}
        """Microbatch -> unit -> calls whose backward has not ended."""
        self._open: list[UnitCall] = []
        """The calls whose backward goes on."""
        self._num_calls = 0
        self._order: list[tuple[int, bool, UnitCall | None]] = []
        """Unit, begins and call of the uses in the forward of the last microbatch that was trained on."""
        self.differentiated: set[int] = set()
        """The units that had a backward in this step, or in the last one."""
        self._uses: dict[int, list[tuple[int, bool, UnitCall | None]]] = {}
        """The same of microbatches that are on their way."""
        self._announces = False
        """Whether other ranks follow what this one does, in a microbatch that they do not compute."""

    def _unit(
        self, number: int, plan: Unit, parameters: Mapping[str, nn.Parameter], stage_of: Mapping[str, int]
    ) -> GatheredUnit:
        names = set(plan.parameters)
        buckets = tuple(
            index
            for index, bucket in enumerate(self._buffers.ownership.buckets)
            if not self._buffers.is_held_whole(index) and bucket.slots[0].name in names
        )
        reductions = {self._gradients.index_of(name): None for name in plan.parameters}
        members = []
        for name in plan.parameters:
            kind = self._buffers.kind_of(name)
            assert kind is not None
            members.append((parameters[name], kind, sharded_class(kind)))
        return GatheredUnit(
            number=number,
            plan=plan,
            buckets=buckets,
            reductions=tuple(sorted(each for each in reductions if each is not None)),
            parameters=tuple(members),
            storages=frozenset(map(self._buffers.storage_of, buckets)),
            stage=stage_of[plan.parameters[0]],
        )

    # Passes and microbatches ----------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """See `Sharded`."""
        return True

    def begin_pass(self, *, trains: bool, is_agreed: bool = True) -> None:
        """See `Sharded`."""
        if not is_agreed:  # also whether all ranks are about to do the same
            self._counters.exchanges += 1
            self._owners.exchange(b"", purpose="parameters are written")
        self.release()
        self.is_in_pass = True
        self._trains = trains
        if trains:
            self.differentiated.clear()
        self._gradients.begin_pass(trains=trains)

    def end_pass(self, *, has_failed: bool = False) -> None:
        """See `Sharded`."""
        self.is_in_pass = False
        self._gradients.end_pass()
        if has_failed:
            for unit in [each for each in self._resident if each.works]:
                unit.works.clear()
                unit.is_resident = False
                self._resident.remove(unit)  # and keeps its memory, to which a transfer may still write
        self.release()

    def release(self) -> None:
        """Let go of everything, whatever state it is in."""
        self._copy = None
        for unit in self.units:
            unit.num_uses = 0
            if unit.num_forwards:
                unit.num_forwards = 0
                unit.close()
        for unit in list(self._resident):
            self._free(unit)
        self._open.clear()
        self._outstanding.clear()
        self._uses.clear()
        self._announces = False
        self._last_use = None

    def microbatch_done(self, stage: int | None = None) -> None:
        """See `Sharded`. Raises ModelError where a forward wrote to what it got as a copy of a parameter."""
        self.watch(None)
        for call in self._open:
            for unit in call.close():
                self.drop(unit, BACKWARD)
        self._open.clear()
        calls = self._outstanding.get(self.microbatch(), {})
        for unit in self.units:
            if stage is None or unit.stage == stage:
                calls.pop(unit.number, None)
        if self._trains:
            self._order = self._uses.pop(self.microbatch(), self._order)
        if self._announces:
            self._exchange(_END)
            self._announces = False
        self._gradients.microbatch_done(stage)

    def begin_microbatch(self, *, is_joint: bool) -> None:
        """See `Sharded`."""
        self._announces = not is_joint and self._is_followed

    def skip_microbatch(self) -> None:
        """See `Sharded`: gather and reduce what the others do, as they say it."""
        if self._is_followed:
            while (told := next(filter(None, self._exchange(b"")), _END)) != _END:  # nothing, where all skip it
                what, phase, number = json.loads(told)
                unit = self.units[number]
                if what == "reduce":
                    self._reduce(unit)
                elif what == "use":
                    self.use(unit, phase)
                else:
                    self.drop(unit, phase)
        self.microbatch_done()

    @property
    def _is_followed(self) -> bool:
        """Whether ranks that skip a microbatch have something to do in it."""
        return self._trains or not self._buffers.reads_in_place

    def _announce(self, what: str, phase: str, unit: GatheredUnit) -> None:
        """Tell the ranks that skip this microbatch what all of them do now."""
        if self._announces and (what == "reduce" or not self._buffers.reads_in_place):
            self._exchange(json.dumps([what, phase, unit.number]).encode())

    def _exchange(self, value: bytes) -> list[bytes]:
        """Every rank's answer; those who say something say the same. Raises MismatchError, the same on all ranks."""
        self._counters.exchanges += 1
        answers = self._owners.exchange(value, purpose="what comes next in a microbatch that not all ranks compute")
        if len(set(filter(None, answers))) > 1:
            lines = [f"  - rank {rank}: {self._in_words(told)}" for rank, told in enumerate(answers) if told]
            raise MismatchError("data ranks go through a microbatch in different ways:\n" + "\n".join(lines))
        return answers

    def _in_words(self, told: bytes) -> str:
        if told == _END:
            return "the microbatch ends"
        what, phase, number = json.loads(told)
        return f"{what} unit {self.units[number].plan.name!r} in {phase}"

    @property
    def order(self) -> list[Use]:
        """The uses in the forward of the last microbatch that was trained on."""
        return [Use(unit, begins, call is not None and call.has_begun) for unit, begins, call in self._order]

    # Calls ------------------------------------------------------------------------------------------------------------

    def call(self, units: Sequence[GatheredUnit]) -> UnitCall:
        """A call that has begun, and whose backward may follow."""
        self._num_calls += 1
        return UnitCall(self, units, self.microbatch(), self._num_calls)

    def expect_backward(self, call: UnitCall) -> None:
        """The backward of a call will begin if what it gave is used."""
        self._count(call.units, call.microbatch)

    def reduce_at_end(self, units: Sequence[GatheredUnit]) -> None:
        """Gradients of the units may come from what is no call: wait for the end of the microbatch's backward."""
        self._count(units, self.microbatch())

    def _count(self, units: Sequence[GatheredUnit], microbatch: int) -> None:
        calls = self._outstanding.setdefault(microbatch, {})
        for unit in units:
            calls[unit.number] = calls.get(unit.number, 0) + 1

    def begin_backward(self, call: UnitCall) -> None:
        """See `UnitCall`. Calls whose forward began later have had their backward: autograd goes back in time."""
        for later in [each for each in self._open if each.entered > call.left]:
            later.end()
        self._open.append(call)
        self.differentiated.update(unit.number for unit in call.units)
        for unit in call.units:
            self.use(unit, BACKWARD)

    def end_backward(self, call: UnitCall) -> None:
        """See `UnitCall`: the gradients of a unit are reduced when no other call of it is to come."""
        self._open.remove(call)
        calls = self._outstanding.get(call.microbatch, {})
        for unit in call.units:
            self.drop(unit, BACKWARD)
            left = calls[unit.number] = calls.get(unit.number, 1) - 1
            if not left and self._trains:
                self._reduce(unit)

    def watch(self, copy: Copy | None) -> None:
        """A forward got a copy of a parameter; whether it wrote to the last one is known now. Raises ModelError."""
        before, self._copy = self._copy, copy
        if before is not None:
            before.check()

    def _reduce(self, unit: GatheredUnit) -> None:
        self._announce("reduce", BACKWARD, unit)
        self._gradients.finish(unit.reductions)

    def check_in_pass(self, units: Sequence[GatheredUnit]) -> None:
        """Raise ModelError for a call of the model that no step, evaluation or prediction makes: the other ranks may be
        writing their parts, and would not gather with this one."""
        if not self.is_in_pass:
            raise ModelError(
                f"the model is called outside of step, evaluate and predict, and unit {units[0].plan.name!r} of its "
                "parameters is cut over the ranks (stage 3); call engine.predict(inputs, output_of) on all ranks, or "
                "read whole tensors with sw.full(engine)"
            )

    @contextmanager
    def saving(self, call: UnitCall) -> Iterator[None]:
        """What autograd saves of parameters inside begins the backward of the call when it is asked for."""
        self._calls.append(call)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        try:
            if hooks is None:  # others (checkpoints) save in their way; ours are there already around a nested unit
                pack = self._pack
                if "torch._dynamo" in sys.modules:  # or what is compiled would have the hook compiled too
                    pack = self._eager_pack = self._eager_pack or torch.compiler.disable(pack)
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    yield
            else:
                yield
        finally:
            self._calls.pop()
            call.left = self._num_calls

    def _pack(self, tensor: torch.Tensor) -> object:
        storage = tensor.untyped_storage()._cdata
        for call in reversed(self._calls):
            if any(storage in unit.storages for unit in call.units):
                return Saved(tensor, call)
        return tensor

    @property
    def is_followed(self) -> bool:
        """Whether other data ranks skip this microbatch, and do of it what this one announces."""
        return self._announces

    @contextmanager
    def holding(self, parameter: nn.Parameter) -> Iterator[None]:
        """A parameter has its values inside, whatever module reads it. What it takes is not counted."""
        units = [each for each in self.units if any(held is parameter for held, _, _ in each.parameters)]
        counted, self._counters = self._counters, Counters()
        try:
            with self.using(units, RECOMPUTATION):
                yield
        finally:
            self._counters = counted

    # Units ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, units: Sequence[GatheredUnit], phase: str, call: UnitCall | None = None) -> Iterator[None]:
        """The units are gathered inside. `call`: None where no backward can follow."""
        uses = self._uses.setdefault(self.microbatch(), []) if self._trains and phase == FORWARD else []
        for unit in units:
            uses.append((unit.number, True, call))
            self.use(unit, phase)
        try:
            yield
        finally:
            for unit in units:
                uses.append((unit.number, False, call))
                self.drop(unit, phase)

    def use(self, unit: GatheredUnit, phase: str) -> None:
        """Somebody needs the unit from now on."""
        unit.num_uses += 1
        self._announce("use", phase, unit)
        if unit.num_uses == 1:
            if not unit.is_resident:
                self._make_room(unit)
                self._fill(unit)
            if unit.works:
                self._wait(unit)
        if phase != BACKWARD:  # there autograd has what it saved, and a forward that it runs again is one of its own
            unit.num_forwards += 1
            if unit.num_forwards == 1:
                unit.open()
        if unit.num_uses == 1 and self._owners.progresses_alone:
            self._look_ahead(unit, phase)

    def drop(self, unit: GatheredUnit, phase: str) -> None:
        """Somebody needs it no more. It stays until there is need for room."""
        unit.num_uses -= 1
        self._announce("drop", phase, unit)
        if phase != BACKWARD:
            unit.num_forwards -= 1
            if not unit.num_forwards:
                unit.close()

    def _look_ahead(self, unit: GatheredUnit, phase: str) -> None:
        """Begin to gather what was used next in the last pass."""
        if self._last_use is not None:
            self._next[self._last_use] = unit
        self._last_use = phase, unit.number
        following = self._next.get(self._last_use)
        if following is not None and not following.is_resident:
            self._make_room(following)
            self._fill(following)

    def _make_room(self, for_unit: GatheredUnit) -> None:
        if self._keeps:
            return
        for unit in [each for each in self._resident if not each.num_uses and each is not for_unit]:
            self._free(unit)

    def _fill(self, unit: GatheredUnit) -> None:
        unit.is_resident = True
        self._resident.append(unit)
        for index in unit.buckets:
            if (work := self._buffers.fill(index, self._counters, unit=unit.plan.name)) is not None:
                unit.works.append(work)

    def _wait(self, unit: GatheredUnit) -> None:
        for work in unit.works:
            work.wait()
        unit.works.clear()

    def _free(self, unit: GatheredUnit) -> None:
        self._wait(unit)
        self._resident.remove(unit)
        unit.is_resident = False
        for index in unit.buckets:
            self._buffers.free(index)


def words_on_units(error: BaseException) -> str:
    """What to say of an error of ranks that gathered or reduced other units; empty for other errors."""
    if not isinstance(error, MismatchError) or not any(word in str(error) for word in ("of unit ", " unit '")):
        return ""
    return (
        f"{error}\nunder stage 3 all data ranks gather and reduce the same units in the same order: where the data "
        "choose which modules run (experts, layers that are skipped), name one module around all of them in "
        "sharding.units"
    )
