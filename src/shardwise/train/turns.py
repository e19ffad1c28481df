"""Updates in turns: which group of parameters each update of a run trains, and by which loss ([[train.turns]]).

    [[train.turns]]  only = "critic"     steps = 2          update   1       2       3          4       5       6
    [[train.turns]]  only = "generator"                     trains   critic  critic  generator  critic  critic  ..

The number of an update alone decides, so that a run that goes on is where it was. Each update takes the next rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.engine.forward.batches import LossFunction
from shardwise.train.config import RunConfig
from shardwise.train.references import arguments_of, made, resolve

Turn = Mapping[str, Any]
"""`only` and `loss` of `engine.step`."""


class Turns:
    """The turns of a run; without any, each update trains all parameters."""

    def __init__(self, turns: Sequence[tuple[int, Turn]] = ()) -> None:
        """`turns`: updates in a row, and what is special about them."""
        self._cycle = [turn for number, turn in turns for _ in range(number)]

    def __bool__(self) -> bool:
        return bool(self._cycle)

    def of(self, update: int) -> Turn:
        """Arguments of `engine.step` in an update, counted from 1."""
        return self._cycle[(update - 1) % len(self._cycle)] if self._cycle else {}


def build_turns(config: RunConfig, model: nn.Module) -> Turns:
    """The turns that [[train.turns]] names. Raises ConfigError for a loss that cannot be made."""
    turns: list[tuple[int, Turn]] = []
    for at, table in enumerate(config.train.turns):
        turn: dict[str, Any] = {} if table.only is None else {"only": table.only}
        if table.loss is not None:
            turn["loss"] = loss_of(config, table.loss, table.loss_options, model, key=f"train.turns.{at}.loss")
        turns.append((table.steps, turn))
    return Turns(turns)


def build_loss(config: RunConfig, model: nn.Module) -> LossFunction | None:
    """The loss function that [model] names, if it names one."""
    reference = config.model.loss
    return None if reference is None else loss_of(config, reference, config.model.loss_options, model, key="model.loss")


def loss_of(
    config: RunConfig, reference: str, options: Mapping[str, Any], model: nn.Module, *, key: str
) -> LossFunction:
    """A loss function by name. One that takes a `model` gets that which is trained, to call parts of it."""
    given = {"model": model} if "model" in arguments_of(resolve(reference, folder=config.folder, key=key)) else {}
    return made(reference, {**given, **options}, folder=config.folder, key=key)
