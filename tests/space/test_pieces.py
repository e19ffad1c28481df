"""Pieces and their overlap, against lists of elements."""

import dataclasses
import pickle
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.space import Box, Mesh, Piece, Run, overlap
from tests.space.layouts import Cut, Layout, Shard
from tests.space.plain import elements_of_box, elements_of_piece, pieces_of, proven, shapes, stretches


@st.composite
def piece_pairs(draw: st.DrawFn) -> tuple[Piece, Piece]:
    shape = draw(shapes())
    return draw(pieces_of(shape)), draw(pieces_of(shape))


@proven
@given(piece_pairs())
def test_boxes_of_a_piece_are_its_elements_in_the_order_of_its_storage(pair: tuple[Piece, Piece]) -> None:
    piece, _ = pair
    shape = piece.global_shape
    boxes = piece.boxes()
    elements = elements_of_piece(piece)
    assert [element for box in boxes for element in elements_of_box(shape, box)] == elements
    assert piece.num_elements == piece.elements.num_elements == len(elements)
    assert piece.whole == (elements == elements_of_box(shape, Box((0,) * len(shape), shape)))


def plain_overlap(a: Piece, b: Piece) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    in_b = {element: position for position, element in enumerate(elements_of_piece(b))}
    shared = [(position, in_b[element]) for position, element in enumerate(elements_of_piece(a)) if element in in_b]
    return stretches(shared)


@proven
@given(piece_pairs())
def test_overlap_is_the_shared_elements_in_the_longest_copies(pair: tuple[Piece, Piece]) -> None:
    a, b = pair
    assert list(overlap(a, b)) == plain_overlap(a, b)
    assert list(overlap(b, a)) == plain_overlap(b, a)


def test_overlap_of_every_two_boxes_of_a_small_tensor() -> None:
    spans = [[(start, size - start) for start in range(size)] + [(0, 1)] for size in (2, 3, 3)]
    pieces = [
        Piece(name="w", dtype="float32", global_shape=(2, 3, 3), offset=offset, shape=shape)
        for offset, shape in (zip(*places, strict=True) for places in product(*spans))
    ]
    for a, b in product(pieces, pieces):
        assert list(overlap(a, b)) == plain_overlap(a, b)


def test_overlap_of_every_two_runs_of_two_crossing_boxes() -> None:
    runs = list(combinations_with_replacement(range(7), 2))
    left, right = (
        [
            Piece(name="w", dtype="float32", global_shape=(2, 4), offset=(0, column), shape=(2, 3), run=run)
            for run in runs
        ]
        for column in (0, 1)
    )
    for a, b in product(left, right):
        assert list(overlap(a, b)) == plain_overlap(a, b)


@proven
@given(piece_pairs())
def test_overlap_of_a_piece_with_itself_is_one_copy(pair: tuple[Piece, Piece]) -> None:
    piece, _ = pair
    everything = (0, piece.num_elements)
    assert list(overlap(piece, piece)) == ([(everything, everything)] if piece.num_elements else [])


def test_overlap_work_grows_with_the_copies_and_not_with_the_tensor() -> None:
    size = 10**9
    columns = Layout(Mesh(tp=size // 10), {"tp": Shard(1)}).piece(
        3, name="w", dtype="float32", global_shape=(size, size)
    )
    last_rows = Piece(name="w", dtype="bfloat16", global_shape=(size, size), run=(size * (size - 2), size * size))
    few = Piece(
        name="w", dtype="int8", global_shape=(size, size), shape=(size, 40), offset=(0, 20), run=(40 * 7 + 15, 40 * 8)
    )
    in_columns = 10 * (size - 2)
    assert list(overlap(columns, last_rows)) == [
        ((in_columns, in_columns + 10), (30, 40)),
        ((in_columns + 10, in_columns + 20), (size + 30, size + 40)),
    ]
    assert list(overlap(columns, few)) == [((75, 80), (0, 5))]
    assert list(overlap(last_rows, few)) == []


def test_overlap_of_different_tensors_is_refused_at_the_call() -> None:
    a = Piece(name="a", dtype="float32", global_shape=(4,))
    with pytest.raises(PlanError, match=r"of a with shape .* and b with shape"):
        overlap(a, Piece(name="b", dtype="float32", global_shape=(4,)))
    with pytest.raises(PlanError, match=r"shape \(4,\) and a with shape \(5,\)"):
        overlap(a, Piece(name="a", dtype="float32", global_shape=(5,)))


def test_offset_shape_and_run_default_to_the_whole_tensor() -> None:
    piece = Piece(name="w", dtype="float32", global_shape=[4, 8])
    assert piece == Piece(name="w", dtype="float32", global_shape=(4, 8), offset=(0, 0), shape=(4, 8), run=None)
    assert (piece.box, piece.elements, piece.whole) == (Box((0, 0), (4, 8)), Run(0, 32), True)
    assert piece.boxes() == (piece.box,)


def test_a_piece_is_a_value_whose_run_is_a_tuple() -> None:
    piece = Piece(name="w", dtype="float32", global_shape=(4, 8), offset=(2, 0), shape=(2, 8), run=(3, 12))
    same = Piece(name="w", dtype="float32", global_shape=(4, 8), offset=(2, 0), shape=(2, 8), run=Run(3, 12))
    assert {piece: "here"}[same] == "here"
    assert piece.run == (3, 12)
    assert repr(piece) == (
        "Piece(name='w', dtype='float32', global_shape=(4, 8), offset=(2, 0), shape=(2, 8), run=(3, 12))"
    )
    assert eval(repr(piece)) == piece
    assert str(piece) == "w[2:4, 0:8] run 3:12"
    assert pickle.loads(pickle.dumps(piece)) == piece
    assert dataclasses.replace(piece, name="v", run=None).name == "v"
    with pytest.raises(AttributeError):
        piece.name = "v"  # type: ignore[misc]


def test_a_piece_outside_its_tensor_is_refused_with_every_problem() -> None:
    with pytest.raises(PlanError) as caught:
        Piece(name="w", dtype="float32", global_shape=(4, 8), offset=(3, -1), shape=(2, 8))
    assert caught.value.problems == (
        "piece of w: dim 0 holds indices 3 to 5, but the tensor has 0 to 4",
        "piece of w: dim 1 holds indices -1 to 7, but the tensor has 0 to 8",
    )
    with pytest.raises(PlanError, match="differ in number of dims"):
        Piece(name="w", dtype="float32", global_shape=(4, 8), offset=(0,))
    with pytest.raises(PlanError, match=r"run \(0, 17\) .* shape \(2, 8\), which has 16 elements"):
        Piece(name="w", dtype="float32", global_shape=(4, 8), shape=(2, 8), run=(0, 17))
    with pytest.raises(PlanError, match="dim 0 holds"):
        Piece(name="w", dtype="float32", global_shape=(4,), offset=(2,), shape=(-1,))


def test_a_flat_slice_of_a_column_shard_is_its_exact_elements() -> None:
    layout = Layout(Mesh(dp_shard=3, tp=2), {"tp": Shard(1), "dp_shard": Cut((0, 5, 5, 8))})
    pieces = [layout.piece(rank, name="w", dtype="float32", global_shape=(4, 4)) for rank in range(6)]
    assert [elements_of_piece(piece) for piece in pieces] == [
        [0, 1, 4, 5, 8], [2, 3, 6, 7, 10], [], [], [9, 12, 13], [11, 14, 15],
    ]  # fmt: skip
