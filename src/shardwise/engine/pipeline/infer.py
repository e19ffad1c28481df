"""The outcome of a call, without executing it: tried once on fake tensors for every key, and remembered.

Every rank tries for itself and all come to the same verdict, for they see the same program. Where trying fails (no
kernel for fake tensors, shapes that depend on values) all know that the owner announces the shape of the outputs.

    key        see `arguments.py`
    not known  -->  try on fakes  -->  CallOutcome: every later call of this key costs one look-up
                                  -->  None: the owner executes, describes what came out and announces it;
                                       later calls rely on numbers of outputs and dims, dtypes and gradients
"""

import copy
import warnings
from collections import deque
from collections.abc import Hashable, MutableSet, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from shardwise.comm.nested_values import (
    ContainerSlot,
    ObjectSlot,
    SeenContainers,
    TensorSlot,
    contents_of,
    is_plain,
    transform,
)
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.pipeline.arguments import Arguments, spec_of
from shardwise.engine.pipeline.nested import Opaque, numbers_and_texts_in, user_site, with_numbers_and_texts
from shardwise.engine.pipeline.stage_tensor import Spec
from shardwise.engine.pipeline.staged_calls import Fakes, StagedCall, StagesOfTensors
from shardwise.engine.torch_private import function_modes, pop_function_mode, push_function_mode, storage_of
from shardwise.errors import ModelError

# A program whose shapes never repeat would else fill the memory of every rank.
_MAX_KNOWN = 1 << 14


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOutcome:
    """The outcome of the calls of one key."""

    skeleton: Any
    """The result, the records of inner hooks and the writes to containers. Slots stand for tensors, objects, and
    containers that come again."""
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

    def __init__(self, call: StagedCall, containers: Sequence[Any], objects: Sequence[Any]) -> None:
        self._call = call
        self._containers = containers
        # A shallow look before and after the call. Containers are compared by identity of what they hold: elements
        # may be tensors, whose comparison gives tensors.
        self._before = [contents_of(each) for each in self._containers]
        self._objects = [(each, _tensors_of(each), _items_of(each)) for each in objects if call.is_user_code]

    def result(self, answer: Any, records: Sequence[Any]) -> tuple[Any, Any, Any]:
        """The answer, the records and the writes of the call. Slots stand for containers that come again."""
        seen = SeenContainers(self._containers, gives_slots=True)
        found: tuple[Any, Any, Any] = transform((answer, records, self._found()), lambda leaf: leaf, seen=seen)
        return found

    def _found(self) -> tuple[tuple[int, Any, Any], ...]:
        """(number of the container, position or key, value) of new items. Raises ModelError for items that are gone."""
        found = []
        for number, (container, before) in enumerate(zip(self._containers, self._before, strict=True)):
            after = contents_of(container)
            if [*after][: len(before)] != [*before]:  # or puts them back at the end
                raise ModelError(
                    f"{self._call.name!r} takes items out of a {type(container).__name__} that it is given "
                    f"({user_site()}), and other ranks do not run it; take them out between modules"
                )
            found += [(number, key, value) for key, value in after.items() if value is not before.get(key, _NOTHING)]
        for each, before, items in self._objects:
            if list(map(id, items)) != list(map(id, _items_of(each))):
                raise ModelError(
                    f"{self._call.name!r} changes a {type(each).__name__} that it is given ({user_site()}), on the "
                    "rank of its stage alone. Give a list or a dict, or return what it holds"
                )
            if any(value is not before.get(key) for key, value in _tensors_of(each).items()):
                raise ModelError(
                    f"{self._call.name!r} writes a tensor to an attribute of a {type(each).__name__} that it is given "
                    f"({user_site()}), on the rank of its stage alone. Return the tensor, or give a dataclass"
                )
        return tuple(found)


_NOTHING = object()


def _tensors_of(value: Any) -> dict[str, torch.Tensor]:
    return {key: held for key, held in getattr(value, "__dict__", {}).items() if isinstance(held, torch.Tensor)}


def _items_of(value: Any) -> list[Any]:
    """The items of a deque or a set. These are no containers: other ranks would not see them change."""
    return list(value) if isinstance(value, deque | MutableSet) else []


class Known(NamedTuple):
    """What is known of the calls of one key."""

    outcome: CallOutcome | None
    """None: the owner has to announce one."""
    is_plain: bool
    """It is tensors in tuples alone, and nothing is written: that the owner can check with few calls of Python."""

    @classmethod
    def of(cls, outcome: CallOutcome | None, call: StagedCall) -> "Known":
        """What an outcome says of the calls of its key."""
        if outcome is None or outcome.written or outcome.announces or not outcome.has_known_shapes or call.draws:
            return cls(outcome, False)
        answer, records, writes = outcome.skeleton
        return cls(outcome, not records and not writes and _is_tuple_of_slots(answer))


