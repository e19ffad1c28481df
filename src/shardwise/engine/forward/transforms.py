"""torch.func and custom autograd functions inside of forwards: what torch does there without asking tensors or modes.

grad, vjp, jacrev, hessian    refuse hooks of saved tensors: ours are off meanwhile, and what they watch stays
all of them, vmap too         take the memory of their arguments: a parameter at rest (stage 3) is gathered first
Function.apply                is no function of torch for a mode. While some thread runs a program over stages, another
                              method stands below it, which asks the modes of the thread that calls it. Below it: models
                              keep `apply = Custom.apply`, and the compiler of torch knows `Function.apply` itself
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.autograd import graph

from shardwise.engine.forward.layers import is_ours
from shardwise.engine.forward.passes import Passes
from shardwise.engine.torch_private import (
    AutogradFunction,
    function_modes,
    is_transformed,
    pop_saved_hooks,
    push_saved_hooks,
    stand_around_transformations,
    top_saved_hooks,
    transformations_left,
)
from shardwise.errors import ModelError

_without_hooks: Callable[[str], AbstractContextManager[None]] = graph.disable_saved_tensors_hooks

_NOTHING: AbstractContextManager[object] = nullcontext()

INSIDE_A_MODULE = (
    "Transform functions in the forward of a placed module, or take the derivative there by torch.autograd.grad"
)


@functools.cache
def see_transformations() -> None:
    """From here on, in this process, torch.func works inside of forwards that an engine stands around."""
    # By the names under which torch finds these functions: it gives no other sign that a transformation begins.
    graph.disable_saved_tensors_hooks = _without_our_hooks  # type: ignore[assignment]
    stand_around_transformations(_gathering)


def refusal_of_transformed(what: str, instead: str) -> ModelError:
    """What to say inside of a function that torch.func transforms, where `what` goes on between ranks."""
    return ModelError(
        f"{what} inside of a function that torch.func transforms (grad, vjp, jvp, vmap ..): its tensors have no memory "
        f"that other ranks could get. {instead}"
    )


def outside_of_transformations() -> AbstractContextManager[object]:
    """Inside, what the engine does itself is no part of a function that torch.func transforms."""
    return transformations_left() if is_transformed() else _NOTHING


def _without_our_hooks(error_message: str) -> AbstractContextManager[None]:
    if torch.compiler.is_compiling() or top_saved_hooks(True) is None:
        return _without_hooks(error_message)
    return _hooks_off(error_message)


@contextmanager
def _hooks_off(error_message: str) -> Iterator[None]:
    taken = []
    try:
        while (hooks := top_saved_hooks(True)) and is_ours(hooks[0]):
            pop_saved_hooks()
            taken.append(hooks)
            holder = getattr(hooks[0], "__self__", None)
            passes = getattr(holder, "passes", holder)
            if isinstance(passes, Passes):
                passes.hold_calls()
        if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
            raise ModelError(
                "a transformation of torch.func (grad, vjp, jacrev, hessian) runs in a module that runs again in "
                "backward. torch has no such checkpoints. Leave the module out of activations.checkpoint, or take the "
                "gradient by torch.autograd.grad"
            )
        with _without_hooks(error_message):
            yield
    finally:
        for hooks in reversed(taken):
            push_saved_hooks(*hooks)


def _gathering(wrap: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(wrap)
    def wrapped(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling() and hasattr(type(tensor), "_is_sharded_param"):
            output: torch.Tensor = type(tensor).__torch_function__(wrap, (), (tensor, *args))
            return output
        return wrap(tensor, *args)

    return wrapped


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
