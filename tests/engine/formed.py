"""Nets in a few lines: a forward that is a function, and the parts that it uses."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def formed(
    way: Callable[..., Any], *prepare: Callable[[Any], object], base: Any = nn.Module, **parts: Any
) -> type[nn.Module]:
    """A class of modules whose forward is `way(module, ...)`, named like it.

    parts: of each name what makes a module or a parameter for it, anew in every net. prepare: called with the net then,
    for buffers, ties and hooks. base: whose parts are made before.
    """

    def make(self: Any) -> None:
        base.__init__(self)
        for name, part in parts.items():
            setattr(self, name, part())
        for each in prepare:
            each(self)

    name = way.__name__.title().replace("_", "") if way.__name__ != "<lambda>" else "Net"
    return type(name, (base,), {"__init__": make, "forward": way, "__module__": way.__module__})


def of_parts(*prepare: Callable[[Any], object], **parts: Any) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """The function below becomes `formed` with these."""
    return lambda way: formed(way, *prepare, **parts)


def several(make: Callable[[], nn.Module], count: int) -> Callable[[], nn.ModuleList]:
    """A list of so many of them."""
    return lambda: nn.ModuleList(make() for _ in range(count))


def linear(inputs: int, outputs: int, **settings: Any) -> Callable[[], nn.Linear]:
    """A linear map."""
    return lambda: nn.Linear(inputs, outputs, **settings)


def one_after_another(calls: Iterable[Callable[[Any], Any]], x: Any) -> Any:
    """What the last of them gives."""
    for each in calls:
        x = each(x)
    return x
