"""Modules that are run again in backward: torch's checkpoint around their forwards, with the numbers of one run.

    module(x)   hooks, gather of its unit, collectives of tp ...   Recomputed: checkpoint( the module's own forward )
    backward    the unit is gathered, then                         the own forward again, from the inputs as they were

The wrapper is the innermost one: what a plan does around a forward happens once. What the second run finds again:

    random numbers     the states of the generators before the first run, those of modules and arguments too
    lists, objects     those among the arguments as they were, whatever the first run wrote to them
    buffers            copies of those that the first run wrote to, as they were; the second run writes to the copies
    what it only read  parameters, other buffers and the tensors among the arguments as they are: where somebody has
                       written to one since the first run began, in whatever way, the second run is refused

Torch's count of writes is compared in every call, values by digests (`forward.writes`) in the calls that are due: they
cost 10 microseconds for a tensor and microbatch, and a device would have to be waited for.

Outputs of chosen operators are kept from the first run for the second one:

    first run     mm -> kept 0    gelu      mm -> kept 1
    second run    kept 0          gelu      kept 1

Torch's own pair of modes numbers every operator, and refuses a second run that calls one more or less: a cast that
autocast remembers, say. Here only the chosen ones count, and none that is tried on fake tensors: between stages, the
first run of a call infers what it gives, and the second one knows.
"""

import copy
import inspect
import warnings
from collections.abc import Collection, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from shardwise.comm.nested_values import ObjectSlot, SeenContainers, TensorSlot, filled, is_plain, tensors_in, transform
from shardwise.engine.forward.aside import items_set
from shardwise.engine.forward.kept_objects import held_tensors, own_generators
from shardwise.engine.forward.layers import Forward, OfEngine, Place
from shardwise.engine.forward.observe import Observed
from shardwise.engine.forward.randomness import KeyedRandom, may_draw
from shardwise.engine.forward.transforms import see_transformations, seeing_modes, seen_again
from shardwise.engine.forward.writes import Content, SeenTensor, holds_same, is_due, is_on_host, is_small
from shardwise.engine.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    NormWithStatistics,
    Operator,
    TorchDispatchMode,
    is_transformed,
    tree_map,
    version_of,
)
from shardwise.errors import ActivationsWarning, ModelError, PlanError

_Outputs = dict[Operator, list[tuple[Any, int]]]
"""Of each operator in the order of its calls, with versions."""


