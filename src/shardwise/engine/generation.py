"""Generation: the model's own `generate`, which calls the model as often as the values it gets decide.

    stages 0 to 2    each data rank runs the loop alone
    tp, pp           each rank of a replica runs the whole loop, with equal random numbers. Under pp the outermost calls
                     of modules go through the stages, and give their tensors to all ranks (`PipelineRunner.generate`)
    stage 3          gather="each": every call gathers its units; data ranks that have finished follow those that go on
                     gather="once": all units are gathered first and stay, and then each data rank runs alone

Random numbers are those of `torch.manual_seed(seed); model.generate(...)` in one process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from shardwise.errors import BatchError, ModelError

Gather: TypeAlias = Literal["each", "once"]
"""When stage 3 gathers: for each call of the model, or once before all."""

Prompts: TypeAlias = Mapping[str, Any] | torch.Tensor | None
"""What a rank generates from: a tensor, or tensors by name; None: it has no rows."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One call of a model's `generate`."""

    generate: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, Any]
    has_rows: bool
    """Whether this rank has anything to generate."""
    gather: Gather
    seed: int | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Prompts,
        kwargs: Mapping[str, Any],
        *,
        device: torch.device,
        gather: Gather,
        seed: int | None,
    ) -> "Generation":
        """See `Engine.generate`. Raises ModelError and BatchError for what cannot be."""
        generate = getattr(model, "generate", None)
        if not callable(generate):
            raise ModelError(
                f"a {type(model).__name__} has no generate method, as models of transformers have. Write the loop "
                "around engine.predict, which gives every rank the tensors of one turn"
            )
        if gather not in get_args(Gather):
            raise BatchError(f'gather is {gather!r}; give "each" (for each call of the model) or "once" (before all)')
        if seed is not None and type(seed) is not int:
            raise BatchError(f"seed is {seed!r}; give a whole number, or None for one that the engine takes")
        named = dict(inputs) if isinstance(inputs, Mapping) else {}
        if not isinstance(inputs, Mapping | torch.Tensor | None):
            raise BatchError(
                f"engine.generate takes a tensor, or tensors by name, not a {type(inputs).__name__}. A rank without "
                "rows gives None"
            )
        if twice := sorted(named.keys() & kwargs.keys()):
            raise BatchError(f"engine.generate was given {', '.join(twice)} both in the inputs and as arguments")
        args = (inputs.to(device),) if isinstance(inputs, torch.Tensor) else ()
        given = on_device({**named, **kwargs}, device)
        first = next((each for each in (*args, *given.values()) if isinstance(each, torch.Tensor) and each.ndim), None)
        has_rows = inputs is not None and (first is None or len(first) > 0)
        return cls(generate=generate, args=args, kwargs=given, has_rows=has_rows, gather=gather, seed=seed)

    def run(self) -> Any:
        """What the model's `generate` gives."""
        return self.generate(*self.args, **self.kwargs)


def on_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The values with their tensors on the device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
