"""Rewritten: where the elements of a piece are on the other side of a rewrite, as views of the tensor that holds it.

Figure 1. A rank wants rows 1 and 2 of `qkv` (3, 4), which the rewrite makes of `q`, `k` and `v` (1, 4) each. What it
asks for are pieces of `k` and `v`, and the tensors that take them are views of the one that it wants filled, so that
whoever reads knows nothing of rewrites::

    wanted                 asked for             filled through
    qkv[1:3, 0:4]    ->    k[0:1, 0:4]           tensor[0:1]
                           v[0:1, 0:4]           tensor[1:2]

The other way round, what a rank holds of `k` is a piece of `qkv`. A view may be transposed, or step over elements.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.held import bytes_of
from shardwise.checkpoint.transfers import cast_through
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.comm.dtypes import torch_dtype
from shardwise.errors import PlanError
from shardwise.plan import Plan
from shardwise.rewrite import Fragment, TensorMeta
from shardwise.rewrite.casts import keeps_values
from shardwise.space import Box, Piece, Run
from shardwise.space.boxes import row_major_strides
from shardwise.space.moves import blocks_of

__all__ = [
    "Counterpart",
    "Late",
    "Value",
    "agree_on_rewrite",
    "counterparts",
    "differences",
    "hops",
    "metas_of_contents",
    "metas_of_pieces",
    "ranks_along_tp",
    "room_for",
    "value_of",
]

T = TypeVar("T")

_CHUNK_BYTES = 16 << 20
"""So much is cast at a time, were its elements as wide as any."""

_WIDEST_BYTES = 16


def agree_on_rewrite(channel: Channel, check: Callable[[], T]) -> T:
    """What `check` gives, on every rank the same; its RewriteError comes with all problems on every rank."""
    with agreed(channel, purpose="verdict on a rewrite"):
        return check()


def metas_of_contents(contents: Contents) -> dict[str, TensorMeta]:
    """What a rewrite has to know of the tensors of a checkpoint."""
    num_ranks = ranks_along_tp(contents.settings)
    pieces_of = {name: [stored.piece for stored in each.pieces] for name, each in contents.tensors.items()}
    if num_ranks is not None and num_ranks > 1 and all(len(_boxes(each)) <= 1 for each in pieces_of.values()):
        # Ranks along tp always cut something: these tensors were put together when they were saved.
        return {
            name: TensorMeta(each.shape, each.dtype, (0,) * len(each.shape)) for name, each in contents.tensors.items()
        }
    return {
        name: TensorMeta(each.shape, each.dtype, _degrees(each.shape, pieces_of[name], num_ranks))
        for name, each in contents.tensors.items()
    }


def ranks_along_tp(settings: Mapping[str, Any]) -> int | None:
    """Over how many ranks the engine that holds or has saved a state cuts tensors into boxes.

    None where no engine did, or where a rewrite has made other tensors of its own: their boxes may come from anything.
    Data parallelism cuts the tensors of an engine into runs, never into boxes.
    """
    if not isinstance(text := settings.get("plan"), str) or "rewrite" in settings:
        return None
    try:
        return Plan.parse(text).mesh.tp
    except PlanError:  # of a version that knows other settings
        return None


def metas_of_pieces(pieces: Iterable[Piece], *, num_ranks: int | None) -> dict[str, TensorMeta]:
    """What a rewrite has to know of the tensors of which these are all pieces, in the order in which they come.

    num_ranks: see `ranks_along_tp`.
    """
    tensors: dict[str, list[Piece]] = {}
    for piece in pieces:
        tensors.setdefault(piece.name, []).append(piece)
    return {
        name: TensorMeta(held[0].global_shape, held[0].dtype, _degrees(held[0].global_shape, held, num_ranks))
        for name, held in tensors.items()
    }


def _boxes(pieces: Iterable[Piece]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(piece.offset, piece.shape) for piece in pieces if 0 not in piece.shape}


def _degrees(shape: tuple[int, ...], pieces: Iterable[Piece], num_ranks: int | None) -> tuple[int, ...]:
    """For how many ranks along `tp` each dim is laid out; 0 where that is not known.

    A rank that has one box of an even cut has what is fused for it. A rank with several has a part of each of several
    stretches, which lie one after the other in the whole tensor as they do without tensor parallelism: degree 1.
    """
    boxes = _boxes(pieces)
    if len(boxes) <= 1:
        return ()
    degrees = []
    for dim, whole in enumerate(shape):
        parts = {(offset[dim], size[dim]) for offset, size in boxes}
        sizes = {size for _, size in parts}
        is_even = len(sizes) == 1 and sizes.pop() * len(parts) == whole
        if len(parts) == 1 or (num_ranks is not None and len(parts) > num_ranks):
            degrees.append(1)
        else:
            degrees.append(len(parts) if len(parts) == num_ranks and is_even else 0)
    return tuple(degrees)


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A piece of the other side, and where its elements are in the tensor of a piece of this side."""

    piece: Piece
    """In the dtype that it has on the other side."""
    dtypes: tuple[str, ...]
    """What a value passes through from the source of the rewrite to its target, both included."""
    fragment: Fragment | None = None
    """The elements in a block of this side; None: the tensor of this side holds the piece as it is."""
    origin: tuple[int, ...] = ()
    """Where in its tensor the block begins."""
    stretch: tuple[int, tuple[int, ...]] | None = None
    """Of the flat tensor of a run: the element with which the block begins, and its shape; None: the whole tensor."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in the tensor that holds them, in the shape of the other piece (flat, where that is a run)."""
        if self.fragment is None:
            return tensor
        if self.stretch is not None:
            start, block = self.stretch
            tensor = tensor[start : start + math.prod(block)].view(block)
        strides = tensor.stride()
        first = int(tensor.storage_offset()) + self.fragment.view_start(strides, self.origin)
        return tensor.as_strided(self.fragment.shape, self.fragment.view_strides(strides), first)