class TakenOutputs(TorchDispatchMode):
    """Gives them, in the second run, instead of a call."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._taken: dict[Operator, int] = {}

    def __enter__(self) -> Self:
        self._taken.clear()  # each backward through the module runs it again: one for each stage that it spans
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = self._outputs.get(func)
        if outputs is None or _is_tried((args, kwargs)):
            return func(*args, **(kwargs or {}))
        at = self._taken.setdefault(func, 0)
        self._taken[func] += 1
        if at >= len(outputs):
            raise ModelError(f"a module calls {func} more often when it is run again in backward; {_ADVICE}")
        kept, version = outputs[at]
        outputs[at] = (None, 0)  # let go as soon as it was used
        if kept is None:  # by the backward of another stage
            return func(*args, **(kwargs or {}))
        if _version_of(kept) != version:
            raise ModelError(f"the output of {func} was written to after it was kept; {_ADVICE}")
        return kept


_ADVICE = "leave the operator out of activations.save, or the module out of activations.checkpoint"


def _is_tried(nested: Any) -> bool:
    """Whether these are the tensors of a call that computes no values."""
    return any(each.is_meta or isinstance(each, FakeTensor) for each in tensors_in(nested))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _version_of(made: Any) -> int:
    """It changes when one of the tensors is written to."""
    tensors = made if isinstance(made, tuple | list) else (made,)
    return sum(version_of(each) for each in tensors if isinstance(each, torch.Tensor))


def outputs_kept(operators: Collection[Operator]) -> tuple[Observed, TakenOutputs]:
    """The modes of the two runs of one call; the value of the first is the bytes of what is kept."""
    outputs: _Outputs = {}

    def keep(func: Any, args: Any, kwargs: Any, made: Any) -> int:
        if func not in operators or _is_tried(made):
            return 0
        # Apart from what autograd hangs the graph on.
        outputs.setdefault(func, []).append((tree_map(_detached, made), _version_of(made)))
        return sum(each.nbytes for each in tensors_in(made))

    return Observed(keep), TakenOutputs(outputs)


def overloads_of(operators: Collection[str]) -> frozenset[Operator]:
    """The operators by name, those without an overload in all of theirs. Raises PlanError for unknown ones."""
    found: list[Operator] = []
    problems = []
    for name in operators:
        space, operator, *overload = name.split(".")
        packet = getattr(getattr(torch.ops, space), operator, None)
        names = [] if packet is None else packet.overloads()
        if not names or not set(overload) <= set(names):
            known = f"; its overloads are {', '.join(names)}" if names else ""
            problems.append(f"activations.save: torch.ops has no operator {name!r}{known}")
        else:
            found += [getattr(packet, each) for each in overload or names]
    if problems:
        raise PlanError(*problems)
    return frozenset(found)


class WrittenBuffers:
    """The buffers inside of one module, and those of them that its forwards write to."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for each in module.modules():
            for key, buffer in each.named_buffers(recurse=False):
                if not buffer.is_meta:
                    places.setdefault(id(buffer), []).append((each, key))
        self.places = list(places.values())
        """Of each buffer, wherever it is held."""
        self.written: frozenset[int] | None = None
        """By forwards so far. None: no forward was seen yet, and any buffer may be written to."""

    def buffer(self, at: int) -> torch.Tensor | None:
        """As it is now."""
        module, key = self.places[at][0]
        return module._buffers.get(key)

    def is_statistic(self, at: int) -> bool:
        """Whether torch writes to it in this forward, which leaves no trace in `_version`."""
        return any(isinstance(module, NormWithStatistics) and module.training for module, _ in self.places[at])

    def learn(self, written: Set[int], kept: Set[int]) -> None:
        """Raise ModelError for what a forward wrote to and earlier ones did not."""
        if missing := written - kept:
            module, key = self.places[min(missing)][0]
            raise ModelError(
                f"this forward of {self._name!r} writes to the buffer {key!r} of a {type(module).__name__}, which the "
                "first one did not. It cannot run again in backward as it ran. Leave the module out of "
                "activations.checkpoint"
            )
        self.written = frozenset(written) | (self.written or frozenset())


