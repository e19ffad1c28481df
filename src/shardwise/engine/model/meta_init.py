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

    [1] trace    every call is made once while the twin is on the meta device: which tensors does it write, and read?
    [2] values   the tensors of one module get memory, and those from which their values come; the calls that write to
                 these are made again; the values are handed out, and the memory is given back

Every operation that draws starts from a seed made of the seed, the module's name, the method, and the number of the
draw in the call. So a tensor's values do not depend on the other tensors with memory, or on the calls that are made:

    linear.weight wanted    calls 1 and 4 of a linear whose 4 is weight.normal_(); bias.zero_()
    weight has memory       "7 linear _init_weights of its model 0"  seeds normal_; bias stays without memory, and
                            zero_ of it does nothing; call 1 is left out, because 4 overwrites what it writes
"""

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shardwise.engine.forward.aside import attributes_set, kept_attributes
from shardwise.engine.forward.inventory import with_values
from shardwise.engine.torch_private import (
    TRUNCATED_NORMAL,
    DisableTorchFunction,
    TorchDispatchMode,
    schema_of,
    storage_id,
    tree_leaves,
    tree_map_only,
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

_UNSET = 0x5A
"""Every byte of memory that a call gets while it is traced: one that differs afterwards was written."""

_SMALL_BYTES = 1 << 20
"""Modules are initialised together as long as they take no more memory than this."""

_SHOWN_PROBLEMS = 40

_Region = tuple[torch.Size, tuple[int, ...], int]
"""Sizes, strides and offset of a view, in elements."""


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
    also: tuple[str, ...]
    """Plain attributes of the module that hold the same object."""
    original: torch.Tensor
    held: dict[int, "_TwinTensor"] = field(repr=False)
    """All tensors that the twin holds, by their storage."""
    empty: torch.Tensor = field(init=False)
    """Without memory: the model's may have been cut by the time when values are made."""
    kept: torch.Tensor | None = field(init=False, default=None)
    """The values that the model had, where initialisers compute others from them."""
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
        if device == "cpu" and self.kept is not None:
            values.copy_(self.kept)
        if _is_plain(self.original):
            values = with_values(self.original, values)
            vars(values).pop("_is_hf_initialized", None)  # transformers skips a tensor with this mark
        elif self.kind == "_parameters":
            values = nn.Parameter(values, requires_grad=False)
        self.installed, self.storage = values, _storage(values)
        self.held[self.storage] = self
        self.put(self.twin, values)

    def release(self) -> None:
        """Give the memory back, and let the twin hold no tensor of an initialiser."""
        held = vars(self.twin)[self.kind].get(self.attribute)
        if held is not self.installed or not held.is_meta or _storage(held) != self.storage:
            self.install("meta")

    def put(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """Let `module`, the one of the model or of the twin, hold `tensor` there."""
        vars(module)[self.kind][self.attribute] = tensor
        vars(module).update(dict.fromkeys(self.also, tensor))

    def current(self) -> torch.Tensor:
        """What the twin holds there: an initialiser may have put another object in place of the one installed."""
        held = self.twin._parameters.get(self.attribute, self.twin._buffers.get(self.attribute))
        if held is None or held.shape != self.empty.shape:
            shape = None if held is None else list(held.shape)
            raise ModelError(f"{self.name!r} is {list(self.empty.shape)} in the model, and {shape} once initialised")
        return held


@dataclass(eq=False, kw_only=True, slots=True)
class _Initialiser:
    """One call, on the twin."""

    module: nn.Module
    key: str
    """The names of the module and of the method: random numbers depend on it."""
    words: str
    """For messages."""
    call: Callable[[], object]
    needs_all: bool = False
    """Whether all tensors inside the module must have memory for it."""
    reads: set[_TwinTensor] = field(default_factory=set)
    writes: dict[_TwinTensor, list[_Region]] = field(default_factory=dict)
    """What it changes, and which parts of that it overwrites."""

    def renews(self, target: _TwinTensor) -> bool:
        """Whether it overwrites all of it at once."""
        return any(shape.numel() == target.empty.numel() for shape, _, _ in self.writes.get(target, ()))


class _RunTrace(TorchDispatchMode):
    """Follows one call: seeds what it draws, and notes which tensors of the twin it reads and writes."""

    def __init__(
        self, initialiser: _Initialiser, seed: int, held: Mapping[int, _TwinTensor], foreign: Collection[int]
    ) -> None:
        """held: the tensors of the twin, by their storage. foreign: storages that the call must not reach."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: set[_TwinTensor] = set()
        self.writes: dict[_TwinTensor, list[_Region]] = {}
        self._initialiser, self._seed, self._held, self._foreign = initialiser, seed, held, foreign
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
            # A generator of its own stays where it is on a tensor without memory: the next tensor would depend on it.
            if not self._initialiser.needs_all:
                raise RuntimeError("it draws from its own generator")
            return
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
        key = f"{self._seed} {self._initialiser.key} {draw}"
        torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(key.encode()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():  # tensors answer what they are, not what they look like
            return self._follow(func, args, kwargs or {})

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.begin_draw(*args, *kwargs.values())
        tensors = _tensors((args, kwargs))
        written = _tensors([args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func)])
        overwrites = func.overloadpacket.__name__ in _OVERWRITING or "out" in schema_of(func).overload_name
        for tensor in tensors:
            storage, is_written = _storage(tensor), any(tensor is each for each in written)
            # A closure may hold the model's own tensors. Written to, the model would change before all ranks have
            # agreed.
            if storage in self._foreign and (tensor.is_meta or is_written):
                raise RuntimeError("it reaches tensors of the model by another way than through its modules")
            if (target := self._held.get(storage)) is None:
                continue
            if not is_written:
                self.reads.add(target)
            elif overwrites:
                self.writes.setdefault(target, []).append(_region(tensor))
            else:
                self.writes.setdefault(target, [])
        if func.overloadpacket.__name__ in _OVERWRITING and written[0].is_meta:
            return written[0]  # meta kernels of torch take much longer than to know this
        if len({tensor.is_meta for tensor in tensors}) == 2:
            # Some kernels of torch take both, and leave the values that were there before.
            if not all(each.is_meta for each in written):
                raise RuntimeError(f"{func} would compute values from tensors without values")
            args, kwargs = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        return func(*args, **kwargs)


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
        self._foreign = {_storage(each.original) for each in self._targets if _is_plain(each.original)}
        # Traced here, while the model is whole: by the time of `values` it may have been cut.
        names = {twins[module]: name for name, module in model.named_modules()}
        self._initialisers = [each for each in _initialisers(twins[model], names) if self._writes_any(each)]
        self._foreign.clear()  # cut parameters free their storages, and others get the addresses
        self._writers: dict[_TwinTensor, list[int]] = {}
        for number, each in enumerate(self._initialisers):
            for target in each.writes:
                self._writers.setdefault(target, []).append(number)
        self._refuse_gaps()
        for target in self._with_what_they_need(each for each in self._of_first if each.lacks_values):
            if not target.lacks_values:
                target.kept = target.original.detach()  # as it is now: the model may be cut before it is used

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and buffers without values, in the order of the modules; ties under their first name."""
        return tuple(first.name for first in self._of_first if first.lacks_values)

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and values of `wanted`, on the CPU, module by module.

        In addition to the caller's tensors, memory holds the wanted tensors of one module and those that their values
        are computed from. A tie comes once, under its first name. Raises ModelError for a name that is not in `names`,
        and when an initialiser does other things on real tensors than on tensors without values.
        """
        if unknown := set(wanted).difference(name for name, first in self._firsts.items() if first.lacks_values):
            raise ModelError(f"{min(unknown)!r} is no parameter or buffer without values: nothing to initialise there")
        firsts = {self._firsts[name] for name in wanted}
        by_module: dict[nn.Module, list[_TwinTensor]] = {}
        for target in self._targets:
            if target in firsts:
                by_module.setdefault(target.twin, []).append(target)
        # Small modules together: a model has very many norms and biases, and a call that writes to several of them is
        # made once for all.
        pending = deque((targets, self._with_what_they_need(targets)) for targets in by_module.values())
        while pending:
            targets, real = pending.popleft()
            limit_bytes = max(_SMALL_BYTES, _num_bytes(real))
            while pending and _num_bytes(real | pending[0][1]) <= limit_bytes:
                more = pending.popleft()
                targets, real = targets + more[0], real | more[1]
            made = self._made(targets, real)
            while made:
                yield made.pop(0)

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
        """Trace a call, without values where it can do without, else with memory for all inside its module."""
        # A method may write to any tensor inside its module: only the call shows which.
        inside = [target for module in initialiser.module.modules() for target in self._inside.get(module, ())]
        try:
            self._note(initialiser, inside)
        except Exception:  # whatever a method raises that misses values
            initialiser.needs_all = True
            for target in inside:
                target.install("cpu")
                # numpy writes past every mode of torch. Comparing bytes afterwards is all that is left.
                _bytes(target.installed).fill_(_UNSET)
            try:
                self._note(initialiser, inside)
            except Exception as error:
                if any(target.lacks_values for target in inside):
                    raise ModelError(
                        f"{initialiser.words} raised {in_words(error)}; fix it, or build the module outside "
                        "torch.device('meta')"
                    ) from error
        finally:
            for target in inside:
                target.release()
        return bool(initialiser.writes)

    def _note(self, initialiser: _Initialiser, inside: Iterable[_TwinTensor]) -> None:
        """Note what a call reads and writes."""
        trace = self._run(initialiser, inside)
        initialiser.reads, initialiser.writes = trace.reads, trace.writes
        if initialiser.needs_all:  # what numpy reads and writes, nobody sees
            initialiser.reads = set(inside)
            for target in initialiser.reads - trace.writes.keys():
                if bool(_bytes(target.current()).ne(_UNSET).any()):
                    trace.writes[target] = [_region(target.installed)]

    def _run(self, initialiser: _Initialiser, targets: Iterable[_TwinTensor]) -> _RunTrace:
        """Make a call, and follow it. `targets`: where the twin may hold another tensor afterwards."""
        trace = _RunTrace(initialiser, self._seed, self._held, self._foreign)
        put_back = kept_attributes([initialiser.module])
        try:
            with trace.following():
                initialiser.call()
        finally:  # a method may have noted that it need not run again
            put_back()
        for target in targets:
            storage = _storage(target.current())
            # The call put another tensor in the place: a write of all of it, and a read where that tensor is the
            # twin's (`self.b = self.a`).
            if storage != target.storage:
                trace.writes[target] = [_region(target.installed)]
                trace.reads |= {self._held[storage]} if storage in self._held else set()
        return trace

    def _with_what_they_need(self, targets: Iterable[_TwinTensor]) -> set[_TwinTensor]:
        """These targets and all that must have values where the initialisers of these, and of those, are called."""
        found: set[_TwinTensor] = set()
        pending = list(targets)
        while pending:
            if (target := pending.pop()) not in found:
                found.add(target)
                # To the end: where b = f(a), a is needed too, and what a is scaled from.
                pending += [each for at in self._writers.get(target, ()) for each in self._initialisers[at].reads]
        return found

    def _made(self, wanted: Iterable[_TwinTensor], real: set[_TwinTensor]) -> list[tuple[str, torch.Tensor]]:
        """The names and values of `wanted`. real: they and all that they need."""
        # In the order in which the model initialises itself: later calls overwrite or scale what earlier ones wrote.
        numbers = sorted({number for target in real for number in self._writers.get(target, ())})
        calls = [(each, real & each.writes.keys()) for each in map(self._initialisers.__getitem__, numbers)]
        # A call is left out if later ones overwrite all that it writes, and none reads it.
        read = set[_TwinTensor]().union(*(each.reads for each, _ in calls))
        renewed = {target: at for at, (each, written) in enumerate(calls) for target in written if each.renews(target)}
        try:
            for target in real:
                target.install("cpu")
            for at, (each, written) in enumerate(calls):
                if all(target not in read and at < renewed.get(target, 0) for target in written):
                    continue
                try:
                    found = self._run(each, written)
                except Exception as error:
                    raise ModelError(f"{each.words} raised {in_words(error)}") from error
                for target in written:
                    # Traced without values, called with values: a method that goes by how often it was called would
                    # leave memory as it was found.
                    if not (each.needs_all or target in found.writes):
                        raise ModelError(
                            f"{each.words} gives {target.name!r} no values at its second call. Let it do the same at "
                            "each call, or build the module outside torch.device('meta')"
                        )
                    if not target.lacks_values:  # it keeps those it has, also for the calls that follow
                        target.install("cpu")
            return [(each.name, each.current().detach().to(each.empty.dtype)) for each in wanted]
        finally:
            for target in real.union(*(each.writes for each, _ in calls)):
                target.release()

    def _refuse_gaps(self) -> None:
        """Raise for all that is not overwritten as a whole, by one call or by several."""
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
        """Whether all of it is, by one call or by several."""
        regions = [
            each for number in self._writers.get(target, ()) for each in self._initialisers[number].writes[target]
        ]
        # One write of all elements is the common case, and needs no mask of the tensor's size.
        if not regions or any(shape.numel() == target.empty.numel() for shape, _, _ in regions):
            return bool(regions) or not target.empty.numel()
        is_done = torch.zeros_like(target.empty, dtype=torch.bool, device="cpu")
        for region in regions:
            is_done.as_strided(*region).fill_(True)
        return bool(is_done.all())


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
        plain = {name: each for name, each in vars(module).items() if isinstance(each, torch.Tensor)}
        for kind in ("_parameters", "_buffers"):
            for attribute, tensor in vars(module)[kind].items():
                if tensor is None:
                    continue
                also = tuple(name for name, each in plain.items() if each is tensor)
                plain = {name: each for name, each in plain.items() if each is not tensor}
                if problem := _why_not(tensor):
                    problems.append(f"{prefix + attribute!r} {problem}")
                    continue
                targets.append(_TwinTensor(prefix + attribute, module, twin, kind, attribute, also, tensor, held))
        problems += [
            f"{prefix + name!r} is a tensor without values (on the meta device) in a plain attribute, and no method "
            "initialises it. Make it a buffer, or build its module outside torch.device('meta')"
            for name, each in plain.items()
            if each.is_meta
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
    key_of: dict[int, tuple[object, ...]] = {}
    for target in targets:
        tensor = target.original
        # With values the object alone counts: nothing is initialised there.
        key: tuple[object, ...] = (id(tensor),)
        if target.lacks_values and tensor.numel():
            storage = _storage(tensor)
            key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if (other := key_of.setdefault(storage, key)) != key:
                raise ModelError(
                    f"{found[other][0].name!r} and {target.name!r} have no values yet, and share a part of one "
                    "storage. Make one of them a separate tensor, or build their modules outside torch.device('meta')"
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


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _tensors(values: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(storage_id(tensor.untyped_storage()))


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Not so are sparse tensors, DTensors and tensors of quantising classes; those have values."""
    return tensor.layout == torch.strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _region(tensor: torch.Tensor) -> _Region:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _num_bytes(targets: Iterable[_TwinTensor]) -> int:
    return sum(each.empty.numel() * each.empty.element_size() for each in targets)
