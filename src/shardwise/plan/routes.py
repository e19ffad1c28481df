"""Routes: which holder gives which elements of a tensor to whom. The value that `plan_reshard` makes, with its text."""

import json
import re
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from shardwise.errors import PlanError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Box, Move, Piece, moves

__all__ = ["PieceAt", "ReshardPlan", "Route", "Share"]


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
    """How tensors go that are of one dtype and shape, and lie alike on both sides."""

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
        (taken,), (put,) = moves(source, chosen), moves(chosen, target)
        return [Move(box.shape, taken.source, put.target)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """Every tensor's route from where it is held to where it is wanted. Made by `plan_reshard`, for all ranks at once.

    A tensor of which nobody wants an element has none.
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

    def reversed(self) -> "ReshardPlan":
        """The way back, in which elements that several targets got meet again. Dtypes are the same on both sides."""
        return replace(self, routes=tuple(route.reversed() for route in self.routes))

    def text(self) -> str:
        """A heading, the routes, and a line per tensor. `parse` reads it.

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

    @classmethod
    def parse(cls, text: str) -> Self:
        """The plan that `text` was written from. Raises PlanError naming the first line that is not understood."""
        reading = _PlanReader(text)
        num_ranks, max_bytes = reading.heading
        return cls(
            num_ranks=num_ranks, max_bytes=max_bytes, routes=tuple(reading.routes), tensors=tuple(reading.tensors)
        )


def _in_box(box: Box | None) -> str:
    if box is None:
        return ""
    return f" in [{', '.join(f'{start}:{stop}' for start, stop in zip(box.offset, box.stop, strict=True))}]"


_HEADING = re.compile(r"reshard: (\d+) ranks, at most (\d+) bytes of messages")
_ROUTE = re.compile(r"route: (\w+) of shape \[([\d, ]*)\]")
_HELD = re.compile(r"  held by (\d+): \[([\d:, ]*)\](?: run (\d+):(\d+))?")
_WANTED = re.compile(r"  wanted by (\d+) as (\w+): \[([\d:, ]*)\](?: run (\d+):(\d+))?")
_SHARE = re.compile(r"  (\d+) -> (\d+): (\d+) elements(?: in \[([\d:, ]*)\])?")
_TENSOR = re.compile(r"tensor (\".*\"): route (\d+)")


class _PlanReader:
    """The text of a plan, read line by line."""

    def __init__(self, text: str) -> None:
        self.heading = (0, 0)
        """Number of ranks, and of bytes."""
        self.routes: list[Route] = []
        self.tensors: list[tuple[str, int]] = []
        self._held: list[PieceAt] = []
        self._wanted: list[PieceAt] = []
        self._shares: list[Share] = []
        self._route: tuple[str, tuple[int, ...]] | None = None
        for number, line in enumerate(text.splitlines() or [""], 1):
            try:
                understood = self._take_heading(line) if number == 1 else self._take(line)
            except ValueError:  # PlanError among them
                understood = False
            if not understood:
                raise PlanError(f"line {number} of the reshard is not understood: {line!r}")
        self._close()

    def _take_heading(self, line: str) -> bool:
        found = _HEADING.fullmatch(line)
        if found is not None:
            self.heading = int(found[1]), int(found[2])
        return found is not None

    def _take(self, line: str) -> bool:
        if found := _ROUTE.fullmatch(line):
            self._close()
            self._route = found[1], _numbers(found[2])
        elif found := _TENSOR.fullmatch(line):
            self._close()
            self.tensors.append((json.loads(found[1]), int(found[2])))
            return int(found[2]) < len(self.routes)
        elif self._route is None:
            return False
        elif found := _HELD.fullmatch(line):
            self._held.append(PieceAt(int(found[1]), self._piece(self._route[0], *found.groups()[1:])))
        elif found := _WANTED.fullmatch(line):
            self._wanted.append(PieceAt(int(found[1]), self._piece(*found.groups()[1:])))
        elif found := _SHARE.fullmatch(line):
            box = None if found[4] is None else Box(*_bounds(found[4]))
            self._shares.append(Share(int(found[1]), int(found[2]), int(found[3]), box))
        else:
            return False
        return True

    def _piece(self, dtype: str, bounds: str, start: str | None, stop: str | None) -> Piece:
        assert self._route is not None
        offset, shape = _bounds(bounds)
        run = None if start is None or stop is None else (int(start), int(stop))
        return Piece(name="", dtype=dtype, global_shape=self._route[1], offset=offset, shape=shape, run=run)

    def _close(self) -> None:
        """End the route that is begun."""
        if self._route is not None:
            dtype, shape = self._route
            held, wanted, shares = tuple(self._held), tuple(self._wanted), tuple(self._shares)
            self.routes.append(Route(dtype=dtype, global_shape=shape, held=held, wanted=wanted, shares=shares))
        self._route = None
        self._held, self._wanted, self._shares = [], [], []


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(", "))) if text else ()


def _bounds(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a box that is written `0:2, 3:8`."""
    pairs = [tuple(map(int, each.split(":"))) for each in text.split(", ")] if text else []
    return tuple(start for start, _ in pairs), tuple(stop - start for start, stop in pairs)
