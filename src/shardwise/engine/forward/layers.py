"""Layers around the forwards of modules: what a plan does before and after a module runs, put on the module itself.

The outermost layer takes the place of `module.forward` on the instance, so that hooks, `__call__` and the class stay as
they are. Each layer declares its `Place`, and `wrap` puts it there, whatever was put on before it.

    module(x) -> hooks -> module.forward:  stage( proof( unshard( tensor parallelism( the module's own forward ) ) ) )

Under `module.compile()` the compiled call replaces the module's own forward, and is given the module without hooks.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from enum import IntEnum, auto
from itertools import takewhile
from typing import Any

from torch import nn
from typing_extensions import override

from shardwise.engine.forward.aside import attributes_set, items_set
from shardwise.engine.torch_private import COMPILED_CALL, FORWARD_HOOKS, FORWARD_PRE_HOOKS, compiled_call, graph_task

Forward = Callable[..., Any]

APART = "_shardwise_runs_apart"
"""An attribute of modules while this rank runs them for itself (a proof): nothing may wait for other data ranks."""


class Place(IntEnum):
    """Where a layer stands, from the inside out. Of two layers of one place the later one stands around the earlier."""

    CLASS = auto()
    """What a class of torch computes is done in another way."""
    RECOMPUTATION = auto()
    """Inside of all that communicates: what is done around a forward happens once."""
    OFFLOAD = auto()
    """Around the checkpoint: the inputs that it keeps are what is saved."""
    TENSOR = auto()
    UNSHARD = auto()
    """Around the styles, which read parameters."""
    PROOF = auto()
    """Compares what the styles give, of parameters that are gathered."""
    STAGE = auto()
    """All that is inside runs on the stage."""
    PROGRAM = auto()
    WATCH = auto()


class Layer(ABC):
    """Something that stands around the forward of one module, and is called in its place."""

    place: Place
    structure: Hashable = None
    """What decides the shapes of its outputs, apart from the module."""
    module: nn.Module
    forward: Forward
    """What it stands around: the next layer, or the innermost forward."""
    own: "OwnForward"

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, and give its output, or do something else in its place."""

    @property
    def __wrapped__(self) -> Forward:  # where `inspect.signature` looks
        return self.own.forward


class PlainLayer(Layer):
    """A layer that adds nothing: copies and pickles of a module have it instead of an engine's."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class OfEngine(Layer):
    """Of layers that mean nothing without their engine."""

    @override
    def __reduce__(self) -> tuple[type[PlainLayer], tuple[()], dict[str, Any]]:
        return PlainLayer, (), {key: getattr(self, key) for key in ("place", "module", "forward", "own")}


class OwnForward:
    """What a module had before any layer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Forward = module.forward
        self.is_attribute = "forward" in vars(module)
        """Whether the user gave it to the object; else it is that of the class."""
        self.compiled: Forward | None = compiled_call(module)
        """What `module.compile()` made of the whole call. It stays inside of all layers, and hooks outside of them."""
        self.innermost = self.forward if self.compiled is None else self._run_compiled
        if self.compiled is not None:
            # torch would call the compiled forward and never a layer. What was compiled has the own forward in it.
            vars(module)[COMPILED_CALL] = None

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The call as it was compiled: of the module with its own forward, whose hooks have been called already."""
        if self.compiled is None:
            return self.forward(*args, **kwargs)
        # What was compiled is `_call_impl`, which runs hooks and `self.forward`: with both in place hooks would run
        # twice, and layers would be called, or traced, inside of themselves.
        bare = {"forward": self.forward, FORWARD_HOOKS: OrderedDict(), FORWARD_PRE_HOOKS: OrderedDict()}
        with attributes_set(self.module, bare):
            return self.compiled(*args, **kwargs)

    def give_back(self) -> None:
        """Let the module be as it was."""
        attributes = vars(self.module)
        # No attribute where there was none: a bound method on the instance would go into copies and pickles of the
        # module, bound to the first one.
        del attributes["forward"]
        if self.is_attribute:
            attributes["forward"] = self.forward
        if self.compiled is not None:
            attributes[COMPILED_CALL] = self.compiled

    def __getstate__(self) -> dict[str, Any]:
        # As torch does in copies and pickles of a module: what was compiled calls the first one.
        return {**vars(self), "compiled": None}


def layers_of(module: nn.Module) -> list[Layer]:
    """The layers around a module's forward, from the outside in."""
    found: list[Layer] = []
    forward = vars(module).get("forward")
    while isinstance(forward, Layer):
        found.append(forward)
        forward = forward.forward
    return found


def wrap(module: nn.Module, layer: Layer) -> None:
    """Put `layer` at its place around the forward of `module`."""
    found = layers_of(module)
    layer.module = module
    layer.own = found[0].own if found else OwnForward(module)
    outside = list(takewhile(lambda each: each.place > layer.place, found))
    if outside:
        layer.forward, outside[-1].forward = outside[-1].forward, layer
    else:
        layer.forward, vars(module)["forward"] = found[0] if found else layer.own.innermost, layer


def take_off(layer: Layer) -> None:
    """Take a layer off; one that is inside of a forward of the user's stays."""
    found = layers_of(layer.module)
    if layer not in found:
        return
    at = found.index(layer)
    if at > 0:
        found[at - 1].forward = layer.forward
    elif len(found) > 1:
        vars(layer.module)["forward"] = layer.forward
    else:
        layer.own.give_back()


@contextmanager
def wrapped(module: nn.Module, layer: Layer) -> Iterator[None]:
    """The layer is around the forward of `module` meanwhile."""
    wrap(module, layer)
    try:
        yield
    finally:
        take_off(layer)


def unwrap(model: nn.Module) -> None:
    """Take all layers off the modules of `model`: they have the forwards with which they came."""
    for module in model.modules():
        if found := layers_of(module):
            found[0].own.give_back()


def structures_of(module: nn.Module) -> tuple[Hashable, ...]:
    """Of the layers of a module, from the outside in: their kinds, and what decides shapes."""
    return tuple((type(each), each.structure) for each in layers_of(module))


def has_own_forward(module: nn.Module) -> bool:
    """Whether the user gave the object another forward than its class has."""
    found = layers_of(module)
    return found[-1].own.is_attribute if found else "forward" in vars(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, before layers were put on or after."""
    return compiled_call(module) is not None or any(each.own.compiled is not None for each in layers_of(module))


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Inside, no module of `model` runs as it was compiled."""
    places = [(vars(each), COMPILED_CALL, None) for each in model.modules() if is_compiled(each)]
    owns = [found[0].own for each in model.modules() if (found := layers_of(each))]
    with items_set([*places, *((vars(own), "compiled", None) for own in owns)]):
        yield


def strip(module: nn.Module, forward: Forward) -> Forward:
    """The module's own forward, without the layers in `forward`; the modules inside get their own forwards back, too.

    For a while: nothing is taken off, so `vars` of the modules have to be restored.
    """
    for each in module.modules():
        if found := layers_of(each):
            vars(each)["forward"] = found[-1].own.forward
    while isinstance(forward, Layer):
        forward = forward.forward
    return forward


def package_of(hook: object) -> str:
    """The package that a hook of a module is from: "torch" or "shardwise", or one of the user's."""
    # A function has a `__module__` of its own, as what torch wraps around one; other objects have that of their class.
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


def is_ours(hook: object) -> bool:
    """Whether a hook of a module was put on by shardwise, and not by the user."""
    return package_of(hook) == "shardwise"


def in_backward() -> bool:
    """Whether autograd is at work in this thread: then a forward is the recomputation of an activation checkpoint."""
    return graph_task() != -1
