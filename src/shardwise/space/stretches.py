"""Stretches: some of the elements of moves, as moves."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import add

from shardwise.space.moves import Move, Part
from shardwise.space.runs import Run, boxes_of_run

__all__ = ["stretch_of"]


def stretch_of(moves: Iterable[Move], start: int, stop: int) -> Iterator[Move]:
    """Return the moves of the elements `start` up to `stop`, counted row-major through one move after the other.

    A move that is cut becomes at most `2 * ndim - 1` moves. Elements keep their order.
    """
    passed = 0
    for move in moves:
        num_elements = move.num_elements
        low, high = max(start - passed, 0), min(stop - passed, num_elements)
        passed += num_elements
        if high - low == num_elements:
            yield move
        elif low < high:
            for box in boxes_of_run(move.shape, Run(low, high)):
                source, target = _within(move.source, box.offset), _within(move.target, box.offset)
                yield Move(box.shape, source, target)


def _within(part: Part, offset: tuple[int, ...]) -> Part:
    return replace(part, offset=tuple(map(add, part.offset, offset)))
