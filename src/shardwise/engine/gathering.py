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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel, Work
from shardwise.engine.counters import Counters
from shardwise.engine.gradient_runs import GradientRuns
from shardwise.engine.resting import RestingBuffers, resting_class
from shardwise.errors import MismatchError, ModelError
from shardwise.plan.gathers import Use
from shardwise.plan.units import Unit

FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"
_END = b"end"


@dataclass(kw_only=True, slots=True, eq=False)
class GatheredUnit:
    """A unit on this rank."""

    number: int
    plan: Unit
    buckets: tuple[int, ...]
    reductions: tuple[int, ...]
    """The numbers of its buckets among those that are reduced."""
    parameters: tuple[tuple[nn.Parameter, type, type], ...]
    """Each with its class while it is gathered, and while it is not."""
    storages: frozenset[int]
    stage: int
    num_uses: int = 0
    """Forwards and backwards that need it now."""
    is_resident: bool = False
    works: list[Work] = field(default_factory=list)


class UnitCall:
    """One call of a module whose backward needs its units again."""

    __slots__ = ("_gathering", "_has_begun", "_has_ended", "microbatch", "units")

    def __init__(self, gathering: "Gathering", units: Sequence[GatheredUnit], microbatch: int) -> None:
        self.units = units
        self.microbatch = microbatch
        self._gathering = gathering
        self._has_begun = False
        self._has_ended = False

    def begin(self, _: object = None) -> None:
        """The backward of the call begins."""
        if not self._has_begun:
            self._has_begun = True
            self._gathering.begin_backward(self)

    def end(self, _: object = None) -> None:
        """Everything in the call has its gradient, if it gets one."""
        if self._has_begun and not self._has_ended:
            self._has_ended = True
            self._gathering.end_backward(self)

    def close(self) -> list[GatheredUnit]:
        """The backward around it has ended; what it did not let go itself."""
        held = [] if self._has_ended or not self._has_begun else list(self.units)
        self._has_begun = self._has_ended = True
        return held


@dataclass(frozen=True, slots=True)
class _Saved:
    """What autograd saved of a parameter in a call: a view of memory that is filled when the backward has begun."""

    tensor: torch.Tensor
    call: UnitCall


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _Saved):
        saved.call.begin()
        return saved.tensor
    assert isinstance(saved, torch.Tensor)
    return saved


class Gathering:
    """The units of one rank. See `Sharded` for what goes on around microbatches."""

    def __init__(
        self,
        buffers: RestingBuffers,
        gradients: GradientRuns,
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
        self._eager_pack: Callable[[torch.Tensor], object] | None = None
        self._is_in_pass = False
        self._trains = False
        self._next: dict[tuple[str, int], GatheredUnit] = {}
        """(phase, unit) -> the unit that was used after it."""
        self._last_use: tuple[str, int] | None = None
        self._outstanding: dict[int, dict[int, int]] = {}
        """Microbatch -> unit -> calls whose backward has not ended."""
        self._open: list[UnitCall] = []
        self.order: list[Use] = []
        """The uses in the forward of the last microbatch that was trained on."""
        self.differentiated: set[int] = set()
        """The units that had a backward in this step, or in the last one."""
        self._uses: dict[int, list[Use]] = {}
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
            members.append((parameters[name], kind, resting_class(kind)))
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
        self._is_in_pass = True
        self._trains = trains
        if trains:
            self.differentiated.clear()
        self._gradients.begin_pass(trains=trains)

    def end_pass(self, *, has_failed: bool = False) -> None:
        """See `Sharded`."""
        self._is_in_pass = False
        self._gradients.end_pass()
        if has_failed:
            for unit in [each for each in self._resident if each.works]:
                unit.works.clear()
                unit.is_resident = False
                self._resident.remove(unit)  # and keeps its memory, to which a transfer may still write
        self.release()

    def release(self) -> None:
        """Let go of everything, whatever state it is in."""
        for unit in self.units:
            if unit.num_uses:
                unit.num_uses = 0
                _close(unit)
        for unit in list(self._resident):
            self._free(unit)
        self._open.clear()
        self._outstanding.clear()
        self._uses.clear()
        self._announces = False
        self._last_use = None

    def microbatch_done(self, stage: int | None = None) -> None:
        """See `Sharded`."""
        for call in self._open:
            for unit in call.close():
                self.drop(unit, BACKWARD)
        self._open.clear()
        calls = self._outstanding.get(self.microbatch(), {})
        for unit in self.units:
            if stage is None or unit.stage == stage:
                calls.pop(unit.number, None)
        if self._trains:
            self.order = self._uses.pop(self.microbatch(), self.order)
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

    # Calls ------------------------------------------------------------------------------------------------------------

    def call(self, units: Sequence[GatheredUnit]) -> UnitCall:
        """A call that has begun, and whose backward may follow."""
        return UnitCall(self, units, self.microbatch())

    def expect_backward(self, call: UnitCall) -> None:
        """The backward of a call will begin if what it gave is used."""
        calls = self._outstanding.setdefault(call.microbatch, {})
        for unit in call.units:
            calls[unit.number] = calls.get(unit.number, 0) + 1

    def begin_backward(self, call: UnitCall) -> None:
        """See `UnitCall`."""
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

    def _reduce(self, unit: GatheredUnit) -> None:
        self._announce("reduce", BACKWARD, unit)
        self._gradients.finish(unit.reductions)

    def check_in_pass(self, units: Sequence[GatheredUnit]) -> None:
        """Raise ModelError for a call of the model that no step, evaluation or prediction makes: the other ranks may be
        writing their parts, and would not gather with this one."""
        if not self._is_in_pass:
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
                with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                    yield
            else:
                yield
        finally:
            self._calls.pop()

    def _pack(self, tensor: torch.Tensor) -> object:
        storage = tensor.untyped_storage()._cdata
        for call in reversed(self._calls):
            if any(storage in unit.storages for unit in call.units):
                return _Saved(tensor, call)
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
    def using(self, units: Sequence[GatheredUnit], phase: str) -> Iterator[None]:
        """The units are gathered inside."""
        uses = self._uses.setdefault(self.microbatch(), []) if self._trains and phase == FORWARD else []
        for unit in units:
            uses.append(Use(unit.number, begins=True))
            self.use(unit, phase)
        try:
            yield
        finally:
            for unit in units:
                uses.append(Use(unit.number, begins=False))
                self.drop(unit, phase)

    def use(self, unit: GatheredUnit, phase: str) -> None:
        """Somebody needs the unit from now on."""
        unit.num_uses += 1
        self._announce("use", phase, unit)
        if unit.num_uses > 1:
            return
        if not unit.is_resident:
            self._make_room(unit)
            self._fill(unit)
        if unit.works:
            self._wait(unit)
        for parameter, kind, _ in unit.parameters:
            parameter.__class__ = kind
        if self._owners.progresses_alone:
            self._look_ahead(unit, phase)

    def drop(self, unit: GatheredUnit, phase: str) -> None:
        """Somebody needs it no more. It stays until there is need for room."""
        unit.num_uses -= 1
        self._announce("drop", phase, unit)
        if not unit.num_uses:
            _close(unit)

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


def _close(unit: GatheredUnit) -> None:
    for parameter, _, resting in unit.parameters:
        parameter.__class__ = resting