def _is_tuple_of_slots(value: Any) -> bool:
    return value is None or type(value) is TensorSlot or (type(value) is tuple and all(map(_is_tuple_of_slots, value)))


class Inference:
    """The outcomes of calls that one rank knows."""

    def __init__(self, device: torch.device, random: KeyedRandom, stages_of: StagesOfTensors) -> None:
        self.device = device
        self.num_tried = 0
        """Keys that were tried on fake tensors."""
        self.num_lookups = 0
        self.num_replayed = 0
        """Look-ups of outcomes that are plain."""
        self._known: dict[Hashable, Known] = {}
        self.fakes = Fakes(device, stages_of)
        self._random = random

    def look_up(self, given: Arguments) -> Known | None:
        """What is known of a call; None, the first time."""
        self.num_lookups += 1
        return self._known.get(given.key)

    def try_out(self, call: StagedCall, given: Arguments, stage: int) -> Known:
        """Try a call. Raises ModelError for what it may not do on its stage: every rank raises the same."""
        self.num_tried += 1
        known = Known.of(None if given.has_opaque else self._try(call, given, stage, None), call)
        given.key = (call.key(), *given.key[1:])  # by now it may be one of its own
        return known

    def learn(self, given: Arguments, known: Known) -> None:
        """Remember what was tried, or what the owner announced."""
        if len(self._known) >= _MAX_KNOWN:  # all ranks do so at the same call: they see the same keys
            self._known.clear()
        self._known[given.key] = known

    def follow(self, call: StagedCall, given: Arguments, stage: int) -> None:
        """Do to the objects that a call is given, and which another rank executes, what fake tensors show."""
        self._try(call, given, stage, given.objects)

    def hollow(self, spec: Spec) -> torch.Tensor:
        """A tensor of this description without elements, which operations take for a real one."""
        return self.fakes.hollow(spec)

    def _try(self, call: StagedCall, given: Arguments, stage: int, objects: Sequence[Any] | None) -> CallOutcome | None:
        """`objects`: the call gets these for those among its inputs; None: it gets copies."""
        watched: Sequence[Any] = ()
        # Function modes of the program (one that counts or casts, and the glue itself) must not see the trial: the
        # program runs the call once. They are pushed, not entered, afterwards: entering may begin to count anew.
        modes = [pop_function_mode() for _ in function_modes()]
        try:
            # A warning of the module comes when it is executed; streams of random numbers stay as they are, since a
            # trial happens on the first of many equal calls only and a stream has to go on alike in all of them.
            with warnings.catch_warnings(), self._random.suspended(), self.fakes.trying(call, stage) as trial:
                warnings.simplefilter("ignore")
                tensors = [self.fakes.input(spec_of(each)) for each in given.tensors]
                if objects is None:
                    with _CopiesHoldFakes(self.fakes):
                        # A trial may change an object that it is given (a cache that grows). Copies are thrown away.
                        objects = watched = copy.deepcopy(given.objects)
                memories = [storage_of(each) for each in tensors]
                args, kwargs, containers = given.filled(tensors, objects)
                writes = Writes(call, containers, watched)
                with given.lending(tensors):
                    result = writes.result(*call.try_on_fakes(self.fakes, args, kwargs, given.lent))
                written = [
                    at
                    for at, (each, memory) in enumerate(zip(tensors, memories, strict=True))
                    # Another storage: the call has put other memory under its input (`set_`, `.data = ...`), which
                    # is a write too.
                    if memory in trial.written or storage_of(each) != memory
                ]
                writes_kept = not trial.kept.isdisjoint(trial.written)
                return describe(result, tensors, objects, call, written, has_known_shapes=True, writes_kept=writes_kept)
        except ModelError:  # what is refused here would be refused on the rank of the stage alone
            raise
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
    written: Sequence[int],
    *,
    has_known_shapes: bool,
    writes_kept: bool = True,
) -> CallOutcome:
    """The outcome of a call that was executed on `tensors` and `objects`, and wrote to those of them in `written`."""
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
        if is_plain(leaf) or isinstance(leaf, ObjectSlot | ContainerSlot):
            return leaf
        at = object_positions.get(id(leaf))
        return Opaque(type(leaf).__name__) if at is None else ObjectSlot(at)

    skeleton = transform(result, take_apart, fresh=True)  # the program may write to what it gets
    return CallOutcome(
        skeleton=skeleton,
        outputs=tuple(outputs),
        written=tuple((at, Spec.of(tensors[at])) for at in written),
        writes_kept=writes_kept,
        has_known_shapes=has_known_shapes,
        announces=bool(numbers_and_texts_in(result)),
    )
