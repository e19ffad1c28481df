"""Checkpoints of an engine in Lightning's format: whole tensors in one file, which any strategy loads.

What a plain checkpoint has no place for (random numbers, the loss scale, averages) is in its entry "shardwise".
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.agreement import agreed
from shardwise.engine import Engine
from shardwise.engine.engine import full_state_dict
from shardwise.engine.zero.flat_params import whole
from shardwise.moving import reshard
from shardwise.plan.names import AVERAGE, state_name
from shardwise.space import Piece

ENTRY = "shardwise"

_SETTINGS = ("random", "loss_scale", "average")


def gathered(engine: Engine[Any], *, optimizers: bool) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The states of the module and of its optimizers on rank 0, and the engine's own; all ranks call it together."""
    model, found = full_state_dict(engine, optimizer=True) if optimizers else (full_state_dict(engine), [])
    settings = {name: each for name, each in engine.settings().items() if name in _SETTINGS}
    average: Mapping[str, torch.Tensor] = {}
    if engine.plan.average is not None:
        with engine.averaged():
            average = full_state_dict(engine)
    trained = {name for name, each in engine.model.named_parameters() if each.requires_grad}
    own = {"settings": settings, "average": {name: each for name, each in average.items() if name in trained}}
    return model, found if isinstance(found, list) else [found], own


def take_over(engine: Engine[Any], optimizers: Sequence[torch.optim.Optimizer], checkpoint: Mapping[str, Any]) -> None:
    """Give the engine the state of optimizers, and its own; all ranks have read the file."""
    with engine.whole(rank0_only=True):
        if engine.channel.rank == 0:
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)
    if (own := checkpoint.get(ENTRY)) is None:  # of a plain Trainer
        return
    values: dict[Piece, torch.Tensor] = {}
    for name, tensor in own["average"].items() if engine.plan.average is not None else ():
        values |= whole(state_name(name, AVERAGE), tensor)
    with agreed(engine.channel, purpose="verdict on a checkpoint of Lightning"):
        restoration = engine.restore({piece.name: piece for piece in values}, own["settings"])
    names = {piece.name for piece in values}
    targets = {piece: each for piece, each in restoration.wanted.items() if piece.name in names}
    reshard(values if engine.channel.rank == 0 else {}, targets, engine.channel, cast=True, compare=False)
    restoration.finish()
