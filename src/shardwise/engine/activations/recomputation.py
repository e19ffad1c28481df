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
"""

import copy
import inspect
import warnings
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from shardwise.comm.nested_values import ObjectSlot, SeenContainers, TensorSlot, filled, is_plain, transform
from shardwise.engine.activations.kept_outputs import outputs_kept
from shardwise.engine.activations.written_buffers import KeptBuffers, WrittenBuffers
from shardwise.engine.forward.autograd_functions import seeing_modes, seen_again
from shardwise.engine.forward.kept_objects import held_tensors, own_generators
from shardwise.engine.forward.layers import Forward, OfEngine, Place
from shardwise.engine.forward.randomness import KeyedRandom, may_draw
from shardwise.engine.forward.transforms import see_transformations
from shardwise.engine.forward.writes import Content, SeenTensor, is_due, is_on_host
from shardwise.engine.torch_private import DisableTorchFunction, Operator, is_transformed
from shardwise.errors import ActivationsWarning, ModelError


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
