"""A budget for saved tensors: the first step measures each module, and all ranks of a stage then choose alike.

step 1    every module that may run again does; the first microbatch of each rank is measured
its end   one exchange: of each stage the rank that saves most decides; every rank computes all choices
step 2    the choices hold

Modules save by what is trained: below it, nothing. So the first step that trains something else measures too.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from typing_extensions import override

from shardwise.comm import Channel
from shardwise.comm.accelerators import synchronize
from shardwise.comm.agreement import a_table, of_form, understood
from shardwise.engine.activations.recomputation import Recomputed
from shardwise.engine.activations.saved_meter import SavedMeter
from shardwise.engine.activations.saved_on_host import HostTransfers, Offloaded
from shardwise.engine.forward.aside import attributes_set
from shardwise.engine.forward.layers import OfEngine, Place
from shardwise.engine.forward.passes import unpack
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.forward.trained_parameters import ALL, MOST_TRAINED, TrainedSet
from shardwise.plan.activation_budget import Choice, Chosen, Measured, MeasuredCall, choose
from shardwise.plan.units import ITSELF
from shardwise.space import Mesh

_PURPOSE = "measured activations"
_TRIAL_BYTES = 8 << 20


class BudgetedModule(OfEngine):
    """Runs a module as was chosen for it."""

    place = Place.RECOMPUTATION

    def __init__(
        self,
        name: str,
        budget: "ActivationBudget",
        random: KeyedRandom,
        recomputed: Recomputed | None,
        offloaded: Offloaded | None,
    ) -> None:
        """At least one of `recomputed` and `offloaded`."""
        self.name = name
        self._random = random
        self._budget = budget
        self.recomputed = recomputed
        self.by_choice: dict[Choice, Recomputed | Offloaded | None] = {"keep": None}
        if recomputed is not None:
            self.by_choice["recompute"] = recomputed
        if offloaded is not None:
            self.by_choice["offload"] = offloaded
        self.unmeasured: Choice = "offload" if recomputed is None else "recompute"
        """What holds until something was chosen."""
        self.choice: Choice = self.unmeasured

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen, meter = self.by_choice[self.choice], self._budget.meter
        if meter is not None and chosen is not None and torch.is_grad_enabled() and not self._random.is_suspended:
            return self._measured(meter, chosen, args, kwargs)
        return self.forward(*args, **kwargs) if chosen is None else chosen.run(self.forward, args, kwargs)

    def _measured(
        self, meter: SavedMeter, chosen: Recomputed | Offloaded, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        record = meter.begin(self.name, type(self.module).__name__, tuple(self.by_choice), (args, kwargs))
        if record is None:
            return chosen.run(self.forward, args, kwargs)

        def measured(*args: Any, **kwargs: Any) -> Any:
            return meter.run(record, self.forward, args, kwargs)

        try:
            with attributes_set(meter, {"is_inside": True}):
                return chosen.run(measured, args, kwargs)
        finally:
            if self.recomputed is not None:
                record.kept_bytes = self.recomputed.kept_bytes


class ActivationBudget:
    """The choices of one rank, and those of the other stages for the report."""

    def __init__(
        self, num_bytes: int, mesh: Mesh, world: Channel, transfers: HostTransfers | None, in_flight: Callable[[], int]
    ) -> None:
        """`in_flight`: the most microbatches whose activations the rank has held at a time; 0: it computed none."""
        self.num_bytes = num_bytes
        self.modules: dict[str, BudgetedModule] = {}
        self.meter: SavedMeter | None = None
        """While the first step is measured."""
        self.chosen: Sequence[Chosen] = ()
        """Of each stage, for steps like the last one; empty before one was measured."""
        self._trained = ALL
        """What the last step trained."""
        self._chosen_for: dict[TrainedSet, Sequence[Chosen]] = {}
        self._mesh = mesh
        self._world = world
        self._transfers = transfers
        self._in_flight = in_flight
        self._found: tuple[list[MeasuredCall], int] | None = None
        """What this rank measured in this step."""

    def turn_to(self, trained: TrainedSet) -> None:
        """A step follows that trains this."""
        if trained is not self._trained:
            self._trained = trained
            self._take(self._chosen_for.get(trained, ()))

    def _take(self, chosen: Sequence[Chosen]) -> None:
        self.chosen = chosen
        choices = dict(chosen[self._mesh.coordinates(self._world.rank)["pp"]].choices) if chosen else {}
        for name, module in self.modules.items():
            module.choice = choices.get(name, module.unmeasured)

    @contextmanager
    def measuring(self, meter: SavedMeter) -> Iterator[None]:
        """Inside, the forwards of a step are measured."""
        self.meter = meter
        hooks = torch.autograd.graph.saved_tensors_hooks(meter.pack, unpack)
        try:
            with hooks:
                yield
        finally:
            self.meter = None
        self._found = meter.calls()

    def settle(self) -> None:
        """Choose by what was measured; all ranks call it together. Raises PlanError, the same on all ranks."""
        if self._found is None:
            return
        (calls, after_bytes), self._found = self._found, None
        own = {
            "calls": [dataclasses.asdict(each) for each in calls],
            "after_bytes": after_bytes,
            "in_flight": self._in_flight(),
            "bytes_per_second": None if self._transfers is None else _speed_of_copies(self._transfers.device),
        }
        answers = self._world.exchange(json.dumps(own).encode(), purpose=_PURPOSE)
        stages: dict[int, list[Measured]] = {}
        for rank, measured in enumerate(understood(answers, _measured_in, purpose=_PURPOSE)):
            stages.setdefault(self._mesh.coordinates(rank)["pp"], []).append(measured)
        if not all(any(each.in_flight for each in stage) for stage in stages.values()):
            return  # no rank of a stage had rows: the next step measures
        largest = [max(stages[stage], key=_bytes_of) for stage in sorted(stages)]
        if len(self._chosen_for) > MOST_TRAINED:
            self._chosen_for.clear()
        self._take([choose(each, self.num_bytes, stage=stage) for stage, each in enumerate(largest)])
        self._chosen_for[self._trained] = self.chosen

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"activations: at most {self.num_bytes} bytes of saved tensors on each rank"]
        if not self.chosen:
            return [*lines, "the first step measures the modules"]
        for stage, chosen in enumerate(self.chosen):
            lines.append(
                f"stage {stage}: {chosen.peak_bytes} bytes at the peak, {chosen.seconds:.3g} s more per microbatch"
            )
            named = {
                choice: [name or ITSELF for name, each in chosen.choices if each == choice]
                for choice in get_args(Choice)
            }
            lines += [f"  {choice}: {', '.join(names)}" for choice, names in named.items() if names]
        return lines


def _bytes_of(measured: Measured) -> int:
    return sum(each.before_bytes + each.saved_bytes for each in measured.calls) + measured.after_bytes


def _measured_in(answer: bytes) -> Measured:
    table = a_table(answer)
    calls = tuple(MeasuredCall(**{**each, "choices": tuple(each["choices"])}) for each in table["calls"])
    found = Measured(**{**table, "calls": calls})
    for each in calls:
        (module, *numbers), choices = dataclasses.astuple(each)[:-1], each.choices
        of_form([module, numbers], tuple[str, list[float]])
        if not {*choices} <= {*get_args(Choice)}:
            raise ValueError(f"choices {choices}")
    of_form([found.after_bytes, found.in_flight, found.bytes_per_second], tuple[int, int, float | None])
    return found


def _speed_of_copies(device: torch.device) -> float:
    """Bytes per second to the host."""
    there = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    seconds = []
    for _ in range(2):
        synchronize(device)
        begun = time.perf_counter()
        here.copy_(there, non_blocking=True)
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return _TRIAL_BYTES / max(min(seconds), 1e-9)
