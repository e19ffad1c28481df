"""State pieces: any state as pieces with tensors, checked before anybody reads or writes one.

    state                 what this rank has of it
    {"w": Tensor}         one piece, all of `w`; a second name of the same memory is a tie
    {"w": DTensor}        the pieces that the mesh gives to this rank
    {Piece: Tensor}       these, in their plainest form
    an object             what its `state()` gives, with its settings and ties

A load checks also that the tensors can be written: that is found out before the first of them is.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.contents import unwritable
from shardwise.checkpoint.safetensors_files import cast_through
from shardwise.checkpoint.states import State, Stateful
from shardwise.comm.local_tensors import (
    dtype_name,
    extent,
    is_dtensor,
    local_pieces,
    local_tensor,
    span_elements,
    torch_dtype,
)
from shardwise.errors import CheckpointError, in_words
from shardwise.moving.copies import parts_of
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Move, Piece
from shardwise.space.pieces import tensor_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank has of a state."""

    tensors: dict[Piece, torch.Tensor]
    """Pieces with elements, and whole tensors without; in the piece's box shape with any strides, or flat for a run."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names that share the storage of another: alias -> name."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The object's words on its tensors."""
    casts: Mapping[Piece, Sequence[str]] = field(default_factory=dict)
    """Pieces whose tensors are of another dtype, and what their elements are cast to, one after the other, when they
    are written or sent. The last is the piece's."""

    def piece_with(self, part: Piece) -> Piece:
        """The piece that this rank holds and that `part` is, or was cut from as a part of a replica."""
        if part in self.tensors:
            return part
        return next(
            each
            for each in self.tensors
            if (each.name, each.offset, each.shape) == (part.name, part.offset, part.shape)
            and each.elements.intersect(part.elements) == part.elements
        )

    def dtypes_of(self, piece: Piece) -> list[torch.dtype]:
        """What the elements of a piece are cast to, one after the other."""
        return [torch_dtype(each) for each in self.casts.get(piece, ())]

    def parts_of(self, piece: Piece, moves: Sequence[Move]) -> Iterable[torch.Tensor]:
        """What each of some moves takes of a piece, in the dtype that the piece says."""
        dtypes = self.dtypes_of(piece)
        return (cast_through(part, dtypes) for part in parts_of(self.tensors[piece], moves))


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
        # All that decides which part of the tensor is here. The memory may be another one: only the piece is
        # remembered.
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
            # To find the pieces of a DTensor asks torch for the mesh, the placements and the strides: a save of
            # thousands of parameters every few minutes asks once.
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
            piece = replace(piece, run=None)
        shape = piece.shape if piece.run is None else (piece.num_elements,)
        if tuple(tensor.shape) not in (shape, (piece.num_elements,)):
            self.problems.append(
                f"{piece} has {piece.num_elements} elements, but its tensor has shape {tuple(tensor.shape)}; give it "
                f"in the shape {shape} or flat"
            )
        elif dtype_name(tensor.dtype) != piece.dtype:
            self.problems.append(f"{piece} is of dtype {piece.dtype}, but its tensor of {dtype_name(tensor.dtype)}")
        # A tensor without elements has no part that one rank could have alone: every rank holds it whole.
        elif not math.prod(piece.global_shape):
            self.tensors[tensor_of(piece)] = tensor.detach().reshape(piece.global_shape)
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
    if why := unwritable(name):
        return why
    if not isinstance(value, torch.Tensor):
        return (
            f"{name!r} is a {type(value).__name__}, not a tensor; JSON values go into extra, and nested dicts have to "
            "be flattened"
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
    # Shape and strides count: a transposed view of a parameter has its memory, and is a tensor of its own.
    memory = (local.data_ptr(), local.dtype, local.device, tuple(tensor.shape), tuple(local.shape), local.stride())
    return (*memory, local.is_conj(), local.is_neg())


def check_targets(held: Held) -> None:
    """Raise CheckpointError, with every finding, for targets that cannot be written, or whose elements share memory."""
    problems: list[str] = []
    spans: dict[torch.device, list[tuple[int, int, Piece]]] = {}
    is_read_only = _read_only_memory()
    for piece, tensor in held.tensors.items():
        num_elements = tensor.numel()
        if (problem := _why_unwritable(piece, tensor)) is not None:
            problems.append(problem)
        elif num_elements and tensor.is_cpu and type(tensor) is torch.Tensor and is_read_only(tensor.data_ptr()):
            problems.append(f"{piece} would be read into read-only memory, such as a mapped file; clone() it")
        elif not tensor.is_contiguous() and _shares_within(tensor):
            problems.append(
                f"{piece} would be read into a tensor of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}, whose elements share memory (expand()); clone() it"
            )
        # Only tensors without gaps are compared. The extents of two with gaps may interlock, as columns of one matrix
        # do, and have no byte in common.
        elif num_elements and span_elements(tensor) == num_elements:
            spans.setdefault(tensor.device, []).append((*extent(tensor), piece))
    problems += [
        f"{one[2]} and {other[2]} would be read into memory that they share; give each tensor its own memory"
        for found in spans.values()
        for one, other in pairwise(sorted(found, key=itemgetter(0)))
        if other[0] < one[1]
    ]
    if problems:
        raise CheckpointError(*problems)


def _why_unwritable(piece: Piece, tensor: torch.Tensor) -> str | None:
    """Why torch would not write to a tensor."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return (
            f"{piece} would be read into an inference tensor, which torch changes in inference mode only. Load within "
            "torch.inference_mode(), or clone() it outside"
        )
    if type(tensor) is not torch.Tensor:  # a kind of tensor may refuse anything: write nothing to it
        try:
            tensor[...].reshape(-1)[:0].copy_(torch.empty(0, dtype=tensor.dtype))
        except Exception as error:
            return (
                f"{piece} would be read into a {type(tensor).__name__}, which cannot be written: "
                f"{in_words(error)}; give a plain tensor"
            )
    return None


def _shares_within(tensor: torch.Tensor) -> bool:
    """Whether two indices of a tensor are one place in memory."""
    if span_elements(tensor) < tensor.numel():
        return True
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    end = 1
    for stride, size in dims:
        if stride < end:  # rows that interlock: only their places tell
            break
        end += (size - 1) * stride
    else:
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in dims:
        places = (places[:, None] + torch.arange(size) * stride).reshape(-1)
    return len(torch.unique(places)) < tensor.numel()


def _read_only_memory() -> Callable[[int], bool]:
    """Tells whether the byte at an address is mapped for reading only: a store there would end the program."""
    # The kernel's table says it. To write the byte and see would take away what another thread writes meanwhile.
    maps = Path("/proc/self/maps").read_bytes()
    found = re.findall(rb"^([0-9a-f]+)-([0-9a-f]+) .-", maps, re.MULTILINE)  # in order of the addresses
    starts, stops = ([int(each[end], 16) for each in found] for end in (0, 1))

    def is_read_only(address: int) -> bool:
        at = bisect_right(starts, address)
        return at > 0 and address < stops[at - 1]

    return is_read_only
