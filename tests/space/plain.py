"""The plain slow versions that the space room must equal: every region is the list of its elements, one by one."""

import math
from itertools import product

from hypothesis import strategies as st

from shardwise.space import Box, Piece, Run
from tests.properties import tried

Shape = tuple[int, ...]

proven = tried(40)


def indices_of_box(box: Box) -> list[Shape]:
    """Every index of the box, in row-major order."""
    return list(product(*(range(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))))


def elements_of_box(shape: Shape, box: Box) -> list[int]:
    """The row-major number, in a tensor of `shape`, of every element of the box."""
    number = {index: position for position, index in enumerate(product(*map(range, shape)))}
    return [number[index] for index in indices_of_box(box)]


def elements_of_piece(piece: Piece) -> list[int]:
    """The row-major number in the tensor of every element that the piece has, in the order in which it stores them."""
    elements = elements_of_box(piece.global_shape, piece.box)
    return elements if piece.run is None else elements[piece.run[0] : piece.run[1]]


def stretches(pairs: list[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The pairs of positions, joined wherever both go on by one."""
    joined: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for a, b in pairs:
        if joined and joined[-1][0][1] == a and joined[-1][1][1] == b:
            (a_start, _), (b_start, _) = joined[-1]
            joined[-1] = ((a_start, a + 1), (b_start, b + 1))
        else:
            joined.append(((a, a + 1), (b, b + 1)))
    return joined


def shapes(min_ndim: int = 0) -> st.SearchStrategy[Shape]:
    """Shapes of at most 5 dims and 300 elements; a dim of size 0 is seldom, so that most tensors have elements."""
    sizes = st.sampled_from([2, 3, 1, 4, 5, 2, 3, 0])
    shape = st.integers(min_ndim, 5).flatmap(lambda ndim: st.tuples(*[sizes] * ndim))
    return shape.filter(lambda shape: math.prod(shape) <= 300)


@st.composite
def runs_within(draw: st.DrawFn, num_elements: int) -> Run:
    """Runs, empty ones too, of something with so many elements."""
    start, stop = sorted((draw(st.integers(0, num_elements)), draw(st.integers(0, num_elements))))
    return Run(start, stop)


@st.composite
def boxes_within(draw: st.DrawFn, shape: Shape) -> Box:
    """Boxes of a tensor of `shape`; full dims are frequent and empty ones seldom, so that two boxes mostly meet."""
    spans = [
        draw(st.sampled_from([(0, size), (0, max(size - 1, 0)), (size // 2, size), (0, size)]) | runs_within(size))
        for size in shape
    ]
    return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


@st.composite
def pieces_of(draw: st.DrawFn, shape: Shape, name: str = "w") -> Piece:
    """Pieces of a tensor of `shape`, with and without a run."""
    box = draw(boxes_within(shape))
    run = draw(st.none() | runs_within(box.num_elements))
    return Piece(name=name, dtype="float32", global_shape=shape, offset=box.offset, shape=box.shape, run=run)


@st.composite
def piece_pairs(draw: st.DrawFn) -> tuple[Piece, Piece]:
    """Two pieces of one tensor."""
    shape = draw(shapes())
    return draw(pieces_of(shape)), draw(pieces_of(shape))
