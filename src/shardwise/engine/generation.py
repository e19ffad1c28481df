"""Generation: the model's own `generate`, which calls the model as often as the values it gets decide.

    stages 0 to 2    each data rank runs the loop alone
    tp, pp           each rank of a replica runs the whole loop, with equal random numbers. Under pp the outermost calls
                     of modules go through the stages, and give their tensors to all ranks (`PipelineRunner.generate`)
    stage 3          gather="each": every call gathers its units; data ranks that have finished follow those that go on
                     gather="once": all units are gathered first and stay, and then each data rank runs alone

Random numbers are those of `torch.manual_seed(seed); model.generate(...)` in one process.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from shardwise.comm.collective_calls import unnoticed
from shardwise.engine.forward.batches import moved_to
from shardwise.engine.step.edges import Gather, ModelCall, Prompts, Seeds
from shardwise.errors import BatchError, ModelError


def calls_of(
    model: nn.Module,
    inputs: Prompts | Sequence[Prompts],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    gather: Gather,
    seed: Seeds,
) -> tuple[list[ModelCall], int | None]:
    """The calls that `Engine.generate` was asked for, and the seed with which the first begins without one of its own.

    Raises ModelError and BatchError for what cannot be.
    """
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
    if of_each is not None and (len(of_each) != len(several or ()) or not all(type(each) is int for each in of_each)):
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
    return calls, seed if type(seed) is int else 0 if of_each else None


def _call(
    generate: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any], *, device: torch.device, seed: int | None
) -> ModelCall:
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
    return (partial(unnoticed, generate, *args, **given) if has_rows else None), seed
