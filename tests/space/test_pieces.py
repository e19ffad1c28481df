"""Pieces and their overlap, against lists of elements."""

import dataclasses
import pickle

import pytest
from hypothesis import given

from shardwise.space import Box, Mesh, Piece, Run, overlap
from tests.space.layouts import Layout, Shard
from tests.space.plain import elements_of_box, elements_of_piece, piece_pairs, proven, stretches


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
