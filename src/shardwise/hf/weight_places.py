"""Where a model has the tensors of its files, if `save_pretrained` renames or splits them.

vit.encoder.layer.0.output.dense.weight     all of vit.layers.0.mlp.fc2.weight
experts.1.gate_proj.weight (4, 8)           of experts.gate_up_proj (2, 8, 8): [1, 0:4, :]

Known from what `save_pretrained` does to a model that has shapes alone, so each rank reads what it owns of such files.
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.formats.strided import TensorPlace, pieces_of
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.sources import read_contents
from shardwise.engine import Engine
from shardwise.errors import CheckpointError
from shardwise.hf.streamed_model import FileNotes, TensorPart
from shardwise.moving.nested_exchange import exchange
from shardwise.plan.names import is_state_name
from shardwise.space import Piece


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A tensor of a file, as a box of a model's tensor."""

    name: str
    """Of the model's tensor."""
    shape: tuple[int, ...]
    """Of the model's tensor."""
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements to the next index in the file, per dim of the model's tensor."""


def weight_places(engine: Engine[nn.Module], folder: Path) -> dict[str, WeightPlace]:
    """By name those tensors of a folder that the model has under other names or in other shapes.

    All ranks call this together. Empty for models without `save_pretrained`, and where names agree.
    """
    found: dict[str, WeightPlace] = {}
    with engine.whole(optimizer=False, rank0_only=True, only=()):
        if engine.channel.rank == 0:
            found = _found(engine.model, folder)
    own = {name: astuple(each) for name, each in found.items()}
    told = exchange(own, channel=engine.channel, purpose="names of weights in files")[0]
    return {name: WeightPlace(*each) for name, each in told.items()}


def placed(contents: Contents, places: Mapping[str, WeightPlace]) -> Contents:
    """The contents with the model's tensors, where the places make them up."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in contents.tensors.items():
        place = places.get(name)
        if place is None or len(tensor.pieces) != 1:
            tensors[name] = tensor
            continue
        (stored,) = tensor.pieces
        piece = Piece(
            name=place.name, dtype=tensor.dtype, global_shape=place.shape, offset=place.offset, shape=place.sizes
        )
        at = TensorPlace(dtype=tensor.dtype, shape=place.sizes, strides=place.strides, start=stored.start)
        before = tensors.get(place.name)
        pieces = (*(before.pieces if before is not None else ()), *pieces_of(at, piece, stored.file))
        tensors[place.name] = StoredTensor(name=place.name, dtype=tensor.dtype, shape=place.shape, pieces=pieces)
    aliases = {_model_name(alias, places): _model_name(name, places) for alias, name in contents.aliases.items()}
    return replace(contents, tensors=tensors, aliases=aliases)


def _model_name(name: str, places: Mapping[str, WeightPlace]) -> str:
    return places[name].name if name in places else name


def _found(model: Any, folder: Path) -> dict[str, WeightPlace]:
    try:
        contents = read_contents(LocalStore(folder))
    except CheckpointError:  # said where it is loaded, on all ranks
        return {}
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    others = {
        name: each
        for name, each in contents.tensors.items()
        if not is_state_name(name) and shapes.get(name) != each.shape
    }
    if not others or not hasattr(model, "save_pretrained"):
        return {}
    notes = FileNotes()
    with tempfile.TemporaryDirectory() as scratch:
        notes.take(model, lambda: model.save_pretrained(scratch))
    found = {}
    for name, tensor in notes.tensors().items():
        if name in others and tuple(tensor.shape) == others[name].shape:
            place = _place_of(tensor, notes)
            if place is not None:
                found[name] = place
    return found


_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
"""Operations that leave each element at its index."""


def _place_of(tensor: torch.Tensor, notes: FileNotes) -> WeightPlace | None:
    """None for what is computed, or has the elements of several tensors."""
    part = TensorPart.of(tensor)
    while (own := notes.own(part)) is None:
        made = notes.made(part)
        if made is None or made.operation not in _COPIES:
            return None
        source, box = made.inputs[0][0], _box(part, made.output)
        if box is None:
            return None
        index, dims = box
        offset = source.offset + sum(at * stride for at, stride in zip(index, source.strides, strict=True))
        strides = tuple(0 if dim is None else source.strides[dim] for dim in dims)
        part = TensorPart(source.storage, offset, part.shape, strides)
    name, whole = own
    box = _box(part, whole)
    if box is None:
        return None
    index, dims = box
    sizes, strides_in_file = [1] * len(whole.shape), [1] * len(whole.shape)
    for at, dim in enumerate(dims):
        if dim is not None:
            sizes[dim] = part.shape[at]
            strides_in_file[dim] = math.prod(part.shape[at + 1 :])
    return WeightPlace(name, tuple(whole.shape), tuple(index), tuple(sizes), tuple(strides_in_file))


def _box(part: TensorPart, whole: TensorPart) -> tuple[list[int], list[int | None]] | None:
    """Index of the first element of a part, and the dim of the whole for each of its dims; None where it is no box."""
    index, rest = [0] * len(whole.shape), part.offset - whole.offset
    wide = [dim for dim, size in enumerate(whole.shape) if size > 1]
    for dim in sorted(wide, key=lambda dim: -whole.strides[dim]):
        if not whole.strides[dim]:
            return None
        index[dim], rest = divmod(rest, whole.strides[dim])
    dims: list[int | None] = []
    for size, stride in zip(part.shape, part.strides, strict=True):
        of = next((dim for dim in wide if whole.strides[dim] == stride), None) if size > 1 else None
        if size > 1 and (of is None or of in dims or index[of] + size > whole.shape[of]):
            return None
        dims.append(of)
    is_inside = rest == 0 and all(0 <= at < size for at, size in zip(index, whole.shape, strict=True))
    return (index, dims) if is_inside else None
