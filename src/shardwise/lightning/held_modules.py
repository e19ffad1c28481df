"""A module between runs: which engine has it, how it becomes plain again, and what stands in for its methods."""

import copy
from collections.abc import Sequence
from typing import Any

from shardwise.engine import Engine

_HOLD = "_hold_of_engine"
"""The attribute of a module that says which engine has it: a later run, with another Trainer, goes on with it."""


class _Hold:
    """The engine that has a module. A copy of the module has none."""

    def __init__(self, engine: Engine[Any] | None = None, frozen: Sequence[str] = ()) -> None:
        self.engine, self.frozen = engine, frozen

    def __reduce__(self) -> Any:
        return _Hold, ()


def engine_of(module: Any) -> Engine[Any] | None:
    """The engine that has a module."""
    return getattr(vars(module).get(_HOLD), "engine", None)


def hold(module: Any, engine: Engine[Any], frozen: Sequence[str]) -> None:
    """An engine has the module. frozen: parameters that are frozen because it was only evaluated."""
    vars(module)[_HOLD] = _Hold(engine, frozen)


def take_back(module: Any, engine: Engine[Any]) -> None:
    """Make the module the plain one again, with its values. All ranks call it together, and hold the whole of it."""
    trainer, held = module._trainer, vars(module)[_HOLD]
    with engine.whole(optimizer=False):
        plain = copy.deepcopy(module)
    vars(module).clear()
    vars(module).update(vars(plain))
    vars(module).pop(_HOLD, None)
    module._trainer = trainer
    for name in held.frozen:
        module.get_parameter(name).requires_grad_(True)


class StandIns:
    """Values in the attributes of objects, for the time of a run."""

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        """The attributes of each object, what was there, and what is."""

    def put(self, owner: Any, **values: Any) -> None:
        """Put values into an object."""
        held: dict[str, Any] = owner.__dict__
        self._replaced.append((held, {name: held[name] for name in values if name in held}, values))
        held.update(values)

    def remove(self) -> None:
        """Put back what was there."""
        while self._replaced:
            held, before, values = self._replaced.pop()
            for name in values:
                held.pop(name, None)
            held.update(before)
