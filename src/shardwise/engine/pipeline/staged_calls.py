"""Calls that are infer-only on other ranks: of placed modules, and of operations between them.

Each can be run, on the rank of its stage, and tried on fake tensors, on all ranks. Fake tensors have shapes, strides
and dtypes without elements, on the device of the real ones.

    run                 result, records of inner hooks                      hooks of others are noted, not called
    try_on_fakes        the same, of fake tensors                           what it writes to the module is taken back
    call_noted_hooks    the noted hooks are called in order, on all ranks   with values of the stage
"""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from shardwise.comm.accelerators import outlive_threads
from shardwise.comm.nested_values import is_plain, tensors_in, transform
from shardwise.engine.forward.aside import items_set, kept_attributes
from shardwise.engine.forward.layers import OfEngine, Place, is_ours, package_of, run_eagerly, structures_of, wrap
from shardwise.engine.forward.sharded_parameters import functions_of_metadata
from shardwise.engine.pipeline.nested import comparable, token_of, user_site
from shardwise.engine.pipeline.stage_tensor import Spec, StageTensor
from shardwise.engine.torch_private import (
    FORWARD_HOOKS,
    ORIGINAL_MODULE,
    DisableTorchFunctionSubclass,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    forward_hooks,
    forward_pre_hooks,
    hooks_with_keywords,
    parametrizations_uncached,
    schema_of,
    storage_of,
    written_by,
)
from shardwise.errors import ModelError

OF_ANOTHER_STAGE = (
    "{name!r} computes with a parameter or a buffer of a module on another stage: an argument or an attribute "
    "({site}). Place both modules on one stage, or pass the tensor through forward"
)
"""Of a call by its name, and a place in the program."""


# One class for each name of a call: a class is made once, and modules are called in every microbatch.
@functools.cache
def _refusing_class(call: str) -> type:
    """The class of another stage's parameters while `call` is executed: they have a description only.

    A torch function mode would see reads as well, but some modules take other paths under one: torch's transformer
    layer leaves its fused kernel, which rounds differently.
    """

    def torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in functions_of_metadata():
            raise ModelError(OF_ANOTHER_STAGE.format(name=call, site=user_site()))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    kind: type = nn.Parameter
    return type(kind)("ForeignParameter", (kind,), {"__torch_function__": classmethod(torch_function)})


class ForeignParameters:
    """Those of a model on one rank."""

    def __init__(self, model: nn.Module) -> None:
        # On the meta device. Looked for once: a generation comes to `refusing` in each call, and the walk over all
        # modules takes ten times as long as the rest.
        self._known = [each for each in model.parameters() if type(each) is nn.Parameter and each.is_meta]

    @contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """Nothing that `call` computes may come from another stage's module, which has no values here."""
        # torch would compute with them and give a meta tensor, or fail with a message on devices: neither names the
        # module and the way out.
        refusing = _refusing_class(call)
        for each in self._known:
            each.__class__ = refusing
        try:
            yield
        finally:
            for each in self._known:
                each.__class__ = nn.Parameter


_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()  # see `Passes.pack_saved`


