"""Flat vectors of ZeRO: where the elements of each parameter are in the part that a rank has saved.

Stages 1 and 2: the parameters of a group one behind the other, cut into parts of one size. Padding was at the end:

    vector    | w w w w w w | b b b | . |
    rank 0    | w w w w w |                    w run 0:5
    rank 1              | w | b b b |          w run 5:6, b run 0:3

Stage 3: each parameter is cut into a run for each rank, of ceil(n / ranks). The runs of a rank follow one another:

    rank 0    | w w w | b b |                  w run 0:3, b run 0:2
    rank 1    | w w w | b . |                  w run 3:6, b run 2:3
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
"""The parameters of a flat vector, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRun:
    """Elements of a parameter that are in the part of a rank."""

    name: str
    rank: int
    vector: int
    """Which of the flat vectors of the rank."""
    start: int
    """The element of the rank's part at which they begin."""
    run: tuple[int, int]
    """Which elements of the parameter they are, counted row-major."""


def runs_of_vectors(
    vectors: Sequence[Shapes], lengths: Sequence[Sequence[int]], gaps: Sequence[Sequence[int]] | None
) -> Iterator[FlatRun]:
    """Those of stages 1 and 2.

    lengths: for each rank, and each vector, the elements that were saved, which may lack padding. gaps: for each
    vector, the padding behind each parameter; None: there is none. Raises CheckpointError where the parts are too short
    or too long.
    """
    for number, shapes in enumerate(vectors):
        held = [each[number] for each in lengths]
        # Padding is at the end of the vector only. So the longest part has none, unless it is the only one.
        size = max(held)
        behind = [0] * len(shapes) if gaps is None else gaps[number]
        if len(behind) != len(shapes):
            raise CheckpointError(f"group {number} has {len(shapes)} parameters, and padding behind {len(behind)}")
        at = 0
        for (name, shape), gap in zip(shapes.items(), behind, strict=True):
            end = at + math.prod(shape)
            for rank, length in enumerate(held):
                first, last = max(at, rank * size), min(end, rank * size + length)
                if first < last:
                    run = (first - at, last - at)
                    yield FlatRun(name=name, rank=rank, vector=number, start=first - rank * size, run=run)
            at = end + gap
        # Without what is behind the last: see `groups_padding` there.
        needed, saved = at, sum(held)
        if not needed <= saved < needed + 2 * len(held) + sum(behind) + 1:
            raise CheckpointError(
                f"the parameters of group {number} have {needed:,} elements, but its parts of {len(held)} ranks have "
                f"{saved:,}: they were not saved together"
            )


def runs_of_each(vectors: Sequence[Shapes], lengths: Sequence[Sequence[int]]) -> Iterator[FlatRun]:
    """Those of stage 3; see `runs_of_vectors`."""
    ranks = len(lengths)
    # A parameter may go on in the next vector: all of a rank are one, cut wherever it was full.
    for rank, held in enumerate(lengths):
        at, vector, used = 0, 0, 0
        for name, shape in ((name, shape) for shapes in vectors for name, shape in shapes.items()):
            count = math.prod(shape)
            part = -(-count // ranks)
            taken = 0
            while taken < part:
                while vector < len(held) and used == held[vector]:
                    vector, used = vector + 1, 0
                if vector == len(held):
                    break
                length = min(part - taken, held[vector] - used)
                first = rank * part + taken
                last = min(first + length, count)
                if first < last:
                    yield FlatRun(name=name, rank=rank, vector=vector, start=used, run=(first, last))
                taken, used = taken + length, used + length
            at += part
        if at != sum(held):
            raise CheckpointError(
                f"each of {ranks} ranks has {at:,} elements of the parameters, but rank {rank} saved {sum(held):,}: "
                "another number of ranks wrote it"
            )
