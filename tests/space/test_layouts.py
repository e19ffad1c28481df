"""Layouts against lists of elements cut the plain way."""

import math
import pickle
from collections.abc import Mapping
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.space import AXES, Box, Cut, Layout, Mesh, Piece, Placement, Replicate, Shard, check_cover
from tests.space.plain import Shape, elements_of_piece, proven, shapes

# What torch.chunk(torch.arange(size), ranks) gives, the ranks that it leaves out holding nothing.
CHUNKS = {
    (10, 4): [3, 3, 3, 1],
    (5, 4): [2, 2, 1, 0],
    (6, 4): [2, 2, 2, 0],
    (9, 8): [2, 2, 2, 2, 1, 0, 0, 0],
    (7, 3): [3, 3, 1],
    (8, 4): [2, 2, 2, 2],
    (1, 3): [1, 0, 0],
    (0, 2): [0, 0],
    (4, 1): [4],
}


@pytest.mark.parametrize(("size", "ranks"), CHUNKS)
def test_shard_cuts_as_torch_chunk_does(size: int, ranks: int) -> None:
    layout = Layout(Mesh(tp=ranks), {"tp": Shard(1)})
    pieces = [layout.piece(rank, name="w", dtype="float32", global_shape=(2, size)) for rank in range(ranks)]
    lengths = CHUNKS[size, ranks]
    starts = accumulate(lengths[:-1], initial=0)
    assert [piece.box for piece in pieces] == [Box((0, s), (2, n)) for s, n in zip(starts, lengths, strict=True)]
    assert all(piece.run is None for piece in pieces)


def chunk(indices: list[int], ranks: int) -> list[list[int]]:
    """torch.chunk of a list, with empty lists for the ranks that get nothing."""
    size = max(1, math.ceil(len(indices) / ranks))
    return [indices[rank * size : (rank + 1) * size] for rank in range(ranks)]


meshes = st.builds(Mesh, **dict.fromkeys(AXES, st.integers(1, 3)))


@st.composite
def layouts_and_shapes(draw: st.DrawFn) -> tuple[Layout, Shape]:
    mesh, shape = draw(meshes), draw(shapes(min_ndim=1))
    placement = st.just(Replicate()) | st.builds(Shard, st.integers(0, len(shape) - 1))
    placements = draw(st.dictionaries(st.sampled_from(AXES), placement))
    return Layout(mesh, placements), shape


