"""Custom autograd functions between placed modules, seen as operations like torch's own.

A mode of torch sees the functions of torch, and not `torch.autograd.Function.apply`. So while some thread runs a
program over stages, another method stands below it, which asks the modes of the thread that calls it. Below it: models
keep `apply = Custom.apply`, and the compiler of torch knows `Function.apply` itself.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from shardwise.engine.torch_private import AutogradFunction, function_modes


class SeesFunctions(Protocol):
    """A mode that gives the results of custom autograd functions."""

    @property
    def is_inside(self) -> bool:
        """Whether it lets all operations pass."""

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call."""


_lock = threading.Lock()
_running: list[SeesFunctions] = []
"""Of all threads: simulated ranks are such."""


@contextmanager
def functions_seen(mode: SeesFunctions) -> Iterator[None]:
    """Inside, custom autograd functions go through `mode` wherever it is among the modes of the thread."""
    with _lock:
        _running.append(mode)
        AutogradFunction.apply = _SEEN  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _lock:
            _running.remove(mode)
            if not _running:
                del AutogradFunction.apply  # type: ignore[attr-defined]  # what it inherits is plain


def seeing_modes() -> list[Any]:
    """The modes over stages that see what this thread computes now."""
    return [each for each in function_modes() if each in _running and not each.is_inside]


@contextmanager
def seen_again(modes: Sequence[Any]) -> Iterator[None]:
    """Inside, a part of a forward runs again in backward, where these modes do not stand: they see it as before."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
            stack.enter_context(functions_seen(mode))
        yield


def _apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
    # Equal for equal functions: a call is known again by it.
    call = super(AutogradFunction, kind).apply
    mode = next((each for each in function_modes() if each in _running), None)
    # A function that is given code (a reentrant checkpoint) may call modules of several stages.
    if mode is None or any(map(callable, args)) or any(map(callable, kwargs.values())):
        return call(*args, **kwargs)
    return mode.on_function(call, args, kwargs)


_SEEN: Any = classmethod(_apply)
