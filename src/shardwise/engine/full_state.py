"""The state dicts of the plain program, in one call."""

from collections.abc import Mapping
from typing import Any

from shardwise.engine.engine import Engine


def full_state_dict(engine: Engine, *, rank0_only: bool = True, offload: bool = True, optimizer: bool = False) -> Any:
    """What `state_dict()` of the plain model gives, as a dict of whole tensors; with `optimizer`, also of optimizers.

    Values are the masters', in the dtypes in which the model came to parallelize. All ranks call it together.
    rank0_only: the other ranks get {}. offload: tensors on the CPU, else on the engine's device.
    optimizer: give (model, optimizer): also what `state_dict()` of the plain optimizer gives, or a list where the
        engine has several. A plain loop that loads both goes on bit for bit.

    A rank that gets tensors holds the whole of them. Raises the errors of `Engine.whole`.
    """
    model: Mapping[str, Any] = {}
    states: list[Mapping[str, Any]] = []
    with engine.whole(optimizer=optimizer, rank0_only=rank0_only, offload=offload):
        if engine.channel.rank == 0 or not rank0_only:
            model = engine.model.state_dict()
            states = [each.state_dict() for each in engine.optimizers] if optimizer else []
    if not optimizer:
        return model
    return model, states[0] if len(states) == 1 else states or {}
