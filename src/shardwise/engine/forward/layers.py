"""Forwards around forwards: what a plan does before and after a module runs, put on the module itself.

A wrapper takes the place of `module.forward` on the instance, so that hooks, `__call__` and the class stay as they are.
Wrappers stand around each other in the order in which they were put on. They come off from the outside in.

    module(x) -> hooks -> module.forward:  proof( unshard( tensor parallelism( the class's own forward ) ) )
                                           put on third    second    first

Under `module.compile()` the compiled call replaces the innermost forward, and is given the module without hooks.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.engine.forward.aside import attributes_set

Forward = Callable[..., Any]

APART = "_shardwise_runs_apart"
"""An attribute of modules while this rank runs them for itself (a proof): nothing may wait for other data ranks."""


class Wrapper(Protocol):
    """What runs in the place of a forward."""

    @property
    def structure(self) -> Hashable:
        """What decides the shapes of its outputs, apart from the module."""

    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `forward`, which is the module's own or that of the wrapper inside, and give its output."""


class PlainRun:
    """A `Wrapper` that adds nothing: copies and pickles of a module have it in the place of an engine's."""

    structure = None

    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Wrapper`."""
        return forward(*args, **kwargs)


class OfEngine:
    """Of wrappers that mean nothing without their engine."""

    structure: Hashable = None
    """See `Wrapper`: most change no shapes."""

    def __reduce__(self) -> tuple[type[PlainRun], tuple[()]]:
        return PlainRun, ()


class _Wrapped:
    """The forward of a module with one wrapper around it."""

    def __init__(self, module: nn.Module, wrapper: Wrapper) -> None:
        self.module = module
        self.wrapper = wrapper
        self.inner: Forward = module.forward
        self.was_own = "forward" not in vars(module)
        self.original = self.inner
        self.__wrapped__ = self.inner  # where `inspect.signature` looks
        self.compiled: Forward | None = module._compiled_call_impl
        """What `module.compile()` made of the whole call. It stays inside of the wrapper, and hooks outside of both."""
        if self.compiled is not None:
            # torch would call the compiled forward and never this one. What was compiled has the class's own forward
            # in it.
            vars(module)["_compiled_call_impl"] = None
            self.inner = self._run_compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper.run(self.module, self.inner, args, kwargs)

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The call as it was compiled: of the module with its own forward, whose hooks have been called already."""
        assert self.compiled is not None
        with as_compiled(self.module, self.original):
            return self.compiled(*args, **kwargs)


def as_compiled(module: nn.Module, forward: Forward) -> AbstractContextManager[None]:
    """The module as it was when it was compiled: with its own forward. Its hooks have been called already."""
    # What was compiled is `_call_impl`, which runs hooks and `self.forward`: with both in place hooks would run twice,
    # and what stands around the forward would be called, or traced, inside of itself.
    bare: dict[str, object] = {"forward": forward, "_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}
    return attributes_set(module, bare)


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Put `wrapper` around the forward that `module` has now."""
    module.forward = _Wrapped(module, wrapper)


def structures_of(forward: object) -> tuple[Hashable, ...]:
    """Of the wrappers around a forward, from the outside in: their kinds, and what decides shapes."""
    found = []
    while isinstance(forward, _Wrapped):
        found.append((type(forward.wrapper), forward.wrapper.structure))
        forward = forward.inner
    return tuple(found)


def eager(forward: Forward) -> Forward:
    """What a wrapper was given to run, without what `module.compile()` made of it."""
    holder = getattr(forward, "__self__", None)
    return holder.original if isinstance(holder, _Wrapped) else forward


def strip(module: nn.Module, forward: Forward) -> Forward:
    """The module's own forward, without the wrappers in `forward`; the modules inside get their own forwards back, too.

    For a while: nothing is taken off, so `vars` of the modules have to be restored.
    """
    for each in module.modules():
        if each is not module and isinstance(held := vars(each).get("forward"), _Wrapped):
            vars(each)["forward"] = _innermost(held)
    return _innermost(forward)


def _innermost(forward: Forward) -> Forward:
    while isinstance(forward := eager(forward), _Wrapped):
        forward = forward.original
    return forward


def take_off(module: nn.Module, wrapper: Wrapper) -> None:
    """Take off the outermost wrapper; one that is wrapped in another stays."""
    forward = vars(module).get("forward")
    if isinstance(forward, _Wrapped) and forward.wrapper is wrapper:
        _give_back(module, forward)


def unwrap(model: nn.Module) -> None:
    """Take all wrappers off the modules of `model`: they have the forwards with which they came."""
    for module in model.modules():
        # From the outside in, because each one knows only what it found.
        while isinstance(forward := vars(module).get("forward"), _Wrapped):
            _give_back(module, forward)


def _give_back(module: nn.Module, forward: _Wrapped) -> None:
    if forward.compiled is not None:
        vars(module)["_compiled_call_impl"] = forward.compiled
    if forward.was_own:
        # Not assigned: a bound method on the instance would go into copies and pickles of the module, bound to the
        # first one.
        del module.forward
    else:
        module.forward = forward.original


def package_of(hook: object) -> str:
    """The package that a hook of a module is from: "torch" or "shardwise", or one of the user's."""
    # A function has a `__module__` of its own, as what torch wraps around one; other objects have that of their class.
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


def is_ours(hook: object) -> bool:
    """Whether a hook of a module was put on by shardwise, and not by the user."""
    return package_of(hook) == "shardwise"


def in_backward() -> bool:
    """Whether autograd is at work in this thread: then a forward is the recomputation of an activation checkpoint."""
    return torch._C._current_graph_task_id() != -1


def on_gradient(tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
    """Call `do` with the gradient of a tensor that an operation gave, as `tensor.register_hook` does."""
    if type(tensor) is not torch.Tensor:
        tensor.register_hook(do)
    elif (hooks := tensor._backward_hooks) is None:
        # What torch does there, but for a handle to take the hook off again: it costs twice as much as the hook.
        # Handles have small numbers as keys, and no addresses.
        tensor._backward_hooks = OrderedDict({id(do): do})
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    else:
        hooks[id(do)] = do


def at_end_of_backward(do: Callable[[], None]) -> None:
    """Call `do` at the end of the backward in this thread. A backward inside of another has its own end."""
    torch.autograd.Variable._execution_engine.queue_callback(do)
