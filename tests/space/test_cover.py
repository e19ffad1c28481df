"""The cover check against a count per element."""

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Box, Mesh, Piece, check_cover
from tests.space.layouts import Cut, Layout, Shard
from tests.space.plain import Shape, elements_of_piece, pieces_of, proven, shapes


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
@given(exact_covers())
def test_an_exact_cover_has_no_findings(pieces: list[Piece]) -> None:
    assert check_cover(pieces) == []


@proven
@given(exact_covers(), st.data())
def test_a_planted_gap_and_a_planted_double_are_found(pieces: list[Piece], data: st.DataObject) -> None:
    planted = data.draw(st.sampled_from(pieces))
    without = [piece for piece in pieces if piece is not planted]
    gap, double = check_cover(without), check_cover([*pieces, planted])
    if not without or not planted.num_elements:
        assert gap == double == [] or not without
        return
    total = math.prod(planted.global_shape)
    assert [finding.split(", first")[0] for finding in gap] == [
        f"w: {planted.num_elements} of {total} elements are held by no piece"
    ]
    assert len(double) == 1
    assert double[0].startswith(f"w: {planted.num_elements} of {total} elements are held more than once")
    assert double[0].endswith(f"by {planted} and {planted}")


def runs_of_tensor(shape: Shape, num_pieces: int) -> list[Piece]:
    total = math.prod(shape)
    borders = [index * total // num_pieces for index in range(num_pieces + 1)]
    return [Piece(name="w", dtype="float32", global_shape=shape, run=run) for run in pairwise(borders)]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(runs_of_tensor((10**6, 10**6), 1000), id="runs"),
        pytest.param(
            [
                Layout(Mesh(dp_shard=25, tp=20), {"dp_shard": Shard(0), "tp": Shard(1)}).piece(
                    rank, name="w", dtype="float32", global_shape=(10**6, 10**6)
                )
                for rank in range(500)
            ],
            id="grid",
        ),
        pytest.param(
            [
                Layout(
                    Mesh(dp_shard=25, tp=20), {"dp_shard": Cut(tuple(range(0, 10**12, 2 * 10**9))[:26]), "tp": Shard(1)}
                ).piece(rank, name="w", dtype="float32", global_shape=(10**6, 10**6))
                for rank in range(500)
            ],
            id="runs of columns",
        ),
    ],
)
def test_work_grows_with_the_pieces_and_not_with_the_tensor(pieces: list[Piece]) -> None:
    assert check_cover(pieces) == []
    del pieces[7]
    (finding,) = check_cover(pieces)
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
