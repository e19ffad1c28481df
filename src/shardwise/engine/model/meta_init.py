"""First values of a model that was built on the meta device: the same under every layout, a few modules at a time.

A model's modules initialise themselves. Building `Model(Block(Linear))`, whose Model has `_init_weights(module)`, calls

    1 linear.reset_parameters()          a module, when it has been built: children first
    2 block.reset_parameters()
    3 model.reset_parameters()
    4 model._init_weights(linear)        then the model, which applies its own initialiser to all in it: children first
    5 model._init_weights(block)
    6 model._init_weights(model)

A module inside that has such an initialiser too comes in the place of 3 to 6, and keeps what it has initialised. The
calls are made on a twin of the model: copies of its modules, with other tensors.

    [1] trace    every call is made once while the twin is on the meta device: which tensors does it write?
    [2] values   the tensors of one module get memory; the calls that write to these are made again; the values are
                 handed out, and the memory is given back

Every operation that draws starts from a seed made of the seed, the module's name, the method, and the number of the
draw in the call. So a tensor's values do not depend on the other tensors with memory, or on the calls that are made:

    linear.weight wanted    calls 1 and 4 of a linear whose 4 is weight.normal_(); bias.zero_()
    weight has memory       "7 linear _init_weights of its model 0"  seeds normal_; bias stays without memory, and
                            zero_ of it does nothing; call 1 is left out, because 4 overwrites what it writes

A call that goes by values, or computes those of one tensor from another's, is refused: it needs more than one module.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shardwise.engine.forward.aside import attributes_set, kept_attributes
from shardwise.engine.forward.inventory import place_of, with_values
from shardwise.engine.torch_private import (
    TRUNCATED_NORMAL,
    DisableTorchFunction,
    TorchDispatchMode,
    schema_of,
    storage_of,
    tensor_leaves,
    tree_map_only,
    written_by,
)
from shardwise.errors import ModelError, in_words

_OWN = ("reset_parameters", "_reset_parameters", "_init_weights")
"""Names of the method, without arguments, that initialises its module; the first one that fits is called."""

_OF_ALL_WITHIN = "_init_weights"
"""Name of the method that initialises any module inside its own, which is its argument."""

_OVERWRITING = frozenset(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_".split()  # noqa: SIM905
)
"""Operations that give every element of what they write a value that does not depend on the one before."""

_LIKE_CPU: Mapping[Any, object] = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: torch.device("cpu"),
}
"""What tensors of the twin answer: many initialisers, torch.nn.init's too, skip a tensor that is on the meta device."""

_SMALL_BYTES = 1 << 20
"""Modules are initialised together as long as they take no more memory than this."""

_SHOWN_PROBLEMS = 40


