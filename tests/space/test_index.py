"""Indexes of pieces, against asking every piece."""

from collections.abc import Callable
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Mesh, Piece, PieceIndex
from tests.space.layouts import Layout, Shard
from tests.space.plain import elements_of_piece, pieces_of, proven, runs_within, shapes


@st.composite
def pieces_and_a_piece(draw: st.DrawFn) -> tuple[list[Piece], Piece]:
    shape = draw(shapes())
    return draw(st.lists(pieces_of(shape), max_size=10)), draw(pieces_of(shape))


@st.composite
def runs_and_a_run(draw: st.DrawFn) -> tuple[list[Piece], Piece]:
    runs = draw(st.lists(runs_within(30), min_size=6, max_size=10))
    pieces = [Piece(name="w", dtype="float32", global_shape=(5, 6), run=run) for run in runs]
    return pieces[1:], pieces[0]


@proven
@given(pieces_and_a_piece() | runs_and_a_run())
def test_overlapping_pieces_are_those_with_a_common_element(case: tuple[list[Piece], Piece]) -> None:
    pieces, piece = case
    elements = set(elements_of_piece(piece))
    expected = [at for at, each in enumerate(pieces) if not elements.isdisjoint(elements_of_piece(each))]
    assert PieceIndex(pieces).overlapping(piece) == expected


def test_among_all_runs_of_a_few_elements_those_with_a_common_one_are_found() -> None:
    spans = list(combinations_with_replacement(range(7), 2))
    pieces = [Piece(name="w", dtype="float32", global_shape=(2, 3), run=run) for run in spans]
    index = PieceIndex(pieces)
    for piece in pieces:
        common = [at for at, each in enumerate(spans) if set(range(*each)) & set(range(*piece.elements))]
        assert index.overlapping(piece) == common


def runs(num_pieces: int) -> list[Piece]:
    borders = [at * 10**12 // num_pieces for at in range(num_pieces + 1)]
    return [Piece(name="w", dtype="float32", global_shape=(10**6, 10**6), run=run) for run in pairwise(borders)]


def rows(num_pieces: int) -> list[Piece]:
    layout = Layout(Mesh(dp_shard=num_pieces // 4, tp=4), {"dp_shard": Shard(0), "tp": Shard(1)})
    return [layout.piece(rank, name="w", dtype="float32", global_shape=(10**6, 10**6)) for rank in range(num_pieces)]


@pytest.mark.parametrize("pieces_of_kind", [runs, rows])
def test_a_search_looks_at_few_of_many_runs_and_blocks_of_rows(
    pieces_of_kind: Callable[[int], list[Piece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = pieces_of_kind(5000)
    index = PieceIndex(pieces)
    looked_at: list[Piece] = []
    num_elements = Piece.num_elements

    def counted(piece: Piece) -> int:
        looked_at.append(piece)
        return num_elements.__get__(piece)  # type: ignore[no-any-return]

    monkeypatch.setattr(Piece, "num_elements", property(counted))
    assert index.overlapping(pieces[2345]) == [2345]
    assert 1 <= len(looked_at) <= 10
