"""Forwards around forwards: what a plan does before and after a module runs, put on the module itself.

A wrapper takes the place of `module.forward` on the instance, so that hooks, `__call__` and the class stay as they are.
Wrappers lie around each other in the order in which they were put on; they come off from the outside in.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import nn

Forward = Callable[..., Any]


class Wrapper(Protocol):
    """What runs in the place of a forward."""

    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `forward`, which is the module's own or that of the wrapper inside, and give its output."""


class _Wrapped:
    """The forward of a module with one wrapper around it."""

    def __init__(self, module: nn.Module, wrapper: Wrapper) -> None:
        self.module = module
        self.wrapper = wrapper
        self.inner: Forward = module.forward
        self.was_own = "forward" not in vars(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper.run(self.module, self.inner, args, kwargs)


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Put `wrapper` around the forward that `module` has now."""
    module.forward = _Wrapped(module, wrapper)


Kind = TypeVar("Kind")


def wrapper_of(module: nn.Module, kind: type[Kind]) -> Kind | None:
    """The outermost wrapper of this kind around the forward of `module`."""
    forward: Any = vars(module).get("forward")
    while isinstance(forward, _Wrapped):
        if isinstance(forward.wrapper, kind):
            return forward.wrapper
        forward = forward.inner
    return None


def unwrap(model: nn.Module) -> None:
    """Take all wrappers off the modules of `model`: they have the forwards with which they came."""
    for module in model.modules():
        while isinstance(forward := vars(module).get("forward"), _Wrapped):
            if forward.was_own:
                del module.forward
            else:
                module.forward = forward.inner
