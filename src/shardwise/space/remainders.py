"""Remainders: what is left of a box when another one is taken out of it."""

from collections.abc import Iterator

from shardwise.space.boxes import Box

__all__ = ["remainder"]


def remainder(box: Box, taken: Box) -> Iterator[Box]:
    """Return disjoint boxes that have exactly the indices of `box` which are not in `taken`, at most two per dim.

    >>> list(remainder(Box((0, 0), (4, 4)), Box((1, 1), (9, 1))))  # doctest: +NORMALIZE_WHITESPACE
    [Box(offset=(0, 0), shape=(1, 4)), Box(offset=(1, 0), shape=(3, 1)), Box(offset=(1, 2), shape=(3, 2))]
    """
    shared = box.intersect(taken)
    if shared is None:
        yield box
        return
    start, stop = list(box.offset), list(box.stop)
    for dim, (low, high) in enumerate(zip(shared.offset, shared.stop, strict=True)):
        # The dims before are narrowed to what both have.
        for first, last in ((start[dim], low), (high, stop[dim])):
            if first < last:
                offset, end = [*start[:dim], first, *start[dim + 1 :]], [*stop[:dim], last, *stop[dim + 1 :]]
                yield Box(tuple(offset), tuple(b - a for a, b in zip(offset, end, strict=True)))
        start[dim], stop[dim] = low, high
