"""The outcome of a call, without executing it: tried once on fake tensors for every signature, and remembered.

Every rank tries for itself and all come to the same verdict, for they see the same program. Where trying fails (no
kernel for fake tensors, shapes that depend on values) all know that the owner announces the shape of the outputs.

    signature       (call.key(), modes of torch, structure of the arguments, spec of each tensor, other arguments)
    not known  -->  try on fakes  -->  CallOutcome: every later call of this signature costs one look-up
                                  -->  None: the owner executes, describes what came out and announces it;
                                       later calls rely on numbers of outputs and dims, dtypes and gradients
"""

import copy
import warnings
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.comm.nested_values import (
    ObjectSlot,
    TensorSlot,
    containers_in,
    contents_of,
    filled,
    is_plain,
    transform,
)
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.pipeline.nested import Opaque, numbers_and_texts_in, token_of, user_site, with_numbers_and_texts
from shardwise.engine.pipeline.stage_tensor import Spec, StageTensor
from shardwise.engine.pipeline.staged_calls import Fakes, StagedCall, storage_of
from shardwise.engine.torch_private import function_modes, pop_function_mode, push_function_mode
from shardwise.errors import ModelError

# A program whose shapes never repeat would else fill the memory of every rank.
_MAX_ENTRIES = 1 << 14


# Sharing is part of what a call gives: a write in place to one output has to reach, on every rank, whatever the
# program holds of the same memory.
class OutcomeTensor(NamedTuple):
    """One tensor that a call gives."""

    spec: Spec
    same_as: int | None
    """The input that it is, as an object."""
    view_of: int | None
    """The input whose memory it shares."""
    shares_with: int | None
    """The output before it whose memory it shares."""

    @property
    def is_new(self) -> bool:
        """Whether its memory is its own."""
        return self.same_as is None and self.view_of is None and self.shares_with is None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOutcome:
    """The outcome of the calls of one signature."""

    skeleton: Any
    """The result, the records of inner hooks and the writes to containers, with slots in the place of tensors and
    objects."""
    outputs: tuple[OutcomeTensor, ...]
    written: tuple[tuple[int, Spec], ...]
    """Inputs that the call writes to in place, and their descriptions afterwards."""
    writes_kept: bool
    """It may write to its own parameters or buffers."""
    has_known_shapes: bool
    """False: the shapes are an example, and may be others the next time."""
    announces: bool
    """There are numbers or texts in it, which may be others the next time."""

    def announcing(self, announced: Sequence[Any]) -> "CallOutcome":
        """The entry with the numbers and texts of one call, which only its owner knows."""
        return replace(self, skeleton=with_numbers_and_texts(self.skeleton, announced))


class Writes:
    """Writes of a call to containers that it was given: items appended to lists, entries of dicts."""

    def __init__(self, call: StagedCall, args: tuple[Any, ...], kwargs: dict[str, Any], objects: Sequence[Any]) -> None:
        self._call = call
        self._containers = containers_in((*args, *kwargs.values())) if call.is_user_code else []
        # A shallow look before and after the call. Containers are compared by identity of what they hold: elements
        # may be tensors, whose comparison gives tensors.
        self._before = [contents_of(each) for each in self._containers]
        self._objects = [(each, _tensors_of(each)) for each in objects if call.is_user_code]

    def found(self) -> tuple[tuple[int, Any, Any], ...]:
        """(number of the container, position or key, value) of new items. Raises ModelError for items that are gone."""
        found = []
        for number, (container, before) in enumerate(zip(self._containers, self._before, strict=True)):
            after = contents_of(container)
            if len(after) < len(before) or not before.keys() <= after.keys():
                raise ModelError(
                    f"{self._call.name!r} takes items out of a {type(container).__name__} that it is given "
                    f"({user_site()}), and other ranks do not run it; take them out between modules"
                )
            found += [(number, key, value) for key, value in after.items() if value is not before.get(key, _NOTHING)]
        for each, before in self._objects:
            if any(value is not before.get(key) for key, value in _tensors_of(each).items()):
                raise ModelError(
                    f"{self._call.name!r} writes a tensor to an attribute of a {type(each).__name__} that it is given "
                    f"({user_site()}), on the rank of its stage alone. Return the tensor, or give a dataclass"
                )
        return tuple(found)


_NOTHING = object()


def _tensors_of(value: Any) -> dict[str, torch.Tensor]:
    return {key: held for key, held in getattr(value, "__dict__", {}).items() if isinstance(held, torch.Tensor)}


