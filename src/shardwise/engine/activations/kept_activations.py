"""What the plan's `activations` do to a model: which modules are wrapped, and what is known of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.engine.activations.kept_outputs import overloads_of
from shardwise.engine.activations.recomputation import Recomputed
from shardwise.engine.activations.saved_on_host import HostTransfers, Offloaded
from shardwise.engine.pipeline.module_placement import outline_of
from shardwise.engine.randomness import KeyedRandom
from shardwise.engine.wrapping import wrap
from shardwise.engine.zero.uneven_microbatches import Passes
from shardwise.plan import Activations
from shardwise.plan.activation_choice import meant_modules


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationModules:
    """The modules that the settings of a plan mean, by name; alike on all ranks."""

    checkpoint: Sequence[str] = ()
    offload: Sequence[str] = ()


def modules_of(model: nn.Module, asked: Activations) -> ActivationModules:
    """The modules of a model that `asked` means. Raises PlanError for names and operators that there are not."""
    if asked == Activations():
        return ActivationModules()
    overloads_of(asked.save or ())
    outline = outline_of(model, asks="a plan with activations")
    return ActivationModules(
        **{
            name: meant_modules(outline, value, setting=f"activations.{name}")
            for name, value in {"checkpoint": asked.checkpoint, "offload": asked.offload}.items()
            if value is not None
        }
    )


class KeptActivations:
    """The activations of one rank's model under a plan."""

    def __init__(
        self,
        model: nn.Module,
        asked: Activations,
        modules: ActivationModules,
        random: KeyedRandom,
        device: torch.device,
        *,
        warns: bool,
    ) -> None:
        """Wraps forwards: nothing of a plan may stand around them yet. `warns`: this rank does."""
        named: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        operators = overloads_of(asked.save or ())
        warned: set[type] | None = set() if warns else None
        for name in modules.checkpoint:
            wrap(named[name], Recomputed(name, named[name], random, operators, warned))
        self.transfers: HostTransfers | None = None
        """None on the CPU: saved tensors are in host memory there."""
        if modules.offload and device.type != "cpu":
            self.transfers = HostTransfers(model, device)
            for name in modules.offload:
                # Around the checkpoint: the inputs that it keeps are what is saved.
                wrap(named[name], Offloaded(self.transfers, random))

    def follow(self, passes: Passes, microbatch: Callable[[], int] | None) -> None:
        """What is built after forwards were wrapped. `microbatch`: see `HostTransfers`."""
        if self.transfers is not None:
            self.transfers.passes = passes
            self.transfers.microbatch = microbatch or self.transfers.microbatch
