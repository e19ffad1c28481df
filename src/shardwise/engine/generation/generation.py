"""Generation: the model's own `generate`, which calls the model as often as the values it gets decide.

    stages 0 to 2    each data rank runs the loop alone
    tp, pp           each rank of a replica runs the whole loop, with equal random numbers. Under pp the outermost calls
                     of modules go through the stages, and give their tensors to all ranks (`PipelineRunner.generate`)
    stage 3          gather="each": every call gathers its units; data ranks that have finished follow those that go on
                     gather="once": all units are gathered first and stay, and then each data rank runs alone

Random numbers are those of `torch.manual_seed(seed); model.generate(...)` in one process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from shardwise.comm.collective_calls import unnoticed
from shardwise.engine.forward.batches import moved_to
from shardwise.errors import BatchError, ModelError

Gather: TypeAlias = Literal["each", "once"]
"""When stage 3 gathers: for each call of the model, or once before all."""

Prompts: TypeAlias = Mapping[str, Any] | torch.Tensor | None
"""What a rank generates from: a tensor, or tensors by name; None: it has no rows."""

Seeds: TypeAlias = int | Sequence[int] | None
"""One from which all draws go on; or one for each of several prompts."""


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """One call of a model's `generate`."""

    generate: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, Any]
    has_rows: bool
    """Whether this rank has anything to generate."""
    seed: int | None
    """Its own; None: it goes on from the draws before."""

    def run(self) -> Any:
        """What the model's `generate` gives."""
        return unnoticed(self.generate, *self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class Generation:
    """What `Engine.generate` was asked for."""

    calls: Sequence[GenerationCall]
    gather: Gather
    seed: int | None
    """With which the first call begins, where it has none itself."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Prompts | Sequence[Prompts],
        kwargs: Mapping[str, Any],
        *,
        device: torch.device,
        gather: Gather,
        seed: Seeds,
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
        several = list(inputs) if isinstance(inputs, list | tuple) else None
        of_each = seed if several is not None and isinstance(seed, list | tuple) else None
        if of_each is not None and (
            len(of_each) != len(several or ()) or not all(type(each) is int for each in of_each)
        ):
            raise BatchError(f"seed is {seed!r} for {len(several or ())} prompts; give a whole number for each")
        if of_each is None and seed is not None and type(seed) is not int:
            raise BatchError(
                f"seed is {seed!r}; give a whole number, or None for one that the engine takes. A list of prompts may "
                "have a list of seeds"
            )
        given = [inputs] if several is None else several
        calls = [
            _call(generate, each, kwargs, device=device, seed=own)
            for each, own in zip(given, of_each or [None] * len(given), strict=True)
        ]
        return cls(calls=calls, gather=gather, seed=seed if type(seed) is int else 0 if of_each else None)


def _call(
    generate: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any], *, device: torch.device, seed: int | None
) -> GenerationCall:
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    if not isinstance(inputs, Mapping | torch.Tensor | None):
        raise BatchError(
            f"engine.generate takes a tensor, tensors by name, or a list of such, not a {type(inputs).__name__}. A "
            "rank without rows gives None"
        )
    if twice := sorted(named.keys() & kwargs.keys()):
        raise BatchError(f"engine.generate was given {', '.join(twice)} both in the inputs and as arguments")
    args = (inputs.to(device),) if isinstance(inputs, torch.Tensor) else ()
    given = moved_to({**named, **kwargs}, device)
    first = next((each for each in (*args, *given.values()) if isinstance(each, torch.Tensor) and each.ndim), None)
    has_rows = inputs is not None and (first is None or len(first) > 0)
    return GenerationCall(generate=generate, args=args, kwargs=given, has_rows=has_rows, seed=seed)