class KeptBuffers:
    """What a forward finds in the buffers that it may write to."""

    def __init__(self, buffers: WrittenBuffers) -> None:
        """Called before the forward."""
        self._buffers = buffers
        now = [buffers.buffer(at) for at in range(len(buffers.places))]
        with DisableTorchFunction():  # under pp a mode answers for buffers of stages, and notes calls
            # A small one may be written without a count, and a copy costs less than to find out.
            self._copies = {
                at: None if each is None else each.detach().clone()
                for at, each in enumerate(now)
                if buffers.written is None
                or at in buffers.written
                or buffers.is_statistic(at)
                or (each is not None and is_small(each))
            }
            # Of what has no copy, and of large ones, some elements; a device is not waited for.
            self._before = [
                SeenTensor(each, content=is_on_host(each) and at not in self._copies) for at, each in enumerate(now)
            ]
        self._others: dict[int, SeenTensor] = {}
        """What has no copy, as it was after the forward."""

    def settle(self, reads: bool) -> None:
        """The forward has ended: what is large, and it did not write to, needs no copy. reads: it is digested."""
        with DisableTorchFunction():
            written = {at for at, before in enumerate(self._before) if self._is_written(at, before)}
            self._buffers.learn(written, self._copies.keys())
            # A small one costs little, and another forward may write to it before backward.
            self._copies = {at: each for at, each in self._copies.items() if at in written or _is_small(each)}
            others = {at: self._buffers.buffer(at) for at in range(len(self._before)) if at not in self._copies}
            self._others = {at: SeenTensor(each, content=reads and is_on_host(each)) for at, each in others.items()}
        self._before = []

    def changed(self) -> str | None:
        """The name of a large buffer that the forward only read, and that somebody wrote to since."""
        found = (at for at, each in self._others.items() if each.is_written(self._buffers.buffer(at)))
        return next((self._buffers.places[at][0][1] for at in found), None)

    def _is_written(self, at: int, before: SeenTensor) -> bool:
        buffers, now = self._buffers, self._buffers.buffer(at)
        if before.is_written(now) or buffers.is_statistic(at):
            return True
        # The copy shows what torch does not count; of a small one on a device, which is not waited for, it stays.
        kept = self._copies.get(at)
        if now is None or kept is None:
            return False
        is_known = buffers.written is not None and at in buffers.written
        return is_known or (is_small(now) and now.device.type != "cpu") or not holds_same(kept, now)

    def in_place(self) -> AbstractContextManager[None]:
        """Inside, modules hold the buffers as they were before; what is written to them is lost."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for at, kept in self._copies.items():
            with DisableTorchFunction():
                again = None if kept is None else kept.clone()  # a second backward needs it too
            places += [(module._buffers, key, again) for module, key in self._buffers.places[at]]
        return items_set(places)


def _is_small(copy: torch.Tensor | None) -> bool:
    return copy is None or is_small(copy)


class Recomputed(OfEngine):
    """Keeps the inputs of a module, and runs it again in backward."""

    place = Place.RECOMPUTATION

    def __init__(
        self,
        name: str,
        module: nn.Module,
        random: KeyedRandom,
        operators: Collection[Operator],
        warned: set[type] | None,
    ) -> None:
        """operators: whose outputs are kept, too. warned: classes of arguments that were named; None: others warn."""
        self.name = name
        self._warned = warned
        see_transformations()
        self._random = random
        self._draws = may_draw(module, {})
        self._module = module
        self._buffers = WrittenBuffers(name, module)
        self._parameters = [
            (each, key, parameter)
            for each in module.modules()
            for key, parameter in each._parameters.items()
            if parameter is not None
        ]
        self._num_looks = 0
        self._operators = operators
        self.kept_bytes = 0
        """Of outputs that the last call has kept."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.forward, args, kwargs)

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward, of this layer or of one that measures it."""
        if not torch.is_grad_enabled() or self._random.is_suspended:  # no backward follows
            return forward(*args, **kwargs)
        # Nor inside of torch.func, which knows no checkpoints; nor where `functional_call` runs the module with other
        # tensors than its parameters: a second run would not find them.
        if is_transformed() or self._not_in_place():
            return forward(*args, **kwargs)
        given = KeptArguments(args, kwargs)
        if self._warned is not None and given.objects:
            self._warn(given.objects, self._warned)
        self._num_looks += 1
        reads = is_due(self._num_looks)
        with DisableTorchFunction():  # under pp a mode answers for parameters of other stages
            parameters = [SeenTensor(each, content=reads) for _, _, each in self._parameters]
            contents = given.contents(reads)
        own = [*self._own, *given.generators]
        states = self._random.states(own) if self._draws else None
        seeing = seeing_modes()
        kept = KeptBuffers(self._buffers)
        # Not by closure: what is kept for the second run must not hold the arguments of the first.
        first = [(args, kwargs)]
        del args, kwargs

        def compute(*tensors: torch.Tensor) -> Any:
            if first:
                args, kwargs = first.pop()
                return forward(*args, **kwargs)
            with DisableTorchFunction():
                self._refuse_changes(parameters, contents, tensors, kept.changed())
            args, kwargs = given.again(tensors)
            with (
                nullcontext() if states is None else self._random.going_on_from(states, own),
                kept.in_place(),
                nullcontext() if not seeing else seen_again(seeing),
            ):
                try:
                    return forward(*args, **kwargs)
                finally:
                    # Torch stops a second run as soon as it has what was saved: what else it had to take off stays on.
                    for holder, key in self._not_in_place():
                        if is_parametrized(holder, key):
                            remove_parametrizations(holder, key, leave_parametrized=False)

        modes = outputs_kept(self._operators) if self._operators else None
        more: dict[str, Any] = {} if modes is None else {"context_fn": lambda: modes}
        # Torch would keep random numbers by the kind of device that it guesses.
        output = checkpoint(compute, *given.take_tensors(), use_reentrant=False, preserve_rng_state=False, **more)
        if modes is not None:
            self.kept_bytes = int(modes[0].value)
        kept.settle(reads)
        with DisableTorchFunction():
            is_written = any(each.is_written(each.tensor) for each in parameters)
        if is_written:
            raise self._refusal(f"the forward of {self.name!r} writes to a parameter, and would do so twice")
        for each in parameters:
            if not is_on_host(each.tensor):
                each.content = None  # not looked at again
        return output

    def _refuse_changes(
        self,
        parameters: Sequence[SeenTensor],
        contents: Sequence[Content | None],
        given: Sequence[torch.Tensor],
        buffer: str | None,
    ) -> None:
        """Raise ModelError where a second run would find other values than the first. given: its tensors."""
        for (_, key, _), seen in zip(self._parameters, parameters, strict=True):
            if seen.is_written(seen.tensor):
                raise self._changed(f"parameter {key!r} of")
        if buffer is not None:
            raise self._changed(f"buffer {buffer!r} of")
        if not all(before is None or before.holds_for(each) for before, each in zip(contents, given, strict=True)):
            raise self._changed("a tensor that is given to")

    def _changed(self, what: str) -> ModelError:
        return self._refusal(f"{what} {self.name!r} was written to in its forward or since, and would be read again")

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"{why}: backward runs it again. Name modules around which nothing is written in activations.checkpoint"
        )

    @cached_property
    def _own(self) -> list[torch.Generator]:
        return own_generators(self._module)

    def _warn(self, objects: Sequence[Any], warned: set[type]) -> None:
        for each in objects:
            if type(each) not in warned and held_tensors(each):
                warned.add(type(each))
                warnings.warn(
                    f"activations.checkpoint: {self.name!r} is given a {type(each).__name__}, and the tensors in it "
                    "are kept until it runs again in backward. If it is a cache of keys and values, leave it out of "
                    "training (use_cache=False), which saves memory",
                    ActivationsWarning,
                    stacklevel=3,
                )

    def _not_in_place(self) -> list[tuple[nn.Module, str]]:
        return [(holder, key) for holder, key, each in self._parameters if holder._parameters.get(key) is not each]


class KeptArguments:
    """The arguments of a call as they were before it: tensors apart, which torch saves, and the rest copied."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        """Copies of what is no tensor, no container and no plain value: forwards may write to it."""
        self.generators: list[torch.Generator] = []
        """Not copied: the program goes on with them."""
        self._template = transform((args, kwargs), self._take, fresh=True, seen=SeenContainers())

    def contents(self, reads: bool) -> list[Content | None]:
        """Digests of the tensors; None for one on a device, and for all where not `reads`."""
        return [Content(each) if reads and is_on_host(each) else None for each in self._tensors]

    def take_tensors(self) -> list[torch.Tensor]:
        """The tensors, each object once; they are not held here from now on."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def again(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these tensors. What a call writes to lists and objects among them is lost."""
        objects = [_copied(each) for each in self.objects]
        args, kwargs = filled(self._template, tensors, objects, fresh=True, seen=SeenContainers())
        return args, kwargs

    def _take(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            at = next((at for at, each in enumerate(self._tensors) if each is leaf), len(self._tensors))
            if at == len(self._tensors):
                self._tensors.append(leaf)
            return TensorSlot(at)
        if isinstance(leaf, torch.Generator):
            self.generators.append(leaf)
            return leaf
        if is_plain(leaf) or isinstance(leaf, nn.Module) or inspect.isroutine(leaf) or isinstance(leaf, partial):
            return leaf
        self.objects.append(_copied(leaf))
        return ObjectSlot(len(self.objects) - 1)


def _copied(value: Any) -> Any:
    """A copy to which a forward may write; the object itself where it has none."""
    try:
        return copy.deepcopy(value, {id(each): each for each in held_tensors(value)})
    except Exception:  # a generator, a handle: what its class raises, whatever that is
        return value
