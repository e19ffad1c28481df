"""Held: any state as pieces with tensors, checked before anybody reads or writes one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.states import State, Stateful
from shardwise.comm.dtensors import is_dtensor, local_pieces, local_tensor
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Piece

__all__ = ["Held", "KnownDTensors", "bytes_of", "check_json", "dtype_name", "hold", "torch_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank has of a state."""

    tensors: dict[Piece, torch.Tensor]
    """Pieces with elements, and whole tensors without; in the piece's box shape with any strides, or flat for a run."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names that share the storage of another: alias -> name."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the object says beside its tensors."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name that pieces give a torch dtype: `torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in a piece."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class KnownDTensors:
    """The pieces of DTensors that were held before: to find them takes longer than to see that they still hold."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[object, ...], Piece]] = {}

    def pieces(self, name: str, tensor: Any, local: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
        """See `local_pieces`; `tensor` is a DTensor and `local` its local tensor."""
        key = (tensor.placements, tensor.device_mesh, tensor.shape, tensor.dtype, local.shape)
        if (known := self._found.get(name)) is not None and known[0] == key:
            return [(known[1], local)]
        found = local_pieces(name, tensor)
        if len(found) == 1 and found[0][0].shape == tuple(local.shape):
            self._found[name] = key, found[0][0]
        return found


@torch.no_grad()
def hold(state: State, *, what: str = "the state", known: KnownDTensors | None = None) -> Held:
    """What this rank has of `state`. Raises CheckpointError with everything in it that cannot be saved or loaded.

    known: what was found out about the same state before.
    """
    known = known if known is not None else KnownDTensors()
    if isinstance(state, torch.nn.Module):
        raise CheckpointError(
            f"{what} is a module; give its tensors, model.state_dict(), or TorchState(model, optimizer) for both"
        )
    if isinstance(state, Stateful):
        settings = state.settings() if hasattr(state, "settings") else {}
        held = hold(state.state(), what=what, known=known)
        return Held(tensors=held.tensors, aliases={**held.aliases, **settings.get("ties", {})}, settings=settings)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{what} is a {type(state).__name__}; give tensors by name or by Piece, or an object with state()"
        )
    tensors: dict[Piece, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    problems: list[str] = []
    first_of: dict[tuple[object, ...], str] = {}
    for key, value in state.items():
        if problem := _problem(key, value):
            problems.append(problem)
        elif isinstance(key, Piece):
            _add(tensors, key, value, problems)
        elif is_dtensor(value):
            local = local_tensor(value)
            if (first := first_of.setdefault(_place(key, value, local), key)) != key:
                aliases[key] = first
                continue
            for piece, part in known.pieces(key, value, local):
                _add(tensors, piece, part, problems)
        elif (first := first_of.setdefault(_place(key, value, value), key)) != key:
            aliases[key] = first
        else:
            piece = Piece(name=key, dtype=dtype_name(value.dtype), global_shape=tuple(value.shape))
            _add(tensors, piece, value, problems)
    if problems:
        raise CheckpointError(*problems)
    return Held(tensors=tensors, aliases=aliases)


def _problem(key: object, value: object) -> str | None:
    """Why an entry is neither a tensor by name nor by piece."""
    if not isinstance(key, str | Piece):
        return f"key {key!r} is a {type(key).__name__}; tensors are named by a string or a Piece"
    name = key if isinstance(key, str) else str(key)
    if not name.isascii() and name.encode(errors="replace").decode() != name:
        return f"{name!r} holds half of a surrogate pair, which no file can hold; rename it"
    if not isinstance(value, torch.Tensor):
        return (
            f"{name!r} is a {type(value).__name__}, not a tensor; JSON values go into extra, and nested dicts "
            "are to be flattened"
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return f"{name!r} has layout {value.layout}; dense (strided) tensors can be saved: convert it (to_dense())"
    if value.is_meta:
        return f"{name!r} is on the meta device and has no values; give it memory first (to_empty())"
    if dtype_name(value.dtype) not in ITEMSIZE_BYTES:
        return f"{name!r} has dtype {value.dtype}, which a checkpoint cannot hold; view it as torch.uint8"
    return None


def _place(name: str, tensor: torch.Tensor, local: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of one tensor; what holds no memory shares none."""
    if local.numel() == 0:
        return (name,)
    memory = (local.data_ptr(), local.dtype, local.device, tuple(tensor.shape), tuple(local.shape), local.stride())
    return (*memory, local.is_conj(), local.is_neg())


def _add(tensors: dict[Piece, torch.Tensor], piece: Piece, tensor: torch.Tensor, problems: list[str]) -> None:
    """Put a piece into its plainest form: no run that is the whole box, n-d without a run, flat with one."""
    if piece.run is not None and piece.num_elements == math.prod(piece.shape):
        piece = Piece(
            name=piece.name,
            dtype=piece.dtype,
            global_shape=piece.global_shape,
            offset=piece.offset,
            shape=piece.shape,
        )
    shape = piece.shape if piece.run is None else (piece.num_elements,)
    if tuple(tensor.shape) not in (shape, (piece.num_elements,)):
        problems.append(
            f"{piece} has {piece.num_elements} elements, but its tensor has shape {tuple(tensor.shape)}; give it "
            f"in the shape {shape} or flat"
        )
    elif dtype_name(tensor.dtype) != piece.dtype:
        problems.append(f"{piece} is of dtype {piece.dtype}, but its tensor of {dtype_name(tensor.dtype)}")
    elif not math.prod(piece.global_shape):
        whole = Piece(name=piece.name, dtype=piece.dtype, global_shape=piece.global_shape)
        tensors[whole] = tensor.detach().reshape(piece.global_shape)
    elif piece in tensors:
        problems.append(f"{piece} is given twice")
    elif tensor.numel():
        tensors[piece] = tensor.detach().view(shape)


def check_json(value: object, what: str) -> None:
    """Raise CheckpointError, which names every place, unless `value` comes back from JSON as it is."""
    if problems := list(_json_problems(value, what)):
        raise CheckpointError(*problems)


def _json_problems(value: object, place: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, str):
                yield from _json_problems(each, f"{place}[{key!r}]")
            else:
                yield f"{place} has the key {key!r}; keys of JSON objects are strings"
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _json_problems(each, f"{place}[{at}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        hint = "save tensors as part of the state" if isinstance(value, torch.Tensor) else "give JSON values"
        yield f"{place} is a {type(value).__name__}, which JSON cannot hold; {hint}"


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of flat bytes on the CPU."""
    array: Any = flat.numpy()  # whose stubs do not say that it is a buffer
    return memoryview(array)
