"""The mode under which a forward is traced: every operation is done, and what it does to atoms beside it."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.engine.tensor.flow import TensorFlow, TracedOperation
from shardwise.engine.tensor.operation_rules import follow, moved

_CONSTANTS = frozenset({"zeros", "ones", "full", "scalar_tensor", "new_zeros", "new_ones", "new_full"})
"""Operations that give tensors with all elements alike."""


class Following(TorchDispatchMode):
    """Tells a flow of every operation, but for those inside of followed modules."""

    def __init__(self, flow: TensorFlow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flow = flow

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flow = self._flow
        if flow.paused:
            return func(*args, **kwargs)
        given = _tensors_in((args, kwargs))
        for each in given:
            flow.read(each)
        output = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        operation = TracedOperation(func, name, args, kwargs, given, output, _tensors_in(output))
        flow.set_levels(operation)
        if not flow.cut(given):
            _follow_whole(flow, operation)
        elif any(each.numel() for each in operation.made):
            follow(flow, operation)
        return output


def _follow_whole(flow: TensorFlow, operation: TracedOperation) -> None:
    """Keep what is known of dims along which a whole tensor is alike."""
    name, given, made = operation.name, operation.given, operation.made
    if operation.is_writing:
        flow.forget_alike(made)
    elif name in _CONSTANTS:
        for each in made:
            flow.set_alike(each, torch.zeros((), dtype=torch.int64).expand(each.shape))
    elif name == "expand" and flow.alike(given[0]) is None:
        distinct = torch.arange(given[0].numel()).view(given[0].shape)
        flow.set_alike(made[0], distinct.expand(made[0].shape))
    elif len(given) == 1 and (alike := flow.alike(given[0])) is not None:
        for each, own in zip(made, moved(operation, alike) or (), strict=False):
            flow.set_alike(each, own)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