@proven
@given(layouts_and_shapes(), st.data())
def test_shards_compose_from_the_outermost_axis_inwards(case: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = case
    rank = data.draw(st.integers(0, layout.mesh.size - 1))
    held = [list(range(size)) for size in shape]
    for axis, ranks, placement in zip(AXES, layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, Shard):
            held[placement.dim] = chunk(held[placement.dim], ranks)[layout.mesh.coordinates(rank)[axis]]
    piece = layout.piece(rank, name="w", dtype="float32", global_shape=shape)
    assert piece.shape == tuple(map(len, held))
    assert all(start == indices[0] for start, indices in zip(piece.offset, held, strict=True) if indices)


def one_replica(layout: Layout, shape: Shape) -> list[Piece]:
    """The pieces of the ranks at coordinate 0 of every axis that replicates."""
    axes = dict(zip(AXES, layout.placements, strict=True))
    return [
        layout.piece(rank, name="w", dtype="float32", global_shape=shape)
        for rank in range(layout.mesh.size)
        if not any(layout.mesh.coordinates(rank)[axis] for axis in AXES if axes[axis] == Replicate())
    ]


@proven
@given(layouts_and_shapes())
def test_ranks_cover_a_tensor_once_per_replica(case: tuple[Layout, Shape]) -> None:
    layout, shape = case
    assert check_cover(one_replica(layout, shape)) == []
    by_rank = [layout.piece(rank, name="w", dtype="float32", global_shape=shape) for rank in range(layout.mesh.size)]
    assert set(by_rank) == set(one_replica(layout, shape))


@proven
@given(shapes(), st.data(), st.sampled_from(AXES))
def test_a_cut_gives_the_elements_between_its_boundaries(shape: Shape, data: st.DataObject, axis: str) -> None:
    total = math.prod(shape)
    inner = data.draw(st.lists(st.integers(0, total), max_size=3))
    boundaries = (0, *sorted(inner), total)
    layout = Layout(Mesh(**{axis: len(inner) + 1}), {axis: Cut(boundaries)})
    held = [
        elements_of_piece(layout.piece(rank, name="w", dtype="float32", global_shape=shape))
        for rank in range(len(inner) + 1)
    ]
    assert held == [list(range(start, stop)) for start, stop in pairwise(boundaries)]


def test_a_cut_counts_the_elements_that_the_shards_leave_whichever_axis_it_is_on() -> None:
    inside = Layout(Mesh(dp_shard=2, tp=2), {"tp": Shard(1), "dp_shard": Cut((0, 3, 4))})
    outside = Layout(Mesh(dp_shard=2, tp=2), {"dp_shard": Shard(1), "tp": Cut((0, 3, 4))})
    for layout, order in ((inside, (0, 2, 1, 3)), (outside, (0, 1, 2, 3))):
        pieces = [layout.piece(rank, name="w", dtype="float32", global_shape=(2, 4)) for rank in order]
        assert [elements_of_piece(piece) for piece in pieces] == [[0, 1, 4], [5], [2, 3, 6], [7]]


def test_axes_that_are_not_named_replicate() -> None:
    bare = Layout(Mesh(dp_shard=2, tp=2), {"tp": Shard(0)})
    assert bare == Layout(Mesh(dp_shard=2, tp=2), {"tp": Shard(0), "dp_shard": Replicate()})
    assert hash(bare) == hash(pickle.loads(pickle.dumps(bare)))
    assert bare.placements == (Replicate(), Replicate(), Replicate(), Shard(0))


@pytest.mark.parametrize(
    ("placements", "messages"),
    [
        ({"dp": Shard(0)}, ["'dp', which is no mesh axis; the axes are pp, dp_replicate, dp_shard, tp"]),
        ({"tp": Cut((0, 4))}, ["a Cut over the 2 ranks of tp has 3 boundaries, not 2"]),
        ({"tp": Cut((0, 2, 4)), "pp": Cut((0, 4))}, ["one axis of a layout may be a Cut, but tp, pp are"]),
        ({"x": Shard(0), "y": Shard(0), "tp": Cut((0, 4))}, ["'x'", "'y'", "3 boundaries"]),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_every_problem(
    placements: Mapping[str, Placement], messages: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        Layout(Mesh(tp=2), placements)
    assert len(caught.value.problems) == len(messages)
    assert all(message in problem for message, problem in zip(messages, caught.value.problems, strict=True))


def test_a_tensor_that_does_not_fit_the_layout_is_refused() -> None:
    with pytest.raises(PlanError, match=r"w has shape \(4,\), so that it cannot be cut along dim 1"):
        Layout(Mesh(tp=2), {"tp": Shard(1)}).piece(0, name="w", dtype="float32", global_shape=(4,))
    with pytest.raises(PlanError, match="rank 1 cuts 5 elements of w, but the last boundary of its Cut is 4"):
        Layout(Mesh(tp=2), {"tp": Cut((0, 2, 4))}).piece(1, name="w", dtype="float32", global_shape=(5,))
    with pytest.raises(PlanError, match="ranks 0 to 1, but was asked for rank 2"):
        Layout(Mesh(tp=2), {}).piece(2, name="w", dtype="float32", global_shape=(5,))


@pytest.mark.parametrize("boundaries", [(), (0,), (1, 2), (0, 3, 2)])
def test_boundaries_that_fall_or_do_not_start_at_zero_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="start at 0 and never fall"):
        Cut(boundaries)


def test_a_dim_counted_from_the_back_is_refused() -> None:
    with pytest.raises(PlanError, match="counts its dim from 0"):
        Shard(-1)
