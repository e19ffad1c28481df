"""Calls whose outcome is known: a key that costs microseconds, and what was inferred and seen under it.

`infer` takes the arguments of a call apart, and looks its signature up. From the second call of one key on,
neither happens: what the first one found is replayed. The key is finer than the signature, so that it says all that
the inference asked:

    the call        module or function; modes of the module and of all modules inside, their hooks by number
    the arguments   types, structure and keywords; of each tensor its description (shape, strides, dtype, gradient)
                    and whether its real shape is known; of each plain value its type and the value
    sharing         which tensors are one object, and which of them share memory
    around it       grad mode, autocast and its dtype, inference mode, the default dtype

    see          key of the call, or None: an argument that says too little (a list, an object), a recomputation
    known[key]   None --> the long way, and then `record` where its outcome is plain: tensors in tuples, no writes
                 KnownCall --> values of the stage are wrapped; on the stage's own rank the call is executed

What the key cannot say, the rank that executes the call checks each time, and goes the long way on for what is not as
recorded (`fits`): outputs by structure, shape, dtype, gradient and shared memory, and that no input was written to.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.comm.nested_values import TensorSlot
from shardwise.engine.pipeline.infer import CallOutcome, OutcomeTensor, around_of, spec_of
from shardwise.engine.pipeline.stage_tensor import StageTensor, ViewMemory
from shardwise.engine.pipeline.staged_calls import StagedCall, storage_of
from shardwise.engine.pipeline.transfers import MicrobatchFlow
from shardwise.engine.torch_private import version_of

# A program whose arguments never repeat would else fill the memory of the rank.
_MAX_KNOWN = 1 << 13

_NUMBERS = frozenset({bool, int, float, complex})
_PLAIN = _NUMBERS | {type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)}
_TENSORS = frozenset({torch.Tensor, nn.Parameter, StageTensor})
"""By exact type: a subclass may mean more by a tensor than its description says."""

_Template = int | None | tuple[Any, ...]
"""The number of an output, no value, or a tuple of these."""


class SeenCall:
    """The arguments of a call, and its key."""

    __slots__ = ("key", "numbers", "positions", "tensors", "tokens")

    def __init__(self, tokens: list[Any]) -> None:
        self.tokens = tokens
        """Of the key, as they are read."""
        self.key: Hashable = None
        self.tensors: list[torch.Tensor] = []
        """Values of stages and plain tensors, each object once, as in `CallInputs`."""
        self.positions: list[int] = []
        """Of each place of a tensor, in the order of the walk, its number in `tensors`."""
        self.numbers: list[float | complex] = []

    def real(self, used: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with the tensors that stand for `tensors` where the call is executed."""
        following = iter([used[at] for at in self.positions])
        return _real(args, following), dict(zip(kwargs, _real(kwargs.values(), following), strict=True))


class KnownCall(NamedTuple):
    """What the calls of one key give."""

    entry: CallOutcome
    template: _Template
    gives_one_new: bool
    """One tensor that shares no memory, and nothing else."""


class _TooLittleSaidError(Exception):
    """An argument whose token would not decide the outcome."""


