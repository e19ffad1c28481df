"""The cover check against a count per element."""

import math
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Box, Mesh, Piece, check_cover
from tests.space.layouts import Cut, Layout, Shard
from tests.space.plain import elements_of_piece, pieces_of, proven, shapes


def counted_findings(name: str, pieces: list[Piece]) -> list[str]:
    """What `check_cover` must say about the pieces of one tensor, found by counting the holders of every element."""
    shape = pieces[0].global_shape
    holders: list[list[Piece]] = [[] for _ in range(math.prod(shape))]
    for piece in pieces:
        for element in elements_of_piece(piece):
            holders[element].append(piece)
    indices = list(product(*map(range, shape)))
    doubled = [element for element, held in enumerate(holders) if len(held) > 1]
    missing = [element for element, held in enumerate(holders) if not held]
    findings = []
    if doubled:
        a, b = holders[doubled[0]][:2]
        findings.append(f"are held more than once, first {indices[doubled[0]]}, by {a} and {b}")
    if missing:
        findings.append(f"are held by no piece, first {indices[missing[0]]}")
    counts = [len(faults) for faults in (doubled, missing) if faults]
    return [f"{name}: {n} of {len(holders)} elements {text}" for n, text in zip(counts, findings, strict=True)]


@proven
@given(shapes().flatmap(lambda shape: st.lists(pieces_of(shape), min_size=1, max_size=6)))
def test_findings_are_those_of_counting_every_element(pieces: list[Piece]) -> None:
    assert check_cover(pieces) == counted_findings("w", pieces)


@st.composite
def exact_covers(draw: st.DrawFn) -> list[Piece]:
    """A tensor split again and again: a box along a dim, or at last into runs; in any order."""
    shape = draw(shapes())
    done: list[Piece] = []
    todo = [Box((0,) * len(shape), shape)]
    while todo:
        box = todo.pop()
        dim = draw(st.integers(-3, len(shape) - 1))
        if dim >= 0 and len(todo) + len(done) < 12:
            at = draw(st.integers(0, box.shape[dim]))
            after = tuple(start + at * (d == dim) for d, start in enumerate(box.offset))
            sizes = [
                tuple(n if d == dim else size for d, size in enumerate(box.shape)) for n in (at, box.shape[dim] - at)
            ]
            todo += [Box(box.offset, sizes[0]), Box(after, sizes[1])]
            continue
        at = draw(st.integers(0, box.num_elements))
        done += [
            Piece(name="w", dtype="float32", global_shape=shape, offset=box.offset, shape=box.shape, run=run)
            for run in ((0, at), (at, box.num_elements))
        ]
    return draw(st.permutations(done))


@proven
@given(exact_covers(), st.data())
def test_an_exact_cover_has_no_findings_and_a_planted_gap_and_double_are_found(
    pieces: list[Piece], data: st.DataObject
) -> None:
    assert check_cover(pieces) == []
    planted = data.draw(st.sampled_from(pieces))
    for faulty in ([piece for piece in pieces if piece is not planted], [*pieces, planted]):
        assert not faulty or check_cover(faulty) == counted_findings("w", faulty)


WHOLE: Any = {"name": "w", "dtype": "float32", "global_shape": (10**6, 10**6)}
MESH = Mesh(dp_shard=25, tp=20)
COLUMNS = Cut(tuple(range(0, 5 * 10**10 + 1, 2 * 10**9)))
LARGE = {
    "runs": [Piece(run=run, **WHOLE) for run in pairwise(range(0, 10**12 + 1, 10**9))],
    "grid": [Layout(MESH, {"dp_shard": Shard(0), "tp": Shard(1)}).piece(rank, **WHOLE) for rank in range(500)],
    "runs of columns": [
        Layout(MESH, {"dp_shard": COLUMNS, "tp": Shard(1)}).piece(rank, **WHOLE) for rank in range(500)
    ],
}


@pytest.mark.parametrize("kind", LARGE)
def test_work_grows_with_the_pieces_and_not_with_the_tensor(kind: str) -> None:
    assert check_cover(LARGE[kind]) == []
    (finding,) = check_cover([*LARGE[kind][:7], *LARGE[kind][8:]])
    assert "are held by no piece" in finding


def test_tensors_are_checked_by_name_and_must_agree_about_themselves() -> None:
    whole = Piece(name="a", dtype="float32", global_shape=(4,))
    half = Piece(name="b", dtype="float32", global_shape=(4,), shape=(2,))
    assert check_cover([]) == []
    assert check_cover([half, whole]) == ["b: 2 of 4 elements are held by no piece, first (2,)"]
    other = Piece(name="a", dtype="float32", global_shape=(5,))
    assert check_cover([whole, other]) == ["a: its pieces are of different tensors: float32 (4,), float32 (5,)"]
    cast = Piece(name="a", dtype="bfloat16", global_shape=(4,))
    assert check_cover([whole, cast]) == ["a: its pieces are of different tensors: float32 (4,), bfloat16 (4,)"]


def test_scalars_and_empty_tensors_are_covered_too() -> None:
    scalar = Piece(name="step", dtype="float32", global_shape=())
    nothing = Piece(name="step", dtype="float32", global_shape=(), run=(0, 0))
    empty = Piece(name="none", dtype="float32", global_shape=(3, 0))
    assert check_cover([scalar, nothing, empty]) == []
    assert check_cover([nothing]) == ["step: 1 of 1 elements are held by no piece, first ()"]
    assert check_cover([scalar, scalar]) == [
        "step: 1 of 1 elements are held more than once, first (), by step[] and step[]"
    ]
