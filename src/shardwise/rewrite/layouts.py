"""Layouts: into how many equal boxes ranks along `tp` cut a tensor along a dim, seen from tensors that it has become.

A rewrite may do anything between a fused tensor and the one whose layout is known: another name, a transpose, a stack.
Which rank has which indices of the fused tensor shows where its elements lie in boxes of the other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

from shardwise.rewrite.fragments import Shapes, fragments_of
from shardwise.rewrite.tiles import Value
from shardwise.space import Box

__all__ = ["Cut", "cuts_along", "degree_along"]


class _Owner(NamedTuple):
    """Who has some indices: a box of a layout."""

    degrees: tuple[int, ...] = ()
    """Into how many boxes each dim that is cut is cut."""
    ranks: tuple[int, ...] = ()
    """Which of them it is."""
    places: tuple[int, ...] = ()
    """Where it lies along dims of which it is not known how they are cut."""


_WHOLE = _Owner()
_UNKNOWN = _Owner(degrees=(0,))


class Cut(NamedTuple):
    """Indices along a dim, and who has some of what lies there."""

    start: int
    stop: int
    owner: _Owner


_Owners: TypeAlias = frozenset[_Owner]


def cuts_along(axis: int, laid: Value, degrees: Sequence[int], shapes: Shapes) -> list[Cut]:
    """Who has which indices along dim `axis` of the one source of `laid`, a tensor that lies in boxes.

    degrees: of its layout, see `TensorMeta`; shapes: of the source, by its name in the tiles.
    """
    known = [dim for dim, degree in enumerate(degrees) if degree > 1]
    unknown = [dim for dim, degree in enumerate(degrees) if degree == 0]
    cuts = []
    for ranks in product(*[range(degrees[dim]) for dim in known]):
        offset, stop = [0] * len(laid.shape), list(laid.shape)
        for dim, rank in zip(known, ranks, strict=True):
            offset[dim] = rank * laid.shape[dim] // degrees[dim]
            stop[dim] = (rank + 1) * laid.shape[dim] // degrees[dim]
        box = Box(tuple(offset), tuple([b - a for a, b in zip(offset, stop, strict=True)]))
        for each in fragments_of(laid.meeting(box), shapes):
            start, size = each.offset[axis], each.shape[axis]
            owner = _Owner(tuple([degrees[dim] for dim in known]), ranks, tuple([each.first[dim] for dim in unknown]))
            if size > 1 and each.dims[axis][0] in unknown:
                owner = _UNKNOWN
            cuts.append(Cut(start, start + size, owner))
    return cuts


def degree_along(size: int, cuts: Iterable[Sequence[Cut]]) -> int:
    """For how many ranks a tensor is laid out along a dim of this size; 0 where that is not known.

    cuts: of each tensor that lies in boxes, who has which indices. Where each rank has one stretch of equal size, in
    the order of ranks, that is their number. Where a rank has parts of several stretches these lie one after the other
    as they do without ranks: 1.
    """
    runs = list(_runs([cut for each in cuts for cut in _alone(each)], size))
    owners = [each for _, each in runs]
    if any(_UNKNOWN in each for each in owners):
        return 0
    if len({each for each in owners if each}) <= 1:
        return 1
    if any(len(each) != 1 for each in owners):
        return 0
    single = [next(iter(each)) for each in owners]
    if len({(each.degrees, each.places) for each in single} - {(_WHOLE.degrees, _WHOLE.places)}) > 1:
        return 0
    if len(set(single)) < len(single) or _WHOLE in single:
        return 1
    is_even = len({length for length, _ in runs}) == 1
    return len(single) if is_even and single == sorted(single) else 0


def _alone(cuts: Sequence[Cut]) -> Sequence[Cut]:
    """The cuts of one tensor: where it is cut along other dims only, it is whole along this one."""
    owners = {each for _, each in _runs(cuts, 0) if each}
    if len(owners) == 1 and len(*owners) > 1 and _UNKNOWN not in next(iter(owners)):
        return [each._replace(owner=_WHOLE) for each in cuts]
    return cuts


def _runs(cuts: Sequence[Cut], size: int) -> Iterator[tuple[int, _Owners]]:
    """Stretches of indices up to `size`: how long they are, and who has a part of each; nobody where none says."""
    events: dict[int, list[tuple[_Owner, int]]] = {0: [], size: []}
    for cut in cuts:
        events.setdefault(cut.start, []).append((cut.owner, 1))
        events.setdefault(cut.stop, []).append((cut.owner, -1))
    here: Counter[_Owner] = Counter()
    length, owners, before = 0, frozenset[_Owner](), 0
    for index in sorted(events):
        now = frozenset(owner for owner, count in here.items() if count)
        if now != owners and length:
            yield length, owners
            length = 0
        length, owners, before = length + index - before, now, index
        for owner, change in events[index]:
            here[owner] += change
    if length:
        yield length, owners
