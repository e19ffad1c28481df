"""What files of DeepSpeed say of groups: the parameters of each flat vector, the vectors of each group, the scale."""

from collections.abc import Mapping
from typing import Any

from shardwise.checkpoint.contents import can_exist
from shardwise.checkpoint.formats.deepspeed.flat import Shapes
from shardwise.checkpoint.formats.torch_files.saved_values import UnknownObject
from shardwise.errors import CheckpointError


def shapes_of(groups: object) -> list[Shapes]:
    """Return the `param_shapes` of a file of the model: those of each flat vector. Raises CheckpointError."""
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise CheckpointError("a file of the model does not say the shapes of what is flat (param_shapes)")
    for name, shape in ((name, shape) for each in groups for name, shape in each.items()):
        whole = isinstance(shape, tuple | list) and all(type(size) is int and size >= 0 for size in shape)
        if not (isinstance(name, str) and whole and can_exist(shape, 8)):
            raise CheckpointError(f"param_shapes has no shape for {name!r:.100}")
    return [{name: tuple(shape) for name, shape in each.items()} for each in groups]


def vectors_of(group: Mapping[str, Any], count: int) -> list[int]:
    """Return which of `count` vectors a group of the optimizer updates. Raises CheckpointError."""
    numbers = group.get("params")
    if not isinstance(numbers, list) or not all(type(each) is int and 0 <= each < count for each in numbers):
        raise CheckpointError("a group of the optimizer does not number its vectors")
    return numbers


def loss_scale_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the settings for the dynamic scale of losses; none where the scale is fixed."""
    scaler = optimizer.get("loss_scaler")
    state = scaler.state if isinstance(scaler, UnknownObject) else optimizer
    if not (isinstance(state, Mapping) and (optimizer.get("dynamic_loss_scale") is True)):
        return {}
    scale, window = state.get("cur_scale"), state.get("scale_window")
    at, last = state.get("cur_iter"), state.get("last_overflow_iter")
    if not (isinstance(scale, int | float) and scale > 0 and type(at) is type(last) is type(window) is int):
        return {}
    return {"loss_scale": {"scale": float(scale), "in_a_row": max(0, at - last - 1) % max(1, window)}}