@dataclass(eq=False, slots=True)
class _TwinTensor:
    """A parameter or buffer of the model, and what the twin has in its place.

    Each place of a tie has its own tensor in the twin. Writes through the second name are lost, as if modules were
    initialised first and tied afterwards.
    """

    name: str
    """The first name by which the model reaches it."""
    module: nn.Module
    twin: nn.Module
    kind: str
    """The attribute of modules that holds it: "_parameters" or "_buffers"."""
    attribute: str
    original: torch.Tensor
    held: dict[int, "_TwinTensor"] = field(repr=False)
    """All tensors that the twin holds, by their storage."""
    empty: torch.Tensor = field(init=False)
    """Without memory: the model's may have been cut by the time when values are made."""
    installed: torch.Tensor = field(init=False)
    storage: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        strided = self.original if _is_plain(self.original) else torch.empty(self.original.shape, device="meta")
        self.empty = torch.empty_like(strided, dtype=self.original.dtype, device="meta").detach()

    @property
    def lacks_values(self) -> bool:
        """Whether the model has no values there."""
        return self.original.is_meta

    def install(self, device: str) -> None:
        """Let the twin hold a tensor there: on the meta device without memory, on the CPU with new memory."""
        # By storage, because initialisers write through views (`weight[:8]`, `weight.data`), which are other objects.
        # One that is freed must not stay known: its address may come back.
        self.held.pop(self.storage, None)
        values = torch.empty_like(self.empty, device=device)
        if _is_plain(self.original):
            values = with_values(self.original, values)
            vars(values).pop("_is_hf_initialized", None)  # transformers skips a tensor with this mark
        elif self.kind == "_parameters":
            values = nn.Parameter(values, requires_grad=False)
        self.installed, self.storage = values, storage_of(values)
        self.held[self.storage] = self
        self.put(self.twin, values)

    def put(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """Let `module`, the one of the model or of the twin, hold `tensor` there."""
        vars(module)[self.kind][self.attribute] = tensor


@dataclass(eq=False, kw_only=True, slots=True)
class _Initialiser:
    """One call, on the twin."""

    module: nn.Module
    key: str
    """The names of the module and of the method: random numbers depend on it."""
    words: str
    """For messages."""
    call: Callable[[], object]
    writes: dict[_TwinTensor, bool] = field(default_factory=dict)
    """What it changes, and whether it overwrites all of that at once, whatever was there."""


class _RunTrace(TorchDispatchMode):
    """Follows one call: seeds what it draws, and notes which tensors of the twin it writes."""

    def __init__(self, key: str, seed: int, held: Mapping[int, _TwinTensor]) -> None:
        """key: of the call. held: the tensors of the twin, by their storage."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: dict[_TwinTensor, bool] = {}
        self._sources: dict[int, tuple[torch.Tensor, set[_TwinTensor]]] = {}
        """Tensors without values that were computed, by storage, kept alive; and from which of the twin's."""
        self._key, self._seed, self._held = key, seed, held
        self._num_draws = 0
        self._is_in_draw = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """The body is followed. Its new tensors come to the CPU, and torch's generator is put back after it."""
        before = torch.default_generator.get_state()
        # Where they come to the CPU anyway: torch.device refuses `out=` tensors of another device.
        on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        try:
            with on_cpu, torch.no_grad(), _truncated_at_once(self), _LikeCpu(), self:
                self._seed_for("start")
                yield
        finally:
            torch.default_generator.set_state(before)

    def begin_draw(self, *arguments: object) -> None:
        """Seed the next draw of the call."""
        # Inside `one_draw` the first seed holds for all: `trunc_normal_` draws until it is content, and how often
        # depends on values.
        if self._is_in_draw:
            return
        if any(isinstance(each, torch.Generator) for each in arguments):
            # It stays where it is on a tensor without memory: the next tensor would depend on it.
            raise RuntimeError("it draws from its own generator")
        self._seed_for(self._num_draws)
        self._num_draws += 1

    @contextmanager
    def one_draw(self) -> Iterator[None]:
        """What is drawn in the body counts as one draw, however much it is."""
        self.begin_draw()
        with attributes_set(self, {"_is_in_draw": True}):
            yield

    def _seed_for(self, draw: int | str) -> None:
        # A seed per draw, not one per call: a draw for a tensor without memory takes nothing from the generator, and
        # the numbers of the next tensor would depend on it.
        key = f"{self._seed} {self._key} {draw}"
        torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(key.encode()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():  # tensors answer what they are, not what they look like
            return self._follow(func, args, kwargs or {})

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.begin_draw(*args, *kwargs.values())
        tensors = tensor_leaves((args, kwargs))
        written = tensor_leaves(written_by(func, args, kwargs))
        read = [each for each in tensors if not any(each is other for other in written)]
        sources = set() if name.startswith("new_") or name.endswith("_like") else self._read_from(read)
        overwrites = name in _OVERWRITING or "out" in schema_of(func).overload_name
        for tensor in written:
            if (target := self._held.get(storage_of(tensor))) is not None:
                if others := [each.name for each in sources if each is not target]:
                    raise RuntimeError(f"it computes {target.name!r} from {others[0]!r}")
                is_renewed = overwrites and not sources and tensor.numel() == target.empty.numel()
                self.writes[target] = self.writes.get(target, False) or is_renewed
        if name in _OVERWRITING and written[0].is_meta:
            return written[0]  # meta kernels of torch take much longer than to know this
        if len({tensor.is_meta for tensor in tensors}) == 2:
            # Some kernels of torch take both, and leave the values that were there before.
            if not all(each.is_meta for each in written):
                raise RuntimeError(f"{func} would compute values from tensors without values")
            args, kwargs = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        output = func(*args, **kwargs)
        for each in tensor_leaves(output) if sources else ():
            if each.is_meta and storage_of(each) not in self._held:
                self._sources[storage_of(each)] = each, sources | self._read_from([each])
        return output

    def take_over(self, target: _TwinTensor) -> None:
        """Take the values of the tensor by which the call has replaced this one, if it has."""
        found: torch.Tensor | None = vars(target.twin)[target.kind].get(target.attribute)
        if found is None or found is target.installed:
            return
        if sources := self._read_from([found]):
            raise RuntimeError(
                f"it puts {next(iter(sources)).name!r}, or what it computes of it, in the place of {target.name!r}"
            )
        if found.is_meta or found.shape != target.empty.shape or found.dtype != target.empty.dtype:
            raise RuntimeError(f"it puts a tensor without values, or of another kind, in the place of {target.name!r}")
        if not target.installed.is_meta:
            target.installed.detach().copy_(found.detach())
        self.writes[target] = True

    def _read_from(self, tensors: Iterable[torch.Tensor]) -> set[_TwinTensor]:
        """The tensors of the twin whose values these are, or are computed from."""
        found: set[_TwinTensor] = set()
        for storage in map(storage_of, tensors):
            found |= {self._held[storage]} if storage in self._held else self._sources.get(storage, (None, set()))[1]
        return found


class _LikeCpu(TorchFunctionMode):
    """Tensors without values look as if they were on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _LIKE_CPU[func] if func in _LIKE_CPU and args[0].is_meta else func(*args, **(kwargs or {}))


def _truncated_at_once(trace: _RunTrace) -> AbstractContextManager[None]:
    """`trunc_normal_` is one draw: torch's goes by values, and draws again until all are within the bounds."""
    # `nn.init.trunc_normal_` looks this name up when it is called, so the replacement reaches it however it was
    # imported.
    original: Callable[..., torch.Tensor] = getattr(nn.init, TRUNCATED_NORMAL)

    def truncated(tensor: torch.Tensor, *args: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        with DisableTorchFunction():
            is_meta = tensor.is_meta
        if is_meta:
            return tensor.normal_(generator=generator)  # one draw as well, which overwrites all
        with trace.one_draw() if generator is None else nullcontext():
            return original(tensor, *args, generator=generator)

    return attributes_set(nn.init, {TRUNCATED_NORMAL: truncated})


class Initialisation:
    """The initial values of a model that was built, in part or as a whole, on the meta device.

    A module is initialised by its own `reset_parameters()` (`_reset_parameters()`, `_init_weights()`), and then by
    `_init_weights(module)` of the nearest module around it that has one, as transformers' models do. Values depend on
    `seed`, on the name of the module in the model and on nothing else. They are what these methods give: what
    `__init__` of a module around it does to its children in passing is not known. Of tied parameters the first place
    decides. Methods run on the CPU, in the dtype of the tensor. What they draw from numpy or `random` is not keyed.

    The model itself is not changed, except by `put`. Raises ModelError, with the name of every parameter and buffer
    that no method initialises.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._held: dict[int, _TwinTensor] = {}
        twins, self._targets = _twin_of(model, self._held)
        self._of_first = _ties(self._targets)
        self._firsts = {each.name: first for first, ties in self._of_first.items() for each in ties}
        self._inside: dict[nn.Module, list[_TwinTensor]] = {}
        for target in self._targets:
            self._inside.setdefault(target.twin, []).append(target)
            target.install("meta")
        # Traced here, while the model is whole: by the time of `values` it may have been cut.
        names = {twins[module]: name for name, module in model.named_modules()}
        self._initialisers = [each for each in _initialisers(twins[model], names) if self._writes_any(each)]
        self._writers: dict[_TwinTensor, list[int]] = {}
        for number, each in enumerate(self._initialisers):
            for target in each.writes:
                self._writers.setdefault(target, []).append(number)
        self._refuse_gaps()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and buffers without values, in the order of the modules; ties under their first name."""
        return tuple(first.name for first in self._of_first if first.lacks_values)

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and values of `wanted`, on the CPU, module by module.

        In addition to the caller's tensors, memory holds the wanted tensors of one module, or of several small ones. A
        tie comes once, under its first name. Raises ModelError for a name that is not in `names`, and when an
        initialiser does other things on real tensors than on tensors without values.
        """
        if unknown := set(wanted).difference(name for name, first in self._firsts.items() if first.lacks_values):
            raise ModelError(f"{min(unknown)!r} is no parameter or buffer without values: nothing to initialise there")
        firsts = {self._firsts[name] for name in wanted}
        pending: list[_TwinTensor] = []
        num_bytes = 0
        for targets in self._inside.values():
            more = [each for each in targets if each in firsts]
            # Small modules together: a model has very many norms and biases, and a call that writes to several of them
            # is made once for all.
            size = sum(each.empty.numel() * each.empty.element_size() for each in more)
            if num_bytes + size > _SMALL_BYTES:
                yield from self._made(pending)
                pending, num_bytes = [], 0
            pending += more
            num_bytes += size
        yield from self._made(pending)

    def put(self, name: str, values: torch.Tensor) -> None:
        """Let the model hold `values` as the parameter or buffer `name`, on whatever device they are, ties included.

        Parameters become new objects of their class, with their attributes and `requires_grad`.
        """
        # One object per object that there was: a tie stays one parameter, and two that share a storage stay two.
        objects: dict[int, torch.Tensor] = {}
        for each in self._of_first[self._firsts[name]]:
            each.put(each.module, objects.setdefault(id(each.original), with_values(each.original, values)))

    def forget(self) -> None:
        """Take the values away (to the meta device) that the initialisers would overwrite as a whole.

        For a model that was built on the meta device as a whole: `torch.FloatTensor(2, 3)` and the like still give a
        tensor on the CPU.
        """
        for first in self._of_first:
            if not first.lacks_values and _is_plain(first.original) and self._is_overwritten(first):
                self.put(first.name, torch.empty_like(first.original, device="meta"))

    def _writes_any(self, initialiser: _Initialiser) -> bool:
        """Trace a call, without values."""
        try:
            initialiser.writes = self._run(initialiser)
        except Exception as error:  # whatever a method raises that misses values
            inside = [each for module in initialiser.module.modules() for each in self._inside.get(module, ())]
            if any(target.lacks_values for target in inside):
                raise ModelError(
                    f"{initialiser.words} raised {in_words(error)}; fix it, or build the module outside "
                    "torch.device('meta')"
                ) from error
        return bool(initialiser.writes)

    def _run(self, initialiser: _Initialiser) -> dict[_TwinTensor, bool]:
        """Make a call, and give what it writes."""
        trace = _RunTrace(initialiser.key, self._seed, self._held)
        modules = list(initialiser.module.modules())
        children = [dict(module._modules) for module in modules]
        put_back = kept_attributes(modules, contents=True)
        try:
            with trace.following():
                initialiser.call()
            for module, before in zip(modules, children, strict=True):
                if replaced := [name for name, child in before.items() if module._modules.get(name) is not child]:
                    raise RuntimeError(f"it puts another module in the place of {replaced[0]!r}")
            for target in (target for module in modules for target in self._inside.get(module, ())):
                trace.take_over(target)
        finally:  # a method may have noted that it need not run again, or have made new parameters
            put_back()
        return trace.writes

    def _made(self, wanted: Sequence[_TwinTensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and values of these tensors."""
        # In the order in which the model initialises itself: later calls overwrite or scale what earlier ones wrote.
        numbers = sorted({number for target in wanted for number in self._writers.get(target, ())})
        # A call is left out if later ones overwrite all that it writes.
        last = {target: at for target in wanted for at in numbers if self._initialisers[at].writes.get(target)}
        for target in wanted:
            target.install("cpu")
        try:
            for at in numbers:
                each = self._initialisers[at]
                needed = [target for target in wanted if target in each.writes and at >= last.get(target, 0)]
                if not needed:
                    continue
                try:
                    found = self._run(each)
                except Exception as error:
                    raise ModelError(f"{each.words} raised {in_words(error)}") from error
                # Traced without values, called with values: a method that goes by how often it was called would leave
                # memory as it was found.
                if missing := [target.name for target in needed if target not in found]:
                    raise ModelError(
                        f"{each.words} gives {missing[0]!r} no values at its second call. Let it do the same at each "
                        "call, or build the module outside torch.device('meta')"
                    )
            made = [(each.name, each.installed.detach()) for each in wanted]
        finally:
            for target in wanted:
                target.install("meta")
        while made:
            yield made.pop(0)

    def _refuse_gaps(self) -> None:
        """Raise for all that no call overwrites as a whole."""
        problems = []
        for each in self._of_first:
            if not each.lacks_values or self._is_overwritten(each):
                continue
            what = "parameter" if each.kind == "_parameters" else "buffer"
            done = "more than parts of it" if each in self._writers else "it"
            problems.append(f"{what} {each.name!r} (of a {type(each.module).__name__}): nobody initialises {done}")
        if not problems:
            return
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise ModelError(
            "the model was built without values (on the meta device). Neither reset_parameters() of their modules "
            "nor _init_weights(module) of a module around them initialises:\n"
            + "\n".join(f"  - {each}" for each in shown)
            + "\nGive the module such a method, build it outside torch.device('meta'), or load all values "
            "(load_state_dict(..., assign=True))"
        )

    def _is_overwritten(self, target: _TwinTensor) -> bool:
        """Whether one call overwrites all of it."""
        numbers = self._writers.get(target, ())
        return not target.empty.numel() or any(self._initialisers[number].writes[target] for number in numbers)


def forget_initialised(model: nn.Module) -> None:
    """Let a model that was built on the meta device have no values that its initialisers give it: see `forget`."""
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        Initialisation(model, 0).forget()


def _twin_of(model: nn.Module, held: dict[int, _TwinTensor]) -> tuple[dict[nn.Module, nn.Module], list[_TwinTensor]]:
    """Copies of all modules, with the same attributes, by the module; and what they hold."""
    names = {module: name for name, module in model.named_modules()}
    # Not `deepcopy`: it would copy the values that there are, and anything else that a module holds.
    twins = {module: object.__new__(type(module)) for module in names}

    def translated(value: Any) -> Any:
        return twins.get(value, value) if isinstance(value, nn.Module) else value

    targets: list[_TwinTensor] = []
    problems: list[str] = []
    for module, twin in twins.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{names[module] or 'the model'!r} is a script (torch.jit): give the module it was made from"
            )
        for attribute, value in vars(module).items():
            # Exact types: a subclass may be more than its elements, and stays the model's own object.
            if type(value) in (list, tuple, set):
                value = type(value)(map(translated, value))
            elif type(value) is dict:
                value = {key: translated(each) for key, each in value.items()}
            vars(twin)[attribute] = translated(value)
        prefix = f"{names[module]}." if names[module] else ""
        for kind in ("_parameters", "_buffers"):
            for attribute, tensor in vars(module)[kind].items():
                if tensor is None:
                    continue
                if problem := _why_not(tensor):
                    problems.append(f"{prefix + attribute!r} {problem}")
                    continue
                targets.append(_TwinTensor(prefix + attribute, module, twin, kind, attribute, tensor, held))
        problems += [
            f"{prefix + name!r} is a tensor without values (on the meta device) in a plain attribute, and no method "
            "initialises it. Make it a buffer, or build its module outside torch.device('meta')"
            for name, each in vars(module).items()
            if isinstance(each, torch.Tensor) and each.is_meta
        ]
    if problems:
        raise ModelError("\n".join(problems))
    return twins, targets


def _why_not(tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor that needs values, if anything is."""
    if is_lazy(tensor):
        return "has no shape before the first forward; build its module with all its sizes given"
    if tensor.is_meta and not _is_plain(tensor):
        return (
            f"is a {type(tensor).__name__} of layout {tensor.layout} without values (on the meta device), and only "
            "plain dense tensors are initialised; build its module outside torch.device('meta')"
        )
    return None


def _ties(targets: Iterable[_TwinTensor]) -> dict[_TwinTensor, list[_TwinTensor]]:
    """All places of each tensor by the first one, also separate objects that share its storage."""
    found: dict[tuple[object, ...], list[_TwinTensor]] = {}
    key_of: dict[object, tuple[object, ...]] = {}
    for target in targets:
        # With values the object alone counts: nothing is initialised there.
        key = place_of(target.original) if target.lacks_values else (id(target.original),)
        if (other := key_of.setdefault(key[0], key)) != key:
            raise ModelError(
                f"{found[other][0].name!r} and {target.name!r} have no values yet, and share a part of one storage. "
                "Make one of them a separate tensor, or build their modules outside torch.device('meta')"
            )
        found.setdefault(key, []).append(target)
    return {ties[0]: ties for ties in found.values()}


def _initialisers(root: nn.Module, names: Mapping[nn.Module, str]) -> Iterator[_Initialiser]:
    """The calls for a module and all inside it, in order."""
    done: set[nn.Module] = set()
    for module in _children_first(root, set()):
        # By the number of arguments: `_init_weights()` is a module's own, `_init_weights(module)` is for all within.
        for name in _OWN:
            if (own := _method(module, name, num_arguments=0)) is not None:
                words = f"{name}() of {names[module] or 'the model'!r}"
                yield _Initialiser(module=module, key=f"{names[module]} {name}", words=words, call=own)
                break
        if (of_all := _method(module, _OF_ALL_WITHIN, num_arguments=1)) is not None:
            # One `done` for the whole model: what a module inside has initialised, the one around it leaves alone.
            for each in _children_first(module, done):
                words = f"{_OF_ALL_WITHIN}(module) of a {type(module).__name__} for {names[each] or 'the model'!r}"
                key = f"{names[each]} {_OF_ALL_WITHIN} of its model"
                yield _Initialiser(module=each, key=key, words=words, call=partial(of_all, each))


def _children_first(module: nn.Module, done: set[nn.Module]) -> Iterator[nn.Module]:
    if module in done:
        return
    done.add(module)
    for child in module.children():
        yield from _children_first(child, done)
    yield module


def _method(module: nn.Module, name: str, *, num_arguments: int) -> Callable[..., object] | None:
    """The method of this name, if it must be given that many arguments."""
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # of a compiled function
        return None
    needed = [
        each.kind
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return method if len(needed) == num_arguments and inspect.Parameter.KEYWORD_ONLY not in needed else None


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Not so are sparse tensors, and tensors of quantising classes; those have values."""
    return tensor.layout == torch.strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
