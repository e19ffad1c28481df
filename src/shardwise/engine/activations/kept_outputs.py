"""Outputs of chosen operators, kept from the first run of a module for the second one (selective checkpointing).

    first run     mm -> kept 0    gelu      mm -> kept 1
    second run    kept 0          gelu      kept 1

Torch's own pair of modes numbers every operator, and refuses a second run that calls one more or less: a cast that
autocast remembers, say. Here only the chosen ones count, and none that is tried
on fake tensors: between stages, the first run of a call infers what it gives, and the second one knows.
"""

from collections.abc import Collection
from typing import Any, Self

import torch

from shardwise.comm.nested_values import tensors_in
from shardwise.engine.forward.observe import Observed
from shardwise.engine.torch_private import FakeTensor, Operator, TorchDispatchMode, tree_map, version_of
from shardwise.errors import ModelError, PlanError

_Outputs = dict[Operator, list[tuple[Any, int]]]
"""Of each operator in the order of its calls, with versions."""


class TakenOutputs(TorchDispatchMode):
    """Gives them, in the second run, instead of a call."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._taken: dict[Operator, int] = {}

    def __enter__(self) -> Self:
        self._taken.clear()  # each backward through the module runs it again: one for each stage that it spans
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = self._outputs.get(func)
        if outputs is None or _is_tried((args, kwargs)):
            return func(*args, **(kwargs or {}))
        at = self._taken.setdefault(func, 0)
        self._taken[func] += 1
        if at >= len(outputs):
            raise ModelError(f"a module calls {func} more often when it is run again in backward; {_ADVICE}")
        kept, version = outputs[at]
        outputs[at] = (None, 0)  # let go as soon as it was used
        if kept is None:  # by the backward of another stage
            return func(*args, **(kwargs or {}))
        if _version_of(kept) != version:
            raise ModelError(f"the output of {func} was written to after it was kept; {_ADVICE}")
        return kept


_ADVICE = "leave the operator out of activations.save, or the module out of activations.checkpoint"


def _is_tried(nested: Any) -> bool:
    """Whether these are the tensors of a call that computes no values."""
    return any(each.is_meta or isinstance(each, FakeTensor) for each in tensors_in(nested))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _version_of(made: Any) -> int:
    """It changes when one of the tensors is written to."""
    tensors = made if isinstance(made, tuple | list) else (made,)
    return sum(version_of(each) for each in tensors if isinstance(each, torch.Tensor))


def outputs_kept(operators: Collection[Operator]) -> tuple[Observed, TakenOutputs]:
    """The modes of the two runs of one call; the value of the first is the bytes of what is kept."""
    outputs: _Outputs = {}

    def keep(func: Any, args: Any, kwargs: Any, made: Any) -> int:
        if func not in operators or _is_tried(made):
            return 0
        # Apart from what autograd hangs the graph on.
        outputs.setdefault(func, []).append((tree_map(_detached, made), _version_of(made)))
        return sum(each.nbytes for each in tensors_in(made))

    return Observed(keep), TakenOutputs(outputs)


def overloads_of(operators: Collection[str]) -> frozenset[Operator]:
    """The operators by name, those without an overload in all of theirs. Raises PlanError for unknown ones."""
    found: list[Operator] = []
    problems = []
    for name in operators:
        space, operator, *overload = name.split(".")
        packet = getattr(getattr(torch.ops, space), operator, None)
        names = [] if packet is None else packet.overloads()
        if not names or not set(overload) <= set(names):
            known = f"; its overloads are {', '.join(names)}" if names else ""
            problems.append(f"activations.save: torch.ops has no operator {name!r}{known}")
        else:
            found += [getattr(packet, each) for each in overload or names]
    if problems:
        raise PlanError(*problems)
    return frozenset(found)
