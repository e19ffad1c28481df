"""Random numbers that depend on the computation, not on the rank: every module call draws from its own stream.

One microbatch, a model with two dropouts inside one block:

    root = f(seed, step, microbatch)   o--n0--------------------------n1------------->   glue draws here
                                           \\                          \\
    child of the call of `block`            o--n0-------n1--->          o-->  the next call
                                                \\        \\
    children of the dropouts                     o-->      o-->

A rank without `block` draws the one number n0 in its place, and goes on to n1 like the rank that runs it.

A call draws one number from the stream around it, and runs in a child stream with that seed. It leaves the stream
around it as it was after that one draw. So how much a module draws inside changes nothing outside of it. A recompute
under `torch.utils.checkpoint` starts from the state that the stream had at the beginning of its region, and draws the
same.

A `torch.Generator` that a module keeps belongs to no stream. What runs a module aside (a trial, a proof, a recompute)
puts it back (`kept_objects`).

On the CPU torch seeds a generator with the lower 32 bits of a seed: streams may coincide, and no result depends on it.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import xxhash
from torch import nn

from shardwise.comm.accelerators import random_sources
from shardwise.engine.forward.aside import attributes_set
from shardwise.engine.forward.layers import has_own_forward, in_backward
from shardwise.engine.forward.outline import named_modules
from shardwise.engine.forward.transforms import outside_of_transformations
from shardwise.engine.torch_private import (
    DisableTorchFunction,
    forward_hooks,
    forward_pre_hooks,
    hooks_before_all_forwards,
    hooks_of_all_forwards,
    is_transformed,
)
from shardwise.errors import ModelError

EVALUATION = -1
"""The step under which evaluations draw: each draws the same, whenever it is run."""

_States = list[torch.Tensor]

_DRAW_IN_TRAINING = frozenset(
    {
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
        nn.RReLU,
    }
)
"""Leaves that draw in training mode only."""

_DRAW = _DRAW_IN_TRAINING | frozenset(
    {
        nn.RNN,
        nn.LSTM,
        nn.GRU,
        nn.MultiheadAttention,
        nn.Transformer,
        nn.TransformerEncoder,
        nn.TransformerEncoderLayer,
        nn.TransformerDecoder,
        nn.TransformerDecoderLayer,
        nn.FractionalMaxPool2d,
        nn.FractionalMaxPool3d,
    }
)

_DRAW_NOTHING = frozenset(kind for name in nn.modules.__all__ if isinstance(kind := getattr(nn, name), type)) - _DRAW
"""Classes of torch that draw nothing themselves, by exact type: a subclass may do anything."""


class KeyedRandom:
    """The streams of one engine, and the hooks by which its model's calls split them."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self.seed = seed
        self._generators = tuple(random_sources(device).values())
        # On the CPU under any default device: reading a number from an accelerator would wait for it.
        self._number = torch.empty((), dtype=torch.int64, device="cpu")
        self._active: Stream | None = None
        self._threads: set[int] = set()
        """In which calls are this engine's: others of the process may share modules with it (activations, say)."""
        self.is_suspended = False
        """Whether modules run for shapes only."""
        self.skipped: Collection[nn.Module] = ()
        """Modules whose calls this rank mostly replays (see `catch_up`): placed on stages of others."""
        _take_off_hooks(model)
        # A model that is put under another plan, and a copy of it, keep hooks: they must not keep this object alive.
        reference, root = weakref.ref(self), weakref.ref(model)
        draws: dict[nn.Module, bool] = {}
        # Not inside of what is compiled: there hooks do nothing, and torch would compile each block anew for their ids
        # (up to its limit of 8, and run the others as they are).
        for module in dict.fromkeys(each for _, each in named_modules(model)):
            # A split reads and seeds the state of every generator: calls that cannot draw are spared it.
            if may_draw(module, draws):
                StreamSplit(module, reference, root)

    @property
    def active(self) -> "Stream | None":
        """The stream that generators draw from."""
        return self._active

    def stream(self, step: int, microbatch: int) -> "Stream":
        """The stream of one microbatch, numbered over all data ranks, in one step."""
        return Stream(self, self.number(step, microbatch))

    def number(self, *place: object) -> int:
        """A seed for this place in the run, by the seed of the engine."""
        return xxhash.xxh3_64_intdigest(" ".join(map(str, (self.seed, *place))).encode())

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """All torch generators begin with this seed in the body, as by `torch.manual_seed`, and go on as before it."""
        around = self.states()
        self._seed(seed)
        try:
            yield
        finally:
            self._install(around)

    def stream_ends_with_call(self) -> bool:
        """Whether the stream serves the call of one dropout layer, and has no later draw."""
        stream = self._active
        return stream is not None and bool(stream.frames) and type(stream.frames[-1][0]) in _DRAW_IN_TRAINING

    def suspended(self) -> AbstractContextManager[None]:
        """Module calls in the body split nothing: they compute no values (shape inference)."""
        return attributes_set(self, {"is_suspended": True})

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Calls of this thread are this engine's."""
        added = self._add_thread()
        try:
            yield
        finally:
            self._threads -= added

    @contextmanager
    def in_backward_of(self, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        """Calls of the thread in which autograd begins with these roots are this engine's: they recompute forwards."""
        added: set[int] = set()
        handles = [root.register_hook(lambda _: added.update(self._add_thread())) for root in roots]
        try:
            yield
        finally:
            self._threads -= added
            for handle in handles:
                handle.remove()

    def _add_thread(self) -> set[int]:
        """Take this thread for one of the engine's; empty where it was one."""
        added = {threading.get_ident()} - self._threads
        self._threads |= added
        return added

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        stream = self._active
        if stream is None or self.is_suspended:
            return
        if threading.get_ident() in self._threads or self._is_recomputed(module, refuses=True):
            child = self._number_drawn()
            is_skipped = module in self.skipped and self._is_skipped(module)
            # With the module, because `leave` comes for every call, and `enter` not for those that draw nothing: a
            # call must not end the frame of another.
            stream.frames.append((module, child if is_skipped else self._begin(child)))

    def leave(self, module: nn.Module) -> None:
        """The call of a module ends, by a return or by an error."""
        stream = self._active
        if stream is None or self.is_suspended or not stream.frames or stream.frames[-1][0] is not module:
            return
        if threading.get_ident() in self._threads or self._is_recomputed(module):
            around = stream.frames.pop()[1]
            if not isinstance(around, int):
                self._install(around)

    def catch_up(self) -> None:
        """Go over to the stream of a skipped call, whose code or hooks run after all."""
        stream = self._active
        if stream is None or not stream.frames:
            return
        module, child = stream.frames[-1]
        if isinstance(child, int):
            stream.frames[-1] = (module, self._begin(child))

    def _is_skipped(self, module: nn.Module) -> bool:
        """Whether nothing of the user's runs in a call of a skipped module, and nothing draws from its stream."""
        return (
            # Our own pair of hooks is there; what a third one draws belongs to the call.
            len(forward_pre_hooks(module)) == len(forward_hooks(module)) == 1
            and not (hooks_of_all_forwards or hooks_before_all_forwards)
        )

    def _number_drawn(self) -> int:
        if is_transformed():
            with outside_of_transformations():
                return self._number_drawn()
        with DisableTorchFunction():  # a mode around the forward (a recording, say) must not see the draw
            # One number, whatever the call draws: the stream around goes on from the same place on a rank that runs
            # the module and on one that does not.
            return int(self._number.random_(generator=torch.default_generator))

    def _is_recomputed(self, module: nn.Module, *, refuses: bool = False) -> bool:
        """Whether a call of the module in a thread that is not this engine's belongs to it all the same.

        On an accelerator, autograd runs backwards in another thread, and a forward there is a recomputation. It belongs
        to the stream that is active, unless other engines have the module too: then the thread decides.
        `refuses`: raise ModelError where that is not known.
        """
        # A thread of the user's own, which calls a module that this engine shares.
        if not in_backward():
            return False
        engines = [hook.random() for hook in forward_pre_hooks(module).values() if isinstance(hook, StreamSplit)]
        # An engine without a stream computes nothing now.
        others = [each for each in engines if each is not None and each is not self and each._active is not None]
        thread = threading.get_ident()
        if others and refuses and all(thread not in each._threads for each in others):
            raise ModelError(
                f"a {type(module).__name__} that several engines of this process share is recomputed in a backward "
                "that no engine began, in a thread of autograd. The engine of its random numbers is not known; give "
                "each model its own layer"
            )
        return not others

    def _begin(self, child: int) -> _States:
        """Go over to a child stream, by its seed; the states to come back to."""
        around = []
        with DisableTorchFunction():
            for generator in self._generators:
                around.append(generator.get_state())
                generator.manual_seed(child)
        return around

    def states(self, own: Sequence[torch.Generator] = ()) -> _States:
        """What the generators go on from, and those of modules that draw from their `own`."""
        return [generator.get_state() for generator in (*self._generators, *own)]

    @contextmanager
    def going_on_from(self, states: _States, own: Sequence[torch.Generator]) -> Iterator[None]:
        """Inside, the generators go on from `states`, and afterwards as if nothing had been drawn."""
        with DisableTorchFunction():
            around = self.states(own)
        self._install(states, own)
        try:
            yield
        finally:
            self._install(around, own)

    def _install(self, states: _States, own: Sequence[torch.Generator] = ()) -> None:
        with DisableTorchFunction():
            for generator, state in zip((*self._generators, *own), states, strict=True):
                generator.set_state(state)

    def _seed(self, seed: int) -> None:
        for generator in self._generators:  # not torch.manual_seed, which looks at every kind of device
            generator.manual_seed(seed)


class Stream:
    """The random numbers of one microbatch: inside, all torch generators draw from them. May be entered again."""

    def __init__(self, random: KeyedRandom, seed: int) -> None:
        self._random = random
        self._seed = seed
        self._inner: _States | None = None
        self._outer: _States = []
        self._around: Stream | None = None
        self._is_entered = False
        self._added: set[int] = set()
        """This thread, where it was not one of the engine's before."""
        self.frames: list[tuple[nn.Module, _States | int]] = []
        """The module calls that have not ended, and the states of the streams around them; of a skipped call its
        seed."""

    def __enter__(self) -> None:
        assert not self._is_entered, "a stream is entered once at a time"
        random = self._random
        self._is_entered = True
        self._added = random._add_thread()
        self._around, random._active = random._active, self
        self._outer = random.states()
        if self._inner is None:
            random._seed(self._seed)
        else:
            random._install(self._inner)

    def __exit__(self, *_: object) -> None:
        random = self._random
        # Kept, because a schedule leaves a microbatch in the middle and comes back to it for the backward.
        self._inner = random.states()
        random._install(self._outer)
        random._active, self._around = self._around, None
        random._threads -= self._added
        self._is_entered = False


class StreamSplit:
    """The hooks of one module. A copy of them, with a copy of the module, does nothing."""

    def __init__(
        self, module: nn.Module, reference: "weakref.ref[KeyedRandom]", root: "weakref.ref[nn.Module]"
    ) -> None:
        self.random: Callable[[], KeyedRandom | None] = reference
        self.root: Callable[[], nn.Module | None] = root
        """The model that it was put on for."""
        # Dropout in evaluation mode draws nothing: no split, and no cost in evaluations.
        self._in_training_only = type(module) in _DRAW_IN_TRAINING and not has_own_forward(module)
        self._handles = [
            # First before and last after: what the user's hooks draw belongs to the call.
            module.register_forward_pre_hook(self, prepend=True),
            # Also after an error: a caller that catches it goes on in the stream around.
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def __call__(self, module: nn.Module, _: Any) -> None:
        """The module is called."""
        if torch.compiler.is_compiling() or (self._in_training_only and not module.training):
            return
        if (random := self.random()) is not None:
            random.enter(module)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if not torch.compiler.is_compiling() and (random := self.random()) is not None:
            random.leave(module)

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "random": _nothing,
            "root": _nothing,
            "_in_training_only": self._in_training_only,
            "_handles": self._handles,
        }


def _nothing() -> None:
    """What the hooks of a copy find."""


def _take_off_hooks(model: nn.Module) -> None:
    for module in model.modules():
        for hook in list(forward_pre_hooks(module).values()):
            if isinstance(hook, StreamSplit) and hook.root() in (model, None):
                hook.remove()


def may_draw(module: nn.Module, known: dict[nn.Module, bool]) -> bool:
    """Whether a call of the module may draw a random number: nothing is known of classes that are not torch's."""
    if module not in known:
        known[module] = False  # a module that holds itself
        itself = type(module) not in _DRAW_NOTHING or has_own_forward(module)
        takes_hooks = not isinstance(module, torch.jit.ScriptModule)
        known[module] = (takes_hooks and itself) or any(may_draw(child, known) for child in module.children())
    return known[module]