Ask = Callable[[str, Box], Sequence[Fragment]]
"""`Checked.resolve` or `Checked.push`."""


def counterparts(piece: Piece, name: str, ask: Ask, others: Mapping[str, TensorMeta]) -> list[Counterpart]:
    """The pieces of the other side that have the elements of `piece`; what has no elements has none.

    name: what the tensor of the piece is called on this side of the rewrite. others: the tensors of the other side.
    """

    def of(fragment: Fragment, run: Run | None = None) -> Piece:
        meta = others[fragment.other]
        return Piece(
            name=fragment.other,
            dtype=meta.dtype,
            global_shape=meta.shape,
            offset=fragment.offset,
            shape=fragment.shape,
            run=run,
        )

    if not piece.num_elements:
        return []
    if piece.run is not None:
        fragments = ask(name, piece.box)
        if all(_keeps_order(each, piece.box) for each in fragments):
            return [Counterpart(of(each, piece.run), each.dtypes) for each in fragments]
    return [
        Counterpart(of(each), each.dtypes, each, offset, None if piece.run is None else (start, shape))
        for start, shape, offset in blocks_of(piece)
        for each in ask(name, Box(offset, shape))
    ]


def _keeps_order(fragment: Fragment, box: Box) -> bool:
    """Whether the other side has all elements of a box, in a box of its own, in the same order.

    A run of the one is the same run of the other then.
    """
    strides = zip(
        fragment.shape,
        fragment.view_strides(row_major_strides(box.shape)),
        row_major_strides(fragment.shape),
        strict=True,
    )
    return fragment.num_elements == box.num_elements and all(size == 1 or one == other for size, one, other in strides)


def hops(dtypes: Sequence[str]) -> tuple[str, ...]:
    """The dtypes of a chain without those in between that change no value.

    >>> hops(("bfloat16", "float32", "float16")), hops(("float32", "float16", "float32"))
    (('bfloat16', 'float16'), ('float32', 'float16', 'float32'))
    """
    kept = [dtypes[0]]
    for at, dtype in enumerate(dtypes[1:], 1):
        is_last = at == len(dtypes) - 1
        if dtype != kept[-1] and (is_last or not keeps_values(kept[-1], dtype)):
            kept.append(dtype)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Late:
    """Elements that are cast again once they have been read, because no single cast rounds them as their chain does."""

    room: torch.Tensor
    """Where they were read to; it may be `target` itself."""
    target: torch.Tensor
    dtypes: tuple[torch.dtype, ...]
    """What they are cast to from there, one after the other."""

    def finish(self) -> None:
        """Cast them, a part after the other."""
        if not self.target.dim():
            self.target.copy_(cast_through(self.room, self.dtypes))
            return
        row_bytes = _WIDEST_BYTES * self.target[0].numel()
        rows = max(1, _CHUNK_BYTES // row_bytes)
        for room, target in zip(self.room.split(rows), self.target.split(rows), strict=True):
            target.copy_(cast_through(room, self.dtypes))


def room_for(target: torch.Tensor, dtypes: Sequence[str]) -> tuple[torch.Tensor, Late | None]:
    """Where to read what passes through `dtypes` into `target`: mostly that itself, which a single cast fills.

    Otherwise the elements go where they lose nothing but what the first cast takes, and are cast on when all is read.
    """
    names = hops(dtypes)
    if len(names) <= 2:
        return target, None
    first, *others = map(torch_dtype, names[1:])
    if keeps_values(names[0], names[-1]):
        return target, Late(target, target, (first, *others))
    room = torch.empty(target.shape, dtype=first, device=target.device)
    return room, Late(room, target, tuple(others))


Value = tuple[str, str]
"""Bytes of an element in hexadecimal digits, and the element as people write it."""


def differences(groups: Iterable[Sequence[str]], values: Mapping[str, Value]) -> list[str]:
    """Findings about numbers of which a rewrite makes one, and that are not equal to the bit.

    groups: names of those that become one. values: by name; a group of which some are not known is compared among the
    others.
    """
    findings = []
    for group in groups:
        known = [(name, *values[name]) for name in group if name in values]
        if other := next((each for each in known if each[1] != known[0][1]), None):
            findings.append(
                f"{known[0][0]} is {known[0][2]} and {other[0]} is {other[2]}, and the rewrite makes one number of "
                f"{', '.join(group)}; they have to be equal"
            )
    return findings


def value_of(element: torch.Tensor) -> Value:
    """A tensor of one element, as `differences` takes it."""
    plain = element.detach().resolve_conj().resolve_neg().cpu().reshape(1).contiguous()
    return bytes_of(plain.view(torch.uint8)).hex(), str(plain.item())
