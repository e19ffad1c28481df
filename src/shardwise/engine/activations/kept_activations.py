"""What the plan's `activations` do to a model: which modules are wrapped, and what is known of them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from shardwise.comm import Channel
from shardwise.engine.activations.budgeted_modules import ActivationBudget, BudgetedModule
from shardwise.engine.activations.recomputation import Recomputed, overloads_of
from shardwise.engine.activations.saved_meter import SavedMeter, storages_of
from shardwise.engine.activations.saved_on_host import LEAST_BYTES, HostTransfers, Offloaded
from shardwise.engine.forward.layers import wrap
from shardwise.engine.forward.outline import outline_of
from shardwise.engine.forward.passes import Passes
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.forward.trained_parameters import TrainedSet
from shardwise.plan import Activations, Plan
from shardwise.plan.units import ITSELF, meant_modules


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationModules:
    """The modules that the settings of a plan mean, by name: the same on all ranks."""

    checkpoint: Sequence[str] = ()
    offload: Sequence[str] = ()


def modules_of(model: nn.Module, asked: Activations) -> ActivationModules:
    """The modules of a model that `asked` means. Raises PlanError for names and operators that there are not."""
    if asked == Activations():
        return ActivationModules()
    overloads_of(asked.save or ())
    outline = outline_of(model, asks="a plan with activations")
    checkpoint, offload = asked.checkpoint, asked.offload
    if asked.budget_bytes is not None and checkpoint is None and offload is None:
        checkpoint = offload = "blocks"
    names = [
        () if value is None else meant_modules(outline, value, setting=f"activations.{name}")
        for name, value in (("checkpoint", checkpoint), ("offload", offload))
    ]
    return ActivationModules(checkpoint=names[0], offload=names[1])


class MicrobatchOrder(Protocol):
    """Says in which order a pipeline computes microbatches."""

    peak_in_flight: int
    """How many microbatches have begun and not ended, at most."""

    def microbatch(self) -> int:
        """The one that is computed now."""


class KeptActivations:
    """The activations of one rank's model under a plan."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        modules: ActivationModules,
        random: KeyedRandom,
        channel: Channel,
        passes: Passes,
        order: MicrobatchOrder | None,
    ) -> None:
        """order: of the stages of this rank; None: one microbatch after the other."""
        asked = plan.activations
        self.number = 0
        """Of the microbatch that is computed, counted over those of this rank, where there are no stages."""
        self.transfers: HostTransfers | None = None
        """None on the CPU, where saved tensors are in host memory, and where nothing is kept on the host."""
        self.budget: ActivationBudget | None = None
        self._model = model
        self._modules = modules
        self._device = channel.device
        self._passes = passes
        self._order = order
        self._has_computed = False
        if modules.offload and channel.device.type != "cpu":
            self.transfers = HostTransfers(model, channel.device, passes, self._microbatch)
        if asked.budget_bytes is not None:

            def in_flight() -> int:
                return self._has_computed * (1 if order is None else order.peak_in_flight)

            self.budget = ActivationBudget(asked.budget_bytes, plan.mesh, channel, self.transfers, in_flight)
        named: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        operators = overloads_of(asked.save or ())
        warned: set[type] | None = set() if channel.rank == 0 else None
        for name in dict.fromkeys([*modules.checkpoint, *modules.offload]):
            module = named[name]
            again = (
                Recomputed(name or ITSELF, module, random, operators, warned) if name in modules.checkpoint else None
            )
            hosted = Offloaded(self.transfers, random) if self.transfers and name in modules.offload else None
            if self.budget is not None and (again or hosted):
                self.budget.modules[name] = BudgetedModule(name, self.budget, random, again, hosted)
                wrap(module, self.budget.modules[name])
                continue
            for each in (again, hosted):
                if each is not None:
                    wrap(module, each)

    def _microbatch(self) -> int:
        return self.number if self._order is None else self._order.microbatch()

    def measuring(self, num_microbatches: int, trained: TrainedSet) -> AbstractContextManager[None]:
        """Around the forwards and backwards of a step that computes so many microbatches, and trains this."""
        self._has_computed = num_microbatches > 0
        if self.budget is None:
            return nullcontext()
        self.budget.turn_to(trained)
        if self.budget.chosen:
            return nullcontext()
        return self.budget.measuring(
            SavedMeter(
                self._device,
                self._passes,
                storages_of(self._model),
                smallest=LEAST_BYTES,
                counts=lambda: self._microbatch() == 0,
            )
        )

    def settle(self) -> None:
        """After a step, on all ranks. Raises PlanError, the same on all, for a budget that cannot be met."""
        if self.budget is not None:
            self.budget.settle()

    def report(self) -> str:
        """What is done with which modules, for people; with a budget, and after the first step, the expected peak."""
        return "\n".join(self.lines()) or "activations: all that modules save is kept"

    def lines(self) -> list[str]:
        """The same by lines; none where the plan asks for nothing."""
        if self.budget is not None:
            return self.budget.lines()
        lines = [
            f"activations.{name}: {', '.join(each or ITSELF for each in names)}"
            for name, names in (("checkpoint", self._modules.checkpoint), ("offload", self._modules.offload))
            if names
        ]
        if self._modules.offload and self.transfers is None:
            lines.append("activations.offload: ranks compute on the CPU, where nothing has to move")
        if self.transfers is not None and self.transfers.num_bytes:
            pinned, moved = self.transfers.blocks.num_bytes, self.transfers.num_bytes
            lines.append(f"activations.offload: {moved} bytes copied to the host so far, {pinned} bytes pinned there")
        return lines
