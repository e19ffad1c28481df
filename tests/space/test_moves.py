"""Moves between the storages of two pieces, against copying element by element."""

import math
from collections.abc import Iterable
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import BlockPart, Box, Mesh, Move, Piece, moves, overlap
from shardwise.space.moves import moves_between
from shardwise.space.pieces import reach
from tests.space.layouts import Cut, Layout, Shard
from tests.space.plain import Shape, elements_of_box, elements_of_piece, piece_pairs, pieces_of, proven, shapes


def piece(shape: Shape, offset: Shape, box: Shape, run: tuple[int, int] | None = None, dtype: str = "float32") -> Piece:
    return Piece(name="w", dtype=dtype, global_shape=shape, offset=offset, shape=box, run=run)


def places(part: BlockPart, shape: Shape) -> list[int]:
    """The elements of the storage that a part of `shape` takes, one by one, in row-major order of the part."""
    return [part.start + element for element in elements_of_box(part.block, Box(part.offset, shape))]


def pairs_of(found: Iterable[Move]) -> list[tuple[int, int]]:
    """Every (place in the source's storage, place in the target's) that moves copy, in their order."""
    return [
        pair
        for move in found
        for pair in zip(places(move.source, move.shape), places(move.target, move.shape), strict=True)
    ]


def copied(source: Piece, target: Piece) -> list[tuple[int, int]]:
    found = moves(source, target)
    for move in found:
        assert move.num_elements == len(places(move.source, move.shape)) > 0
        assert move.source.first == places(move.source, move.shape)[0]
        assert move.target.first == places(move.target, move.shape)[0]
    heads = [(move.source.first, move.target.first) for move in found]
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(heads))
    return pairs_of(found)


def plainly_copied(source: Piece, target: Piece) -> list[tuple[int, int]]:
    in_source = {element: place for place, element in enumerate(elements_of_piece(source))}
    return [
        (in_source[element], place) for place, element in enumerate(elements_of_piece(target)) if element in in_source
    ]


@proven
@given(piece_pairs())
def test_moves_copy_every_shared_element_once_to_its_place_in_the_order_of_both_storages(
    pair: tuple[Piece, Piece],
) -> None:
    source, target = pair
    pairs = copied(source, target)
    assert sorted(pairs, key=lambda places: places[1]) == plainly_copied(source, target)
    assert sorted(copied(target, source)) == sorted((a, b) for b, a in pairs)


@proven
@given(piece_pairs())
def test_there_are_few_moves_however_many_rows_and_a_piece_without_a_run_is_one_block(
    pair: tuple[Piece, Piece],
) -> None:
    source, target = pair
    for move in moves(source, target):
        for held, part in ((source, move.source), (target, move.target)):
            assert len(move.shape) == len(part.block) == len(part.offset)
            assert part.start + math.prod(part.block) <= held.num_elements
            assert held.run is not None or (part.start, part.block) == (0, held.shape)
    runs = (source.run is not None) + (target.run is not None)
    assert len(moves(source, target)) <= max(1, 2 * len(source.global_shape) - 1) ** runs
    assert len(moves(source, target)) <= len(list(overlap(source, target))) or runs
    assert len(moves(source, source)) == (source.num_elements > 0)


def test_runs_of_one_sequence_collapse_to_one_flat_move() -> None:
    layout = Layout(Mesh(dp_shard=2, tp=2), {"tp": Shard(1), "dp_shard": Cut((0, 7, 16))})
    part = layout.piece(2, name="w", dtype="float32", global_shape=(4, 8))
    assert part.run == (7, 16)
    assert moves(part, piece((4, 8), (0, 0), (4, 4), (5, 12))) == [
        Move((5,), BlockPart(0, (5,), (0,)), BlockPart(2, (5,), (0,)))
    ]
    whole_rows, of_tensor = piece((4, 8), (2, 0), (2, 8), (3, 14)), piece((4, 8), (0, 0), (4, 8), (0, 25))
    assert moves(whole_rows, of_tensor) == [Move((6,), BlockPart(0, (6,), (0,)), BlockPart(19, (6,), (0,)))]
    assert moves(piece((4,), (0,), (4,), (0, 2)), piece((4,), (0,), (4,), (2, 4))) == []


def test_a_run_to_a_tensor_with_a_shape_keeps_the_dims() -> None:
    found = moves(piece((4, 8), (0, 0), (4, 8), (6, 19)), piece((4, 8), (0, 0), (4, 8)))
    assert found == [
        Move((1, 2), BlockPart(0, (1, 2), (0, 0)), BlockPart(0, (4, 8), (0, 6))),
        Move((1, 8), BlockPart(2, (1, 8), (0, 0)), BlockPart(0, (4, 8), (1, 0))),
        Move((1, 3), BlockPart(10, (1, 3), (0, 0)), BlockPart(0, (4, 8), (2, 0))),
    ]
    for start, stop in combinations(range(14), 2):
        assert pairs_of(moves_between(found, start, stop)) == pairs_of(found)[start:stop]


def test_work_does_not_grow_with_the_tensor() -> None:
    size = 10**9
    columns, rows = piece((size, size), (0, 5), (size, 10)), piece((size, size), (0, 0), (size, size), (7, size * size))
    first, rest = moves(columns, rows)
    assert (first.shape, rest.shape) == ((1, 8), (size - 1, 10))


@proven
@given(shapes().flatmap(pieces_of))
def test_reach_is_from_the_first_element_to_the_last(held: Piece) -> None:
    elements = elements_of_piece(held)
    assert reach(held) == ((min(elements), max(elements) + 1) if elements else (0, 0))


@proven
@given(piece_pairs(), st.data())
def test_a_stretch_is_the_same_elements_in_the_same_order(pair: tuple[Piece, Piece], data: st.DataObject) -> None:
    found = moves(*pair)
    every = pairs_of(found)
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    between = list(moves_between(found, start, stop))
    assert pairs_of(between) == every[start:stop]
    assert all(move.num_elements for move in between)
    assert len(between) <= len(found) + 4 * len(pair[0].global_shape)