class CallReplay:
    """The known calls of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.known: dict[Hashable, KnownCall] = {}
        self.num_replayed = 0
        """Calls that took the short way."""
        self.num_recorded = 0
        self.num_unlike = 0
        """Calls that were executed, and gave something else than was recorded."""
        self._kind = device.type

    def see(
        self, flow: MicrobatchFlow, call: StagedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SeenCall | None:
        """The call by its key; None where the key would not decide the outcome."""
        # A recomputation takes values from its forward, by how they were made.
        if not flow.is_forward or call.draws or (identity := call.identity()) is None:
            return None
        seen = SeenCall([identity, around_of(self._kind), len(args)])
        try:
            _read(seen, call, flow, args)
            if kwargs:
                seen.tokens += kwargs
                _read(seen, call, flow, kwargs.values())
        except _TooLittleSaidError:
            return None
        if len(seen.tensors) > 1:
            memories: dict[object, int] = {}
            seen.tokens += [memories.setdefault(_memory_of(each), at) for at, each in enumerate(seen.tensors)]
        seen.key = tuple(seen.tokens)
        return seen

    def record(self, seen: SeenCall, known: KnownCall) -> None:
        """Remember what the calls of this key give."""
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.num_recorded += 1
        self.known[seen.key] = known


def plain_outcome(entry: CallOutcome) -> KnownCall | None:
    """The outcome, where it is tensors in tuples alone; else None."""
    answer, records, writes = entry.skeleton
    if records or writes or entry.written or entry.announces or not entry.has_known_shapes:
        return None
    try:
        template = _template(answer)
    except _TooLittleSaidError:
        return None
    outputs = entry.outputs
    return KnownCall(entry, template, template == 0 and type(template) is int and outputs[0].is_new)


def _read(seen: SeenCall, call: StagedCall, flow: MicrobatchFlow, values: Iterable[Any]) -> None:
    tokens, tensors = seen.tokens, seen.tensors
    for leaf in values:
        kind = type(leaf)
        if kind in _TENSORS:
            tensor = leaf if kind is StageTensor else flow.adopted(leaf)
            if type(tensor) is StageTensor and not tensor.value.has_known_shape:
                raise _TooLittleSaidError
            at = next((at for at, each in enumerate(tensors) if each is tensor), len(tensors)) if tensors else 0
            if at == len(tensors):
                tensors.append(tensor)
            seen.positions.append(at)
            tokens += (at, spec_of(tensor))
        elif kind in _PLAIN:
            # The type too: Python takes 1, 1.0 and True for equal.
            tokens.append(kind)
            if kind in _NUMBERS:
                seen.numbers.append(leaf)
                # A factor changes the elements alone.
                if call.ignores_numbers and (kind is float or kind is complex):
                    continue
            tokens.append(leaf)
        elif kind is tuple or (kind is list and not call.is_user_code):
            # Of a list that a module is given, what the module writes into it has to be found.
            tokens += (kind, len(leaf))
            _read(seen, call, flow, leaf)
        elif kind is slice:
            bounds = (leaf.start, leaf.stop, leaf.step)
            if not all(each is None or type(each) is int for each in bounds):
                raise _TooLittleSaidError
            tokens += (kind, *bounds)
        else:
            raise _TooLittleSaidError


def _memory_of(tensor: torch.Tensor) -> object:
    if type(tensor) is not StageTensor:
        return storage_of(tensor)
    root: ViewMemory = tensor.value.memory.root
    return root if root.plain is None else storage_of(root.plain)


def _template(answer: Any) -> _Template:
    kind = type(answer)
    if kind is TensorSlot:
        number: int = answer.number
        return number
    if answer is None:
        return None
    if kind is tuple:
        return tuple(map(_template, answer))
    raise _TooLittleSaidError


def filled_template(template: _Template, outputs: Sequence[torch.Tensor]) -> Any:
    """The result of a call with these outputs."""
    if type(template) is int:
        return outputs[template]
    return None if template is None else tuple([filled_template(each, outputs) for each in template])  # type: ignore[union-attr]


def _real(values: Iterable[Any], following: Iterator[torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for leaf in values:
        kind = type(leaf)
        if kind in _TENSORS:
            found.append(next(following))
        elif kind is tuple or kind is list:
            found.append(kind(_real(leaf, following)))
        else:
            found.append(leaf)
    return found


def fits(
    known: KnownCall, result: Any, used: Sequence[torch.Tensor], versions: Sequence[int]
) -> list[torch.Tensor] | None:
    """The outputs of a call that was executed, where all is as it was recorded; else None."""
    if known.gives_one_new:
        return _fits_one_new(known.entry.outputs[0], result, used, versions)
    made: list[torch.Tensor] = []
    if not _takes_apart(known.template, result, made):
        return None
    memories = [storage_of(each) for each in used]
    made_memories: list[int] = []
    for output, tensor in zip(known.entry.outputs, made, strict=True):
        memory = storage_of(tensor)
        if not _is_alike(output, tensor, used):
            return None
        if output.view_of is not None:
            shares = memories[output.view_of] == memory
        elif output.shares_with is not None:
            shares = made_memories[output.shares_with] == memory
        else:
            shares = memory not in memories and memory not in made_memories
        if not shares:
            return None
        made_memories.append(memory)
    return made if versions == [version_of(each) for each in used] else None


def _fits_one_new(
    output: OutcomeTensor, result: Any, used: Sequence[torch.Tensor], versions: Sequence[int]
) -> list[torch.Tensor] | None:
    """The same for one new tensor that shares no memory, the most frequent result."""
    if type(result) is not torch.Tensor or not _is_alike(output, result, used):
        return None
    memory = storage_of(result)
    for each, before in zip(used, versions, strict=True):
        if version_of(each) != before or storage_of(each) == memory:
            return None
    return [result]


def _is_alike(output: OutcomeTensor, tensor: torch.Tensor, used: Sequence[torch.Tensor]) -> bool:
    spec = output.spec
    return (
        tensor.shape == spec.shape
        and tensor.dtype == spec.dtype
        and tensor.requires_grad == spec.requires_grad
        and not tensor.is_meta
        and (output.same_as is None or tensor is used[output.same_as])
    )


def _takes_apart(template: _Template, result: Any, made: list[torch.Tensor]) -> bool:
    """Take the outputs out of a result; whether it is built like the recorded one."""
    if type(template) is int:
        made.append(result)
        return type(result) is torch.Tensor
    if template is None:
        return result is None
    return (
        type(result) is tuple
        and len(result) == len(template)  # type: ignore[arg-type]
        and all(_takes_apart(part, each, made) for part, each in zip(template, result, strict=True))  # type: ignore[arg-type]
    )
