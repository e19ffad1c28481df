"""Reshard plans: which holder gives which elements of a tensor to whom. Made by `plan_reshard`, with a text.

Batches of a reshard: what travels together, so that no rank has more than the plan's bytes of messages in memory.

    rank 0   start 0 | start 1 | finish 0 | start 2 | finish 1 | ...

Two batches are under way at a time, each with messages out and in: a batch has a quarter of the bytes for either. A
tensor that needs more is cut: each batch has as large a part of all its shares, so that all of its ranks are busy. A
rank that has nothing in a batch goes on to its next one.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwise.plan.dtypes import ALIGNMENT_BYTES, aligned, itemsize_bytes
from shardwise.space import Box, Move, Piece, moves
from shardwise.space.pieces import taken_in_order


class PieceAt(NamedTuple):
    """A rank, and a piece that it holds or wants. The piece has no name: it is one of any tensor of the route."""

    rank: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Share:
    """What one holder gives to one target."""

    source: int
    """Position in the route's `held`."""
    target: int
    """Position in the route's `wanted`."""
    num_elements: int
    box: Box | None = None
    """In coordinates of the tensor, and within one box of either piece; None is all that both pieces have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The moves of tensors of one dtype and shape, with equal pieces on both sides."""

    dtype: str
    """In which the tensor is held."""
    global_shape: tuple[int, ...]
    held: tuple[PieceAt, ...]
    """In rank order; on a rank in the order in which it holds its pieces of the tensor."""
    wanted: tuple[PieceAt, ...]
    """In rank order; on a rank in the order in which it wants its pieces of the tensor."""
    shares: tuple[Share, ...]
    """In the order of the targets."""

    def ranks(self, share: Share) -> tuple[int, int]:
        """The rank that gives, and the one that gets."""
        return self.held[share.source].rank, self.wanted[share.target].rank

    def wire_dtype(self, share: Share) -> str:
        """The dtype in which elements travel: the target's where that is narrower, else the source's."""
        target = self.wanted[share.target].piece.dtype
        return target if itemsize_bytes(target) < itemsize_bytes(self.dtype) else self.dtype

    def reversed(self) -> "Route":
        """The way back: every share goes to where it came from."""
        shares = tuple(replace(share, source=share.target, target=share.source) for share in self.shares)
        return replace(self, held=self.wanted, wanted=self.held, shares=shares)

    def moves(self, share: Share) -> list[Move]:
        """Copies of the share's elements from the storage of its source to that of its target."""
        source, target = self.held[share.source].piece, self.wanted[share.target].piece
        if share.box is None:
            return moves(source, target)
        box = share.box
        chosen = Piece(
            name=source.name, dtype=self.dtype, global_shape=self.global_shape, offset=box.offset, shape=box.shape
        )
        # The box is within one box of either piece, so that it is one move out of the one and one into the other.
        (taken,), (put,) = moves(source, chosen), moves(chosen, target)
        return [Move(box.shape, taken.source, put.target)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """Every tensor's route from where it is held to where it is wanted. Made by `plan_reshard`, for all ranks at once.

    A tensor that no rank wants has none.
    """

    num_ranks: int
    max_bytes: int
    """How many bytes of messages a rank has in memory at most."""
    routes: tuple[Route, ...]
    tensors: tuple[tuple[str, int], ...]
    """Name and position in `routes`, in the order in which they travel."""

    def sent_bytes(self) -> list[int]:
        """The bytes that each rank sends to others."""
        sent = [0] * self.num_ranks
        by_route = [self._sent_bytes_of(route) for route in self.routes]
        for _, at in self.tensors:
            for rank, num_bytes in by_route[at]:
                sent[rank] += num_bytes
        return sent

    def _sent_bytes_of(self, route: Route) -> list[tuple[int, int]]:
        sent = []
        for share in route.shares:
            giver, taker = route.ranks(share)
            if giver != taker:
                sent.append((giver, share.num_elements * itemsize_bytes(route.wire_dtype(share))))
        return sent

    def needed_bytes(self) -> int:
        """The bytes of what ranks want and do not hold: each element once per rank, in the narrower dtype."""
        by_route = [_needed_bytes_of(route) for route in self.routes]
        return sum(by_route[at] for _, at in self.tensors)

    def casts(self) -> list[tuple[str, str]]:
        """The dtypes from and to which something is cast, each pair once."""
        wanted = {
            (route.dtype, route.wanted[share.target].piece.dtype) for route in self.routes for share in route.shares
        }
        return sorted(pair for pair in wanted if pair[0] != pair[1])

    def reversed(self) -> "ReshardPlan":
        """The way back, in which elements that several targets got meet again. Dtypes are the same on both sides."""
        return replace(self, routes=tuple(route.reversed() for route in self.routes))

    def text(self) -> str:
        """A heading, the routes, and a line per tensor.

        `0 -> 2: 16 elements` says that the first of the places that hold gives so many to the third that wants.
        """
        lines = [f"reshard: {self.num_ranks} ranks, at most {self.max_bytes} bytes of messages"]
        for route in self.routes:
            lines.append(f"route: {route.dtype} of shape {list(route.global_shape)}")
            lines += [f"  held by {rank}: {piece}" for rank, piece in route.held]
            lines += [f"  wanted by {rank} as {piece.dtype}: {piece}" for rank, piece in route.wanted]
            lines += [
                f"  {share.source} -> {share.target}: {share.num_elements} elements{_in_box(share.box)}"
                for share in route.shares
            ]
        lines += [f"tensor {json.dumps(name)}: route {at}" for name, at in self.tensors]
        return "\n".join(lines) + "\n"


def _needed_bytes_of(route: Route) -> int:
    num_bytes = 0
    known: dict[int, list[Piece]] = {}
    for rank, piece in route.held:
        known.setdefault(rank, []).append(piece)
    for rank, piece in route.wanted:
        there = known.setdefault(rank, [])
        lacking = taken_in_order(piece, there)[1] if there else piece.boxes()
        itemsize = min(itemsize_bytes(piece.dtype), itemsize_bytes(route.dtype))
        num_bytes += sum(box.num_elements for box in lacking) * itemsize
        # Also two pieces of one rank may have an element in common, which it needs once.
        there.append(piece)
    return num_bytes


def _in_box(box: Box | None) -> str:
    if box is None:
        return ""
    return f" in [{', '.join(f'{start}:{stop}' for start, stop in zip(box.offset, box.stop, strict=True))}]"


_WAYS = 4
"""In and out, for each of two batches."""

MIN_MAX_BYTES = _WAYS * ALIGNMENT_BYTES
"""One element of the widest dtype each way, in two batches."""


@dataclass(frozen=True, slots=True)
class Lot:
    """One of equal parts of every share of a tensor, or of one of its shares."""

    tensor: int
    """Position in the plan's `tensors`."""
    part: int = 0
    num_parts: int = 1
    share: int | None = None
    """Position in the route's `shares`; None is all of them."""

    def bounds(self, num_elements: int) -> tuple[int, int]:
        """The first element of the part of a share that has so many, and the element after its last."""
        return num_elements * self.part // self.num_parts, num_elements * (self.part + 1) // self.num_parts


def message_bytes(num_elements: int, dtype: str) -> int:
    """The bytes of so many elements in a message."""
    return aligned(num_elements * itemsize_bytes(dtype))


_Traffic = Sequence[tuple[int, int, int]]
"""(rank, bytes out, bytes in)"""

_Item = tuple[int | None, int, int, _Traffic]
"""Share, part, number of parts, and what it adds to the messages of ranks."""


def batches_of(plan: ReshardPlan, *, in_order: bool = False) -> Iterator[list[Lot]]:
    """Return what travels together, batch by batch; the same for all ranks.

    in_order: all of a share goes before anything of the next share of the same tensor.
    """
    # A quarter of the bytes, whole alignments of it: messages are aligned delivery by delivery.
    limit = plan.max_bytes // _WAYS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    items: dict[int, list[_Item]] = {}
    out, into = [0] * plan.num_ranks, [0] * plan.num_ranks
    batch: list[Lot] = []
    for tensor, (_, at) in enumerate(plan.tensors):
        if at not in items:
            # Alike tensors are cut alike: it is found once per route.
            items[at] = _items(plan.routes[at], limit, in_order=in_order)
        for share, part, num_parts, traffic in items[at]:
            # One full rank ends the batch for all: batches are the same everywhere, without a word between ranks.
            if any(out[rank] + sent > limit or into[rank] + received > limit for rank, sent, received in traffic):
                yield batch
                batch = []
                out, into = [0] * plan.num_ranks, [0] * plan.num_ranks
            for rank, sent, received in traffic:
                out[rank] += sent
                into[rank] += received
            batch.append(Lot(tensor, part, num_parts, share))
    if batch:
        yield batch


def _items(route: Route, limit: int, *, in_order: bool) -> list[_Item]:
    """The parts of a tensor that fit into a batch."""
    every = range(len(route.shares))
    # Sums depend on the order of their terms, so that with `in_order` one share after the other is cut.
    if not in_order and (items := _cut(route, every, None, limit)):
        return items
    items = []
    for share in every:
        parts = _cut(route, [share], share, limit)
        assert parts, "one element fits: a plan has at least MIN_MAX_BYTES"
        items += parts
    return items


def _cut(route: Route, shares: Sequence[int], share: int | None, limit: int) -> list[_Item]:
    """Some shares in as few equal parts as fit into a batch; none where even single elements do not."""
    most = max((route.shares[at].num_elements for at in shares), default=1)
    if not _fits(_traffic(route, shares, Lot(0, most - 1, most)), limit):  # the last part has one of every share
        return []
    whole = _traffic(route, shares, Lot(0))
    num_parts = max((-(-max(sent, received) // limit) for _, sent, received in whole), default=1)
    while (items := _parts(route, shares, share, min(num_parts, most), limit)) is None:
        # Rounding may make a part a little too large. More parts are tried in steps of an eighth: the exact number is
        # not worth a search one by one.
        num_parts += max(1, num_parts // 8)
    return items


def _parts(route: Route, shares: Sequence[int], share: int | None, num_parts: int, limit: int) -> list[_Item] | None:
    """Some shares in so many parts; None where one of them does not fit into a batch."""
    items: list[_Item] = []
    for part in range(num_parts):
        traffic = _traffic(route, shares, Lot(0, part, num_parts))
        if not _fits(traffic, limit):
            return None
        items.append((share, part, num_parts, traffic))
    return items


def _fits(traffic: _Traffic, limit: int) -> bool:
    return all(sent <= limit and received <= limit for _, sent, received in traffic)


def _traffic(route: Route, shares: Sequence[int], lot: Lot) -> _Traffic:
    sums: dict[int, list[int]] = {}
    for at in shares:
        share = route.shares[at]
        giver, taker = route.ranks(share)
        if giver != taker:
            start, stop = lot.bounds(share.num_elements)
            num_bytes = message_bytes(stop - start, route.wire_dtype(share))
            sums.setdefault(giver, [0, 0])[0] += num_bytes
            sums.setdefault(taker, [0, 0])[1] += num_bytes
    return [(rank, sent, received) for rank, (sent, received) in sums.items()]
