"""Held: any state as pieces with tensors, checked before anybody reads or writes one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.states import State, Stateful
from shardwise.comm.local_tensors import dtype_name, is_dtensor, local_pieces, local_tensor
from shardwise.errors import CheckpointError, in_words
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Piece

__all__ = ["Held", "KnownDTensors", "bytes_of", "hold", "place_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank has of a state."""

    tensors: dict[Piece, torch.Tensor]
    """Pieces with elements, and whole tensors without; in the piece's box shape with any strides, or flat for a run."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names that share the storage of another: alias -> name."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the object says beside its tensors."""
    casts: Mapping[Piece, Sequence[str]] = field(default_factory=dict)
    """Pieces whose tensors are of another dtype, and what their elements are cast to, one after the other, when they
    are written or sent; the last is the piece's."""


class KnownDTensors:
    """The pieces of DTensors that were held before: to find them takes longer than to see that they still hold."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[object, ...], Piece]] = {}

    def find(self, name: str, tensor: Any, local: torch.Tensor) -> Piece | None:
        """The one piece that `local`, the local tensor of a DTensor, is, if that is known."""
        known = self._found.get(name)
        return known[1] if known is not None and known[0] == self._key(tensor, local) else None

    def remember(self, name: str, tensor: Any, local: torch.Tensor, piece: Piece) -> None:
        """That `local` is this piece."""
        self._found[name] = self._key(tensor, local), piece

    def _key(self, tensor: Any, local: torch.Tensor) -> tuple[object, ...]:
        return (tensor.placements, tensor.device_mesh, tensor.shape, local.shape, local.dtype, local.device)


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
    collection = _Collection(known)
    for key, value in state.items():
        collection.take(key, value)
    if collection.problems:
        raise CheckpointError(*collection.problems)
    return Held(tensors=collection.tensors, aliases=collection.aliases)


class _Collection:
    """Entries of a state as they become pieces, ties and problems."""

    def __init__(self, known: KnownDTensors) -> None:
        self.tensors: dict[Piece, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.problems: list[str] = []
        self._known = known
        self._first_of: dict[tuple[object, ...], str] = {}

    def take(self, key: Any, value: Any) -> None:
        """Take one entry, whatever it is."""
        if is_dtensor(value) and isinstance(key, str):
            local = local_tensor(value)
            piece = self._known.find(key, value, local)
            if piece is not None:  # nothing was wrong with it the last time
                if not self._is_tie(key, value, local):
                    self.tensors[piece] = local
                return
        if problem := _problem(key, value):
            self.problems.append(problem)
        elif isinstance(key, Piece):
            self._add(key, value)
        elif is_dtensor(value):
            if not self._is_tie(key, value, local):
                self._take_parts(key, value, local)
        elif not self._is_tie(key, value, value):
            self._add(Piece(name=key, dtype=dtype_name(value.dtype), global_shape=tuple(value.shape)), value)

    def _take_parts(self, name: str, tensor: Any, local: torch.Tensor) -> None:
        parts = local_pieces(name, tensor)
        for piece, part in parts:
            self._add(piece, part)
        if len(parts) == 1 and parts[0][0] in self.tensors and parts[0][0].shape == tuple(local.shape):
            self._known.remember(name, tensor, local, parts[0][0])

    def _is_tie(self, name: str, tensor: torch.Tensor, local: torch.Tensor) -> bool:
        """Whether another name of the same tensor came before; then it is noted."""
        first = self._first_of.setdefault(place_of(name, tensor, local), name)
        if first != name:
            self.aliases[name] = first
        return first != name

    def _add(self, piece: Piece, tensor: torch.Tensor) -> None:
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
            self.problems.append(
                f"{piece} has {piece.num_elements} elements, but its tensor has shape {tuple(tensor.shape)}; give it "
                f"in the shape {shape} or flat"
            )
        elif dtype_name(tensor.dtype) != piece.dtype:
            self.problems.append(f"{piece} is of dtype {piece.dtype}, but its tensor of {dtype_name(tensor.dtype)}")
        elif not math.prod(piece.global_shape):
            whole = Piece(name=piece.name, dtype=piece.dtype, global_shape=piece.global_shape)
            self.tensors[whole] = tensor.detach().reshape(piece.global_shape)
        elif piece in self.tensors:
            self.problems.append(f"{piece} is given twice")
        elif tensor.numel():
            self.tensors[piece] = tensor.detach().view(shape)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


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
    try:
        problem = _no_elements(value)
    except Exception as error:  # of a kind of tensor that refuses to be looked at
        problem = f"refuses to be read ({in_words(error)}); give a plain tensor"
    return None if problem is None else f"{name!r} {problem}"


def _no_elements(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no elements in memory that a file could hold; raises anything for kinds that hide them."""
    if tensor.is_nested or tensor.is_quantized:
        what = "nested" if tensor.is_nested else "quantized"
        return f"is {what}; plain dense tensors can be saved: take it apart"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}; dense (strided) tensors can be saved: convert it (to_dense())"
    if tensor.is_meta:
        return "is on the meta device and has no values; give it memory first (to_empty())"
    if dtype_name(tensor.dtype) not in ITEMSIZE_BYTES:
        return f"has dtype {tensor.dtype}, which a checkpoint cannot hold; view it as torch.uint8"
    if tensor.numel() and tensor.data_ptr() == 0 and type(tensor) in _PLAIN:
        return "has no memory at present, which may have been given back (resize_); bring it back first"
    return None


def place_of(name: str, tensor: torch.Tensor, local: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of one tensor; what holds no memory shares none."""
    if local.numel() == 0:
        return (name,)
    memory = (local.data_ptr(), local.dtype, local.device, tuple(tensor.shape), tuple(local.shape), local.stride())
    return (*memory, local.is_conj(), local.is_neg())


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of flat bytes on the CPU."""
    array: Any = flat.numpy()  # whose stubs do not say that it is a buffer
    return memoryview(array)
