"""Names of Megatron: the state dict of the model in place of the stacks, halves and prefixes that its files have.

    decoder.layers.self_attention.linear_qkv.weight (L, n, h)      decoder.layers.0.self_attention.linear_qkv.weight ...
    decoder.layers.mlp.experts.experts.linear_fc2.weight (L, E, ...)   decoder.layers.0.mlp.experts.local_experts.0. ...
    decoder.layers.0.mlp.linear_fc1.layer_norm_weight, of experts  decoder.layers.0.pre_mlp_layernorm.weight
    decoder.layers.0.mlp.linear_fc1.weight_w, weight_v (f, h)      decoder.layers.0.mlp.linear_fc1.weight (2 f, h)
    optimizer.state.exp_avg.NAME                                   optimizer/NAME/exp_avg

Files have one tensor for all layers of a model whose layers are alike, and a box of it for each layer.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shardwise.checkpoint.contents import StoredPiece, StoredTensor
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.names import MASTER, state_name
from shardwise.space import Piece

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..*", re.DOTALL)
_MASTERS = ("fp32_param", "param")
_STACKS = (
    (re.compile(r"((?:.*\.)?layers\.)(?!\d+\.)(.*)", re.DOTALL), "{}{}.{}"),
    (re.compile(r"(.*\.experts\.)experts\.(?!\d+\.)(.*)", re.DOTALL), "{}local_experts.{}.{}"),
)
"""Names of tensors whose first dim is layers, or experts; and the name of one of them."""
_MAX_STACK = 1 << 16
"""Layers, or experts; each takes about a KiB of memory."""
_EXPERT = re.compile(r"(.*\.experts\.)experts\.(\d+\..*)", re.DOTALL)
_NORM = re.compile(
    r"((?:optimizer/)?)((?:.*\.)?layers\.\d+\.)"
    r"(input_layernorm\.|pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)((?:weight|bias)(?:/.*)?)",
    re.DOTALL,
)
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_[wv]((?:/.*)?)", re.DOTALL)


def split_state(name: str) -> tuple[str, str] | None:
    """The parameter and the key of a tensor of the optimizer, by its name in the files; None for every other.

    >>> split_state("optimizer.state.fp32_param.decoder.final_layernorm.weight")
    ('decoder.final_layernorm.weight', 'master')
    """
    if (match := _STATE.fullmatch(name)) is None:
        return None
    key, parameter = match.groups()
    return parameter, MASTER if key in _MASTERS else key


def is_flat_bucket(name: str) -> bool:
    """Whether a tensor or an object is state of parameters that it does not name."""
    return _BUCKET.fullmatch(name) is not None


def in_shape(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor in its shape, whose boxes were saved flat: (X, Y) in boxes of (x, y) as (X / x, Y / y, x y).

    So Megatron wrote the distributed optimizer in model space, where a data rank has a run of a box.
    """
    counts, size = tensor.shape[:-1], tensor.shape[-1] if tensor.shape else 0
    box = tuple(whole // count if count else 0 for whole, count in zip(shape, counts, strict=False))
    if (
        len(counts) != len(shape)
        or math.prod(box) != size
        or any(count * each != whole for count, each, whole in zip(counts, box, shape, strict=True))
    ):
        raise CheckpointError(f"{tensor.name} was saved flat, as {list(tensor.shape)}, which is not {list(shape)}")
    pieces = []
    for stored in tensor.pieces:
        *at, first = stored.piece.offset
        *ones, length = stored.piece.shape
        if any(each != 1 for each in ones) or stored.piece.run is not None:
            raise CheckpointError(f"{tensor.name} was saved flat, in parts of shape {list(stored.piece.shape)}")
        offset = [each * step for each, step in zip(at, box, strict=True)]
        run = None if (first, length) == (0, size) else (first, first + length)
        piece = Piece(name=tensor.name, dtype=tensor.dtype, global_shape=shape, offset=offset, shape=box, run=run)
        pieces.append(replace(stored, piece=piece))
    return replace(tensor, shape=shape, pieces=tuple(pieces))


def model_tensors(stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors of files by the names that they have in the state dict of the model, and optimizer state under those."""
    made: dict[str, StoredTensor] = {}
    for tensor in stored:
        parameter, key = split_state(tensor.name) or (tensor.name, None)
        for name, each in _one_by_one(parameter, tensor):
            name = name if key is None else state_name(name, key)
            if name in made:
                raise CheckpointError(f"it has two tensors {name}")
            made[name] = each
    return with_norms(_joined(made))


def with_norms(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors under their names, where norms have those that they have with Transformer Engine.

    A norm before a linear layer is a part of that: self_attention.linear_qkv.layer_norm_weight. Before experts it is on
    its own: pre_mlp_layernorm.weight. Models of Megatron's local layers may call each as the other.
    """
    return {name: each.renamed(name) for name, each in ((_norm(key, tensors), each) for key, each in tensors.items())}


def _norm(name: str, names: Collection[str]) -> str:
    if (match := _NORM.fullmatch(name)) is None:
        return name
    state, layer, norm, rest = match.groups()
    if norm == "input_layernorm.":
        norm = "self_attention.linear_qkv.layer_norm_" if f"{layer}self_attention.linear_qkv.weight" in names else norm
    else:
        norm = "mlp.linear_fc1.layer_norm_" if f"{layer}mlp.linear_fc1.weight" in names else "pre_mlp_layernorm."
    return f"{state}{layer}{norm}{rest}"


def _one_by_one(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor, or those of its layers and experts, by name. They are still called as the stack is."""
    for pattern, form in _STACKS:
        if (match := pattern.fullmatch(name)) is not None:
            if not tensor.shape or tensor.shape[0] > _MAX_STACK:
                raise CheckpointError(f"{tensor.name} has shape {list(tensor.shape)}, whose first dim is no layers")
            # Found at once for all: a thousand layers of a thousand boxes each would be a million looks.
            parts: list[list[StoredPiece]] = [[] for _ in range(tensor.shape[0])]
            for stored in tensor.pieces:
                for index, part in _slices(stored, tensor.shape[1:]):
                    parts[index].append(part)
            for index, pieces in enumerate(parts):
                one = replace(tensor, shape=tensor.shape[1:], pieces=tuple(pieces))
                yield from _one_by_one(form.format(match[1], index, match[2]), one)
            return
    match = _EXPERT.fullmatch(name)
    yield name if match is None else f"{match[1]}local_experts.{match[2]}", tensor


def _slices(stored: StoredPiece, shape: tuple[int, ...]) -> Iterator[tuple[int, StoredPiece]]:
    """The parts of a piece, by their index of the first dim."""
    piece = stored.piece
    first, count = piece.offset[0], piece.shape[0]
    if piece.run is not None and count != 1:
        raise CheckpointError(f"{piece.name} has a run that goes through several layers")
    for number in range(count):
        box = replace(piece, global_shape=shape, offset=piece.offset[1:], shape=piece.shape[1:])
        num_bytes = math.prod(piece.shape[1:]) * itemsize_bytes(piece.dtype)
        yield first + number, replace(stored, piece=box, start=stored.start + number * num_bytes)


def _joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Gates and what they gate, which files may have one by one, as one tensor."""
    made: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if (match := _HALF.fullmatch(name)) is None:
            made[name] = tensor
            continue
        joined = f"{match[1]}{match[2]}"
        gate, up = (tensors.get(f"{match[1]}_{half}{match[2]}") for half in "wv")
        if gate is None or up is None or gate.shape != up.shape or not gate.shape:
            raise CheckpointError(f"{name} has no other half (_w and _v) of its shape")
        if joined not in made:
            whole = (2 * gate.shape[0], *gate.shape[1:])
            pieces = (*_shifted(gate, whole, 0), *_shifted(up, whole, gate.shape[0]))
            made[joined] = replace(gate, shape=whole, pieces=pieces)
    return made


def _shifted(tensor: StoredTensor, shape: tuple[int, ...], by: int) -> Iterator[StoredPiece]:
    """The pieces of a tensor, as part of one of another shape."""
    for stored in tensor.pieces:
        first, *others = stored.piece.offset
        yield replace(stored, piece=replace(stored.piece, global_shape=shape, offset=(first + by, *others)))


_ONE_LAYER = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers\.)(\d{1,9})\.(.*)", re.DOTALL)
_ONE_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d{1,9})\.(.*)", re.DOTALL)
_OF_MEGATRON = re.compile(r"(?:.*\.)?decoder\.(?:layers\.\d+|final_layernorm)\..+", re.DOTALL)
_LINEAR = re.compile(r"(.*\.layers\..*\.linear_\w+)\.weight", re.DOTALL)


def is_megatron_name(name: str) -> bool:
    """Whether a parameter is called as one of Megatron's GPT models."""
    return _OF_MEGATRON.fullmatch(name) is not None


def linear_of(name: str) -> str | None:
    """The linear layer, or a stack of some, whose weight a stored tensor is; None for other tensors."""
    return match[1] if (match := _LINEAR.fullmatch(name)) else None


@dataclass(frozen=True, slots=True)
class StackedTensors:
    """Tensors of the model that are one in the files."""

    counts: tuple[int, ...]
    """How many layers, and how many experts: the dims before those of each tensor; () for a tensor alone."""
    names: tuple[str, ...]
    """The tensors, row-major by layer and expert."""

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The place of each tensor in the dims before its own."""
        return product(*map(range, self.counts))


def stacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StackedTensors]:
    """What `model_tensors` has made of files: their stacks, by name. Layers that are not all alike stay apart.

    Raises CheckpointError where some experts are missing.
    """
    alone = {name: StackedTensors((), (name,)) for name in tensors}
    made: dict[str, StackedTensors] = {}
    for name, members in _numbered(alone, _ONE_EXPERT).items():
        if isinstance(members, StackedTensors):
            made[name] = members
            continue
        if sorted(members) != list(range(len(members))):
            raise CheckpointError(f"it has experts {few_of(list(map(str, sorted(members))), quotes=False)} of {name}")
        made[name] = StackedTensors((len(members),), tuple(members[each].names[0] for each in sorted(members)))
    rows: dict[str, dict[int, set[tuple[Any, ...]]]] = {}
    for name, stack in made.items():
        if (match := _ONE_LAYER.fullmatch(name)) is not None:
            first = tensors[stack.names[0]]
            kind = (match[3], stack.counts, first.dtype, first.shape)
            rows.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(kind)
    alike = {
        before
        for before, layers in rows.items()
        if sorted(layers) == list(range(len(layers))) and all(each == layers[0] for each in layers.values())
    }
    found: dict[str, StackedTensors] = {}
    for name, members in _numbered(made, _ONE_LAYER, only=alike).items():
        if isinstance(members, StackedTensors):
            found[name] = members
        else:
            names = tuple(each for number in sorted(members) for each in members[number].names)
            found[name] = StackedTensors((len(members), *members[0].counts), names)
    return found


def _numbered(
    stacks: Mapping[str, StackedTensors], pattern: re.Pattern[str], only: Collection[str] | None = None
) -> dict[str, StackedTensors | dict[int, StackedTensors]]:
    """Stacks by name; those whose names differ by a number alone by that, under the name without it."""
    found: dict[str, Any] = {}
    for name, stack in stacks.items():
        match = pattern.fullmatch(name)
        if match is None or (only is not None and match[1] not in only):
            found[name] = stack
        else:
            rest = match[3] if pattern is _ONE_LAYER else f"experts.{match[3]}"
            found.setdefault(f"{match[1]}{rest}", {})[int(match[2])] = stack
    return found
