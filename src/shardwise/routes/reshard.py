"""Resharding: from who holds which pieces to who wants which, decided for all ranks at once.

[1] per tensor     which pieces meet which: the same for all tensors with equal pieces, so it is found once for them
[2] forced         where an element has one holder, or the rank itself holds it, there is nothing to choose
[3] free           tensors with replicas, the largest first: each share from the holder that has least to send
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import PlanError, few_of
from shardwise.plan.dtypes import ITEMSIZE_BYTES, is_complex, itemsize_bytes
from shardwise.routes.holders import Holders, holders_by_tensor
from shardwise.routes.reshard_plan import MIN_MAX_BYTES, PieceAt, ReshardPlan, Route, Share
from shardwise.space import Box, Piece

DEFAULT_MAX_BYTES = 64 << 20
"""How many bytes of messages a rank has in memory at most."""

_SHOWN_NAMES = 4
"""One finding about several tensors."""


def plan_reshard(
    sources: Sequence[Sequence[Piece]],
    targets: Sequence[Sequence[Piece]],
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    cast: bool = False,
) -> ReshardPlan:
    """Decide from which holder every rank gets every element that it wants.

    sources, targets: what each rank holds and wants, a list per rank; maybe nothing, maybe the same twice.
    cast: targets may be of other dtypes than what is held.
    An element comes from the rank itself where that holds it, else from the holder that has least to send.
    Raises PlanError, with every problem in it: names and elements without a holder, shapes and dtypes that differ.

    >>> rows = [Piece(name="w", dtype="int8", global_shape=(4, 2), offset=(at, 0), shape=(2, 2)) for at in (0, 2)]
    >>> whole = Piece(name="w", dtype="int8", global_shape=(4, 2))
    >>> print(plan_reshard([[rows[0]], [rows[1]], []], [[], [], [whole]]).text())
    reshard: 3 ranks, at most 67108864 bytes of messages
    route: int8 of shape [4, 2]
      held by 0: [0:2, 0:2]
      held by 1: [2:4, 0:2]
      wanted by 2 as int8: [0:4, 0:2]
      0 -> 0: 4 elements
      1 -> 0: 4 elements
    tensor "w": route 0
    <BLANKLINE>
    """
    if len(sources) != len(targets):
        raise PlanError(f"{len(sources)} ranks hold, and {len(targets)} want: give a list for each rank, maybe empty")
    if max_bytes < MIN_MAX_BYTES:
        raise PlanError(f"max_bytes is {max_bytes}; messages need at least {MIN_MAX_BYTES} bytes")
    held, wanted = holders_by_tensor(sources), holders_by_tensor(targets)
    kinds: dict[tuple[object, ...], _AlikeTensors] = {}
    kind_of: dict[str, _AlikeTensors] = {}
    problems: dict[str, list[str]] = {}
    for name, wants in wanted.items():
        holders = held.get(name) or Holders(())
        key = (tuple(map(_described, holders.entries())), tuple(map(_described, wants.entries())))
        # Most tensors of a model are cut like others: a model of thousands has a few dozen kinds.
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _kind(holders, wants, cast=cast)
        for finding in kind.findings:
            problems.setdefault(finding, []).append(name)
        # A tensor whose elements nobody wants does not travel.
        if kind.meetings:
            kind_of[name] = kind
    if problems:
        of = {finding: few_of(names, _SHOWN_NAMES, quotes=False) for finding, names in problems.items()}
        raise PlanError(*(f"{names}: {finding}" for finding, names in of.items()))
    chosen = _choose(kind_of, len(sources))
    # Numbered in the order of the tensors, not of the choices, so that the text of a plan reads from the top.
    routes: dict[int, int] = {}
    tensors = [(name, routes.setdefault(id(chosen[name]), len(routes))) for name in kind_of]
    by_id = {id(route): route for route in chosen.values()}
    return ReshardPlan(
        num_ranks=len(sources),
        max_bytes=max_bytes,
        routes=tuple(by_id[route] for route in routes),
        tensors=tuple(tensors),
    )


def _described(place: tuple[int, Piece]) -> tuple[object, ...]:
    """All but the name."""
    rank, piece = place
    return rank, piece.dtype, piece.global_shape, piece.offset, piece.shape, piece.run


@dataclass(frozen=True, slots=True)
class _NeededElements:
    """Elements that one target needs, and who could give them."""

    target: int
    num_elements: int
    num_bytes: int
    """That a message would have."""
    box: Box | None
    holders: tuple[tuple[int, int], ...]
    """(rank, position in what is held); one where there is nothing to choose."""
    is_local: bool


@dataclass(frozen=True, slots=True, eq=False)
class _AlikeTensors:
    """Tensors with equal pieces on both sides."""

    findings: tuple[str, ...]
    held: tuple[PieceAt, ...] = ()
    wanted: tuple[PieceAt, ...] = ()
    meetings: tuple[_NeededElements, ...] = ()

    @property
    def is_free(self) -> bool:
        return any(len(meeting.holders) > 1 for meeting in self.meetings)

    @property
    def num_bytes(self) -> int:
        return sum(meeting.num_bytes for meeting in self.meetings)

    def choose(self, load_bytes: list[int]) -> tuple[int, ...]:
        """A position in `held` for every meeting; what the holder sends is added to its load."""
        choice = []
        for meeting in self.meetings:
            rank, position = meeting.holders[0]
            if not meeting.is_local:
                if len(meeting.holders) > 1:
                    rank, position = min(meeting.holders, key=lambda holder: load_bytes[holder[0]])
                load_bytes[rank] += meeting.num_bytes
            choice.append(position)
        return tuple(choice)

    def route(self, choice: Sequence[int]) -> Route:
        shares = tuple(
            Share(source, meeting.target, meeting.num_elements, meeting.box)
            for source, meeting in zip(choice, self.meetings, strict=True)
        )
        piece = self.held[0].piece
        return Route(
            dtype=piece.dtype, global_shape=piece.global_shape, held=self.held, wanted=self.wanted, shares=shares
        )


def _choose(kind_of: Mapping[str, _AlikeTensors], num_ranks: int) -> dict[str, Route]:
    """A route for every tensor; those that go alike share theirs."""
    load_bytes = [0] * num_ranks
    routes: dict[tuple[int, tuple[int, ...]], Route] = {}
    # Found once per kind: a sum over all of its meetings does not belong into the key of a sort.
    facts = {id(kind): (kind.is_free, -kind.num_bytes) for kind in kind_of.values()}
    chosen = {}
    # Those without a choice have loaded their holders by the time that the others choose; of these the largest choose
    # first, and small ones even out what is left.
    for name in sorted(kind_of, key=lambda name: facts[id(kind_of[name])]):  # what is forced first
        kind = kind_of[name]
        key = (id(kind), kind.choose(load_bytes))
        if key not in routes:
            routes[key] = kind.route(key[1])
        chosen[name] = routes[key]
    return chosen


def _kind(held: Holders, wanted: Holders, *, cast: bool) -> _AlikeTensors:
    if findings := tuple(_differences(list(held.entries()), list(wanted.entries()), cast=cast)):
        return _AlikeTensors(findings)
    meetings: list[_NeededElements] = []
    lacking: list[str] = []
    for target, (rank, piece) in enumerate(wanted.entries()):
        met, left = held.cover(piece, taker=rank, turn=target)
        if left:
            lacking.append(_lacking(rank, piece, left))
        for at, num_elements, box in met:
            # The narrower dtype travels: a cast to fewer bytes is made by the giver, one to more by the taker.
            itemsize = min(itemsize_bytes(piece.dtype), itemsize_bytes(held.pieces[at].dtype))
            givers = tuple((held.ranks[entry], entry) for entry in held.givers(at, rank))
            meetings.append(
                _NeededElements(target, num_elements, num_elements * itemsize, box, givers, givers[0][0] == rank)
            )
    more = f"; so it is with {len(lacking) - 1} more of the pieces that are wanted" if len(lacking) > 1 else ""
    return _AlikeTensors(
        tuple(f"{finding}{more}" for finding in lacking[:1]),
        tuple(PieceAt(rank, _nameless(piece)) for rank, piece in held.entries()),
        tuple(PieceAt(rank, _nameless(piece)) for rank, piece in wanted.entries()),
        tuple(meetings),
    )


def _lacking(rank: int, piece: Piece, left: Sequence[Box]) -> str:
    missing = sum(box.num_elements for box in left)
    first = min(box.offset for box in left)
    return (
        f"rank {rank} wants {_nameless(piece)} of it, but no rank holds {missing} of its {piece.num_elements} "
        f"elements, the first at index {first}"
    )


def _differences(
    held: Sequence[tuple[int, Piece]], wanted: Sequence[tuple[int, Piece]], *, cast: bool
) -> Iterator[str]:
    """What of the descriptions does not fit together."""
    if not held:
        needing = [rank for rank, piece in wanted if piece.num_elements]
        if needing:
            yield f"rank {needing[0]} wants it, and no rank holds a tensor of this name"
        return
    first, source = held[0]
    for rank, piece in held:
        if piece.global_shape != source.global_shape or piece.dtype != source.dtype:
            yield (
                f"rank {first} holds it as {_tensor(source)}, but rank {rank} as {_tensor(piece)}; all pieces of a "
                "tensor have one dtype and shape"
            )
            return
    findings: dict[str, str] = {}
    for rank, piece in wanted:
        if piece.global_shape != source.global_shape:
            findings.setdefault(
                "shape",
                f"it is held in shape {list(source.global_shape)}, but rank {rank} wants it in shape "
                f"{list(piece.global_shape)}; a reshard keeps shapes",
            )
        if piece.dtype not in ITEMSIZE_BYTES or source.dtype not in ITEMSIZE_BYTES:
            findings.setdefault("unknown", f"held as {source.dtype!r} and wanted as {piece.dtype!r}: no known dtypes")
        elif piece.dtype != source.dtype and not cast:
            findings.setdefault(
                piece.dtype,
                f"it is held as {source.dtype}, but rank {rank} wants it as {piece.dtype}; want {source.dtype}, or "
                "say cast=True",
            )
        elif is_complex(source.dtype) and not is_complex(piece.dtype):
            findings.setdefault(
                piece.dtype,
                f"it is held as {source.dtype}, but rank {rank} wants it as {piece.dtype}, which has no imaginary part",
            )
    yield from findings.values()


def _tensor(piece: Piece) -> str:
    return f"{piece.dtype} of shape {list(piece.global_shape)}"


def _nameless(piece: Piece) -> Piece:
    return replace(piece, name="")