class CallInputs:
    """The arguments of a call, taken apart: tensors and objects by number, and all else."""

    def __init__(
        self,
        call: StagedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        adopted: Callable[[Any], Any],
        opaque: Container[int],
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        """Stage tensors and plain ones."""
        self.objects: list[Any] = []
        self.numbers: list[float | complex] = []
        self.modules: list[nn.Module] = []
        self.has_opaque = False
        """Whether an object among them is known on one rank only, so that no rank can try the call."""
        self.containers = containers_in((*args, *kwargs.values())) if call.is_user_code else []
        """Lists, dicts and the like, as the program has them."""
        self._lent: list[tuple[dict[str, Any], str, int]] = []
        self._opaque = opaque
        # By id, so that one tensor given twice is one input: a module may ask whether two inputs are one, and a
        # write in place to the one shows in the other.
        self._positions: dict[int, int] = {}
        self._tokens: list[Hashable] = []
        self._call = call
        self._adopted = adopted
        self.skeleton: tuple[tuple[Any, ...], dict[str, Any]] = transform((args, kwargs), self._take_apart)

    def _take_apart(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            leaf = self._adopted(leaf)
            at = self._positions.setdefault(id(leaf), len(self.tensors))
            if at == len(self.tensors):
                self.tensors.append(leaf)
            self._tokens += (at, spec_of(leaf))
            return TensorSlot(at)
        if isinstance(leaf, Opaque) or id(leaf) in self._opaque:
            self.has_opaque = True
            self._tokens.append("opaque")
            self.objects.append(leaf)
            return ObjectSlot(len(self.objects) - 1)
        if isinstance(leaf, int | float | complex):
            self.numbers.append(leaf)
        # `h * 0.37` gives the shape of `h * 0.36`: a factor that changes in every step must not be a new signature
        # each time.
        is_number = isinstance(leaf, float | complex) and self._call.ignores_numbers
        self._tokens.append((type(leaf),) if is_number else token_of(leaf))
        if isinstance(leaf, nn.Module):
            self.modules.append(leaf)
        if is_plain(leaf) or callable(leaf):
            return leaf
        self.objects.append(leaf)
        return ObjectSlot(len(self.objects) - 1)

    def lend(self, module: nn.Module) -> None:
        """Let the parameters and buffers of a module of another stage come along: the call is given that module."""
        for each in module.modules():
            for held in (each._parameters, each._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        self._lent.append((held, key, self._take_apart(tensor).number))

    def lend_attributes(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Let values of stages that are attributes of the module come along."""
        self._lent += [(held := vars(module), key, self._take_apart(held[key]).number) for module, key in places]

    @contextmanager
    def lending(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Modules of other stages have the tensors that came along with them."""
        saved = [held[key] for held, key, _ in self._lent]
        for held, key, at in self._lent:
            held[key] = tensors[at]
        try:
            yield
        finally:
            for (held, key, _), tensor in zip(self._lent, saved, strict=True):
                held[key] = tensor

    def signature(self, device: torch.device) -> Hashable:
        """Equal where outputs have equal descriptions."""
        return (self._call.key(), around_of(device.type), _structure(self.skeleton), tuple(self._tokens))

    def filled(self, tensors: Sequence[torch.Tensor], objects: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors and objects."""
        args, kwargs = filled(self.skeleton, tensors, objects, fresh=self._call.is_user_code)
        return args, kwargs


class CallInference:
    """The entries of one rank."""

    def __init__(self, device: torch.device, random: KeyedRandom) -> None:
        self.device = device
        self.num_tried = 0
        """Signatures that were tried on fake tensors."""
        self.num_lookups = 0
        self.alike: dict[int, CallOutcome] = {}
        """Entries, by id, for which this rank saw that results share memory as the entry says."""
        self._entries: dict[Hashable, CallOutcome | None] = {}
        self._fakes = Fakes(device)
        self._random = random

    def look_up(self, call: StagedCall, inputs: CallInputs) -> tuple[Hashable, CallOutcome | None]:
        """The signature and its entry; None where the owner has to announce one."""
        signature = inputs.signature(self.device)
        self.num_lookups += 1
        try:
            return signature, self._entries[signature]
        except KeyError:
            pass
        if len(self._entries) >= _MAX_ENTRIES:  # alike on all ranks, which see the same signatures
            self._entries.clear()
            self.alike.clear()
        self.num_tried += 1
        entry = None if inputs.has_opaque else self._try(call, inputs)
        self._entries[signature] = entry
        return signature, entry

    def learn(self, signature: Hashable, entry: CallOutcome) -> None:
        """Remember the entry that the owner announced."""
        self._entries[signature] = entry

    def follow(self, call: StagedCall, inputs: CallInputs) -> None:
        """Do to the objects that a call is given, and which another rank executes, what fake tensors show."""
        self._try(call, inputs, inputs.objects)

    def hollow(self, spec: Spec) -> torch.Tensor:
        """A tensor of this description without elements, which operations take for a real one."""
        return self._fakes.hollow(spec)

    def _try(self, call: StagedCall, inputs: CallInputs, objects: Sequence[Any] | None = None) -> CallOutcome | None:
        """`objects`: in the place of those among the inputs; None: copies of them."""
        # Function modes of the program (one that counts or casts, and the glue itself) must not see the trial: the
        # program runs the call once. They are pushed, not entered, afterwards: entering may begin to count anew.
        modes = [pop_function_mode() for _ in function_modes()]
        try:
            # A warning of the module comes when it is executed; streams of random numbers stay as they are, since a
            # trial happens on the first of many equal calls only and a stream has to go on alike in all of them.
            with warnings.catch_warnings(), self._random.suspended(), self._fakes.trying() as trial:
                warnings.simplefilter("ignore")
                tensors = [self._fakes.input(spec_of(each)) for each in inputs.tensors]
                if objects is None:
                    with _CopiesHoldFakes(self._fakes):
                        # A trial may change an object that it is given (a cache that grows). Copies are thrown away.
                        objects = [copy.deepcopy(each) for each in inputs.objects]
                memories = [storage_of(each) for each in tensors]
                args, kwargs = inputs.filled(tensors, objects)
                writes = Writes(call, args, kwargs, objects)
                with inputs.lending(tensors):
                    answer, records = call.try_on_fakes(self._fakes, args, kwargs)
                result = (answer, records, writes.found())
                written = [
                    at
                    for at, (each, memory) in enumerate(zip(tensors, memories, strict=True))
                    # Another storage: the call has put other memory under its input (`set_`, `.data = ...`), which
                    # is a write too.
                    if memory in trial.written or storage_of(each) != memory
                ]
                writes_kept = not trial.kept.isdisjoint(trial.written)
                return describe(
                    result, tensors, objects, call, written=written, writes_kept=writes_kept, has_known_shapes=True
                )
        except Exception:  # whatever a kernel or a module raises on fake tensors: the owner announces
            return None
        finally:
            for mode in reversed(modes):
                push_function_mode(mode)


class _CopiesHoldFakes(TorchFunctionMode):
    """Copies of objects hold fake tensors where the objects hold real ones (a cache of keys and values, say)."""

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._fakes.input(Spec.of(args[0]))
        return func(*args, **(kwargs or {}))


def describe(
    result: Any,
    tensors: Sequence[torch.Tensor],
    objects: Sequence[Any],
    call: StagedCall,
    *,
    written: Sequence[int],
    writes_kept: bool,
    has_known_shapes: bool,
) -> CallOutcome:
    """The entry of a call that was executed on `tensors` and `objects`, and wrote to those of them in `written`."""
    outputs: list[OutcomeTensor] = []
    # Reversed, so that the first of several inputs that share memory wins: the same one on all ranks.
    places = {storage_of(each): at for at, each in reversed(list(enumerate(tensors)))}
    made: dict[int, int] = {}
    # A module that gives its input itself may compute something the next time (a layer that is left out): so its output
    # is another object, which shares the memory. After a write the input is the output for good.
    are_same = [at for at in range(len(tensors)) if not call.is_user_code or at in written]
    positions = {id(tensors[at]): at for at in reversed(are_same)}
    object_positions = {id(each): at for at, each in enumerate(objects)}

    def take_apart(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            storage = storage_of(leaf)
            earlier_output = made.setdefault(storage, len(outputs))
            outputs.append(
                OutcomeTensor(
                    spec=Spec.of(leaf),
                    same_as=positions.get(id(leaf)),
                    view_of=places.get(storage),
                    shares_with=None if earlier_output == len(outputs) else earlier_output,
                )
            )
            return TensorSlot(len(outputs) - 1)
        if is_plain(leaf) or type(leaf) is ObjectSlot:
            return leaf
        at = object_positions.get(id(leaf))
        return Opaque(type(leaf).__name__) if at is None else ObjectSlot(at)

    skeleton = transform(result, take_apart)
    return CallOutcome(
        skeleton=skeleton,
        outputs=tuple(outputs),
        written=tuple((at, Spec.of(tensors[at])) for at in written),
        writes_kept=writes_kept,
        has_known_shapes=has_known_shapes,
        announces=bool(numbers_and_texts_in(result)),
    )


def spec_of(tensor: torch.Tensor) -> Spec:
    """The description of a tensor, or of the value that it stands for."""
    return tensor.value.spec if isinstance(tensor, StageTensor) else Spec.of(tensor)


def around_of(kind: str) -> Hashable:
    """What decides outcomes apart from the call, on a kind of device: settings of torch for this thread."""
    # Regions of autocast on the CPU count on every device: buffers of modules may be there.
    is_cast = torch.is_autocast_enabled(kind) or (kind != "cpu" and torch.is_autocast_enabled("cpu"))
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    if not is_cast:
        return modes
    kinds = dict.fromkeys((kind, "cpu"))
    return (*modes, *[torch.is_autocast_enabled(each) and torch.get_autocast_dtype(each) for each in kinds])


def _structure(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return (type(value), *map(_structure, value))
    if isinstance(value, dict):
        return (type(value), *((key, _structure(each)) for key, each in value.items()))
    return (type(value),)