# A write in place to a leaf that requires a gradient is refused by autograd, to a computed tensor it is allowed. So
# a fake of a computed value has to be computed, and by something that keeps its strides.
class _Computed(torch.autograd.Function):
    """A fake tensor that autograd takes for a computed one: `clone` would give a slice other strides."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made.pop()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, None


_UNLIKE_THEIR_FAKES = frozenset({"aten::_native_multi_head_attention"})
"""Operations that give other tensors than their fake kernels do: an empty one for none."""


class Trial(TorchDispatchMode):
    """Sees writes of operations; versions of tensors do not show writes through `.data`, and of batch norm."""

    def __init__(self, fakes: "Fakes", call: "StagedCall", stage: int) -> None:
        """The trial of a call on this stage."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes, self._device = fakes, fakes.device
        self.call, self._stage = call, stage
        self.written: set[int] = set()
        """Memories."""
        self._alive: list[torch.Tensor] = []
        """The tensors written to, kept alive: another memory must not get the number of one that was freed."""
        self.kept: set[int] = set()
        """Memories of parameters and buffers."""
        self._kept_elsewhere: dict[torch.Tensor, torch.Tensor] = {}
        """Parameters and buffers that the call knows by itself, not by arguments, and their fakes."""
        self._stages: Mapping[int, Collection[int]] | None = None

    def _alike(self, leaf: Any) -> Any:
        """What an operation gets: a fake for a parameter or buffer of a module that the call knows by itself.

        Ranks of other stages have no memory for it. With a fake, all ranks see the same.
        """
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with DisableTorchFunctionSubclass():
            if self._stages is None:
                self._stages = self._fakes.stages_of()
            stages = self._stages.get(storage_of(leaf))
            if stages is None:
                return leaf
            if self._stage not in stages:
                raise ModelError(OF_ANOTHER_STAGE.format(name=self.call.name, site=user_site()))
            self.call.keep_apart()
            if leaf not in self._kept_elsewhere:
                self._kept_elsewhere[leaf] = self._fakes.plain(Spec.of(leaf))
        return self._kept_elsewhere[leaf]

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        self._alive += tensors
        self.written.update(map(storage_of, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = transform((args, kwargs or {}), self._alike)
        schema = schema_of(func)
        if schema.name in _UNLIKE_THEIR_FAKES:
            raise NotImplementedError(schema.name)
        # "cuda" is this rank's device. torch remembers what fake operations gave, by their arguments, for all ranks of
        # the process: another rank would get this device.
        if (asked := kwargs.get("device")) is not None and asked.index is None and asked.type == self._device.type:
            kwargs = {**kwargs, "device": self._device}
        if schema.is_mutable:
            self._note(tensors_in(written_by(func, args, kwargs)))
        return func(*args, **kwargs)


StagesOfTensors = Callable[[], Mapping[int, Collection[int]]]
"""Gives the stages of parameters and buffers, by `storage_of`."""


class Fakes:
    """Makes fake tensors, and runs trials with them."""

    def __init__(self, device: torch.device, stages_of: StagesOfTensors) -> None:
        self.device = device
        self.stages_of = stages_of
        outlive_threads()  # forwards of interleaved stages run on threads of their own
        # An operation without a fake kernel would run on zeros, and might give what it gives of no other numbers.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    @contextmanager
    def trying(self, call: "StagedCall", stage: int) -> Iterator[Trial]:
        """Operations give fake tensors, draw no random numbers that count, compile nothing, and are watched."""
        # Fake operations draw nothing, but a module may seed the generator itself, and a trial is no call of it.
        state = torch.default_generator.get_state()
        # torch logs each operation without a fake kernel. That is no fault of the program: the owner announces then.
        was_disabled, _LOG.disabled = _LOG.disabled, True
        try:
            # An activation checkpoint around must not count what is saved here. And inside of `parametrize.cached` the
            # real call would find fake weights, and this one real ones.
            with (
                saved_tensors_hooks(_same, _same),
                parametrizations_uncached(),
                self._mode,
                Trial(self, call, stage) as self._trial,
            ):
                yield self._trial
        finally:
            _LOG.disabled = was_disabled
            torch.default_generator.set_state(state)

    @contextmanager
    def inside(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Modules have fake parameters and buffers meanwhile; what they write to themselves is taken back."""
        # All attributes, not tensors alone: a forward may count its calls or fill a cache, and the trial is no call.
        # A shallow copy puts back what was rebound; what a module does inside of an object that it keeps stays.
        put_back = kept_attributes(modules)
        made: dict[torch.Tensor, torch.Tensor] = {}
        try:
            for each in modules:
                for kind in ("_parameters", "_buffers"):
                    held = getattr(each, kind)
                    fresh = {key: None if old is None else self._leaf_for(old, made) for key, old in held.items()}
                    vars(each)[kind] = type(held)(fresh)
            yield
        finally:
            put_back()

    def _leaf_for(self, tensor: torch.Tensor, made: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):  # of a module that was lent: it came as an argument
            return tensor
        # A parameter that several modules share is one fake as well: a write to it shows in all of them.
        if tensor not in made:
            made[tensor] = self.leaf(Spec.of(tensor))
        return made[tensor]

    def meet_another(self) -> None:
        """The call that is tried knows a module by itself, not by arguments."""
        self._trial.call.keep_apart()

    def hollow(self, spec: Spec) -> torch.Tensor:
        """A fake tensor outside of trials."""
        with self._mode:
            return self.plain(spec)

    def leaf(self, spec: Spec) -> torch.Tensor:
        """A fake parameter or buffer."""
        made = self.plain(spec).requires_grad_(spec.requires_grad)
        self._trial.kept.add(storage_of(made))
        return made

    def input(self, spec: Spec) -> torch.Tensor:
        """A fake value, which may be written to in place where the real one may."""
        if spec.is_leaf:
            return self.plain(spec).requires_grad_(spec.requires_grad)
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        with torch.enable_grad():
            made: torch.Tensor = _Computed.apply(anchor, [self.plain(spec)])  # type: ignore[no-untyped-call]
        return made

    def plain(self, spec: Spec) -> torch.Tensor:
        """A fake tensor without a graph."""
        return spec.flagged(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self.device))


_ARITHMETIC = frozenset(
    f"{side}{name}" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "pow")
) | {"div", "rsub", "clamp", "where", "masked_fill", "lt", "le", "gt", "ge", "eq", "ne"}


class StagedOperation:
    """A torch function between placed modules."""

    is_user_code = False

    def __init__(self, function: Callable[..., Any], *, draws: bool) -> None:
        self.function = function
        self.draws = draws
        """Whether it draws random numbers from the stream of the code around it."""
        self.name = getattr(function, "__name__", str(function))
        # Of a slice or a `view` the numbers decide the shape; of arithmetic they do not. `strip`: `mul_` and
        # `__mul__` too.
        self.ignores_numbers = self.name.strip("_") in _ARITHMETIC
        """Whether Python numbers among the inputs change nothing but the elements of the outputs."""

    def key(self) -> Hashable:
        """Equal for calls that give outputs of equal shapes for inputs of equal shapes."""
        return self.function

    def keep_apart(self) -> None:
        """Share no key with other calls: an operation shares none."""

    def run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute it: the result."""
        return self.function(*args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[nn.Module]) -> Any:
        """Execute it: (result, no records of hooks)."""
        return self.run_plainly(args, kwargs), ()

    def try_on_fakes(
        self, fakes: Fakes, args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[nn.Module]
    ) -> Any:
        """Execute it on fake tensors."""
        return self.run(args, kwargs, lent)


OnModule = Callable[["PlacedModule", tuple[Any, ...], dict[str, Any]], Any]
"""Gives the output of a placed module for a call in the program."""


class PlacedModule(OfEngine):
    """A placed module: its calls in the program, and what runs on its stage."""

    place = Place.STAGE
    is_user_code = True
    """It may fill lists and dicts that it is given, and give any numbers."""
    draws = False  # from a stream of its own only
    ignores_numbers = False

    def __init__(self, name: str, module: nn.Module, stage: int, structures: dict[Hashable, int]) -> None:
        self.name = name
        self.module = module
        self.stage = stage
        self.inner = [each for each in module.modules() if each is not module]
        self._structure = structures.setdefault(_structure_of(module, name), len(structures))
        self.frozen: tuple[str, ...] = ()
        """Parameters inside without `requires_grad` at present, which decides what needs a gradient."""
        self._state: list[Any] = []
        self._key: Hashable = None
        """In that state."""
        self._is_like_others = True
        self._has_users_hooks: tuple[bool, tuple[int, ...]] = (False, ())
        """Whether a hook before its forward is the user's, and the numbers of those that were asked."""

    def put_on(self, on_call: OnModule) -> None:
        """Let `on_call` have the calls of the module."""
        self._on_call = on_call
        wrap(self.module, self)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_call(self, args, kwargs)

    def key(self) -> Hashable:
        """Equal for layers that only differ in their number and their values, in equal modes, with as many hooks."""
        # By attributes: torch counts no changes of modes and hooks. A hook has a number that no other one gets.
        state: list[Any] = [self.frozen, self.module.training]
        for each in self.inner:
            state.append(each.training)
            if hooks := forward_hooks(each):
                state.append(tuple(hooks))
        if state != self._state:
            # Their number decides which records a call gives.
            hooked = tuple((at, len(forward_hooks(each))) for at, each in _hooked(self.inner))
            modes = (self.module.training, *(each.training for each in self.inner))
            name = "" if self._is_like_others else self.name
            self._state, self._key = state, (self._structure, name, self.frozen, modes, hooked)
        return self._key

    def keep_apart(self) -> None:
        """Share no key with layers that look like it. It knows other modules by itself, and they may know others."""
        self._is_like_others, self._state = False, []

    def values_set(self) -> list[tuple[nn.Module, str]]:
        """Attributes that were set to values of a stage before the call: a hook makes a weight of others, say.

        Such a hook is called on all ranks, and what it computes is executed on the stage of its parameters.
        """
        hooks = forward_pre_hooks(self.module)
        if (numbers := tuple(hooks)) != self._has_users_hooks[1]:
            self._has_users_hooks = (not all(map(is_ours, hooks.values())), numbers)
        found: list[tuple[nn.Module, str]] = []
        for each in (self.module, *self.inner) if self._has_users_hooks[0] else (self.module,):
            if StageTensor in map(type, each._buffers.values()):
                key = next(key for key, held in each._buffers.items() if type(held) is StageTensor)
                raise ModelError(
                    f"a hook before the forward of {self.name!r} puts a value of a stage into the buffer {key!r}, "
                    "which other ranks do not have. Write to the buffer in place (copy_), or do it in the forward"
                )
            if StageTensor in map(type, vars(each).values()):
                found += [(each, key) for key, held in vars(each).items() if type(held) is StageTensor]
        return found

    def run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute it: the result. Nobody has hooks inside."""
        return self.forward(*args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[nn.Module]) -> Any:
        """Execute it: (result, records of hooks inside, and inside of modules that are lent to it)."""
        with _recording([*self.inner, *lent]) as records:
            return self.forward(*args, **kwargs), tuple(records)

    def try_on_fakes(
        self, fakes: Fakes, args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[nn.Module]
    ) -> Any:
        """Execute it on fake tensors. Writes of forward into the module itself, and those lent, are taken back."""
        with fakes.inside([self.module, *self.inner, *lent]), _recording([*self.inner, *lent]) as records:
            return self._try(args, kwargs), tuple(records)

    def run_inside(
        self, fakes: Fakes | None, args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[nn.Module]
    ) -> Any:
        """Execute it inside of another call, which was lent modules; `fakes`: try it, as that one is tried."""
        if fakes is None:
            return self.forward(*args, **kwargs)
        if self.module in lent:  # it is fake already, and other layers that get it may have the same key
            return self._try(args, kwargs)
        fakes.meet_another()
        with fakes.inside([self.module, *self.inner]):
            return self._try(args, kwargs)

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # `torch.compile(module)` compiles for real tensors. The module inside is tried in its place: shapes are the
        # same.
        eager = getattr(self.module, ORIGINAL_MODULE, None)
        with run_eagerly(self.module):
            return (self.forward if eager is None else eager)(*args, **kwargs)

    def call_noted_hooks(self, records: Sequence[Any], answer: Any, lent: Sequence[nn.Module]) -> nn.Module | None:
        """Call the hooks that were noted, in order. Returns the first module whose hook changes what the called module
        has computed with, or None. answer: what that gave; hooks may write to it."""
        modules = [*self.inner, *lent]
        given = {each.value.memory for each in _staged(answer)}
        for at, position, args, kwargs, output in records:
            versions = {each.value.memory: each.value.memory.version for each in _staged((args, kwargs, output))}
            module: nn.Module = modules[at]
            number, hook = list(forward_hooks(module).items())[position]  # torch numbers them over the whole process
            takes_keywords = number in hooks_with_keywords(module)
            changed = hook(module, args, kwargs, output) if takes_keywords else hook(module, args, output)
            written = {each for each, version in versions.items() if each.version != version}
            if changed is not None or not written <= given:
                return module
        return None


StagedCall: TypeAlias = StagedOperation | PlacedModule
"""Something that is executed on one stage."""


def _staged(nested: Any) -> list[StageTensor]:
    return [each for each in tensors_in(nested) if isinstance(each, StageTensor)]


def modes_of(modules: Sequence[nn.Module]) -> Hashable:
    """What decides the outcome of their calls, and may change from one to the next."""
    with DisableTorchFunctionSubclass():  # at rest or not
        trained = tuple(
            each.requires_grad for module in modules for each in module._parameters.values() if each is not None
        )
    hooked = tuple((at, len(forward_hooks(each))) for at, each in _hooked(modules))
    return (tuple(each.training for each in modules), trained, hooked)


def _hooked(modules: Sequence[nn.Module]) -> list[tuple[int, nn.Module]]:
    """Those that have hooks of others, by position; hooks come and go."""
    # Casts and random streams belong to the module itself and run with it.
    return [(at, each) for at, each in enumerate(modules) if not all(map(is_ours, forward_hooks(each).values()))]


@contextmanager
def _recording(modules: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Note, instead of calling them, the forward hooks that others have put on these modules.

    They would be called on the rank of the stage alone; `call_noted_hooks` calls them on all ranks.
    """
    records: list[Any] = []
    places: list[tuple[dict[str, Any], str, Any]] = []
    for at, each in _hooked(modules):
        recorders = [
            (number, hook if is_ours(hook) else _recorder(records, at, position, hook))
            for position, (number, hook) in enumerate(forward_hooks(each).items())
        ]
        places.append((vars(each), FORWARD_HOOKS, OrderedDict(recorders)))
    with items_set(places):
        yield records


def _recorder(records: list[Any], at: int, position: int, hook: object) -> Callable[..., None]:
    def note(_: nn.Module, args: Any, *more: Any) -> None:
        *kwargs, output = more
        records.append((at, position, args, kwargs[0] if kwargs else None, output))

    note.__module__ = package_of(hook)  # a proof, which hooks do not see, leaves out the hook and this
    return note


def _structure_of(module: nn.Module, name: str) -> Hashable:
    """Everything that decides shapes: classes, shapes of parameters and buffers, plain attributes.

    A layer's own number in its list (which many layers of users keep) is not what makes it different.
    """
    # A layer that keeps its number ("layer_idx") would else be unlike every other layer, and each of 80 layers would
    # be tried for itself. In torch's own modules an attribute of that value is a size (in_features=3), never a
    # number.
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    own_number = numbers[-1] if numbers else None
    described = []
    for inner_name, each in module.named_modules():
        tensors = [
            (key, None if held is None else (held.shape, held.dtype, held.requires_grad))
            for key, held in [*each._parameters.items(), *each._buffers.items()]
        ]
        is_torchs = type(each).__module__.startswith("torch.nn.")
        attributes = [
            (key, "own number" if type(held) is int and held == own_number and not is_torchs else _attribute(held))
            for key, held in sorted(vars(each).items())
            if not key.startswith("_") and key not in ("training", "forward")
        ]
        attributes.append(("forward", structures_of(each) or _attribute(vars(each).get("forward"))))
        described.append((inner_name, type(each), tuple(tensors), tuple(attributes)))
    return tuple(described)


def _attribute(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return (type(value), tuple(_attribute(each) for each in value))
    if isinstance(value, dict):
        return (type(value), tuple((str(key), _attribute(each)) for key, each in value.items()))
    if isinstance(value, float):
        return (float, comparable(value))
    # An object that we cannot look into is alike with itself only: too many trials rather than a wrong shape.
    return token_of(value) if is_plain(value) else id(value)
