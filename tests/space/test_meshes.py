"""Meshes against the row-major list of their coordinates."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import AXES, Mesh
from tests.space.plain import proven

sizes = st.integers(1, 4)
meshes = st.builds(Mesh, pp=sizes, dp_replicate=sizes, dp_shard=sizes, tp=sizes)


@proven
@given(meshes)
def test_ranks_lie_row_major_with_tp_innermost(mesh: Mesh) -> None:
    places = [dict(zip(AXES, place, strict=True)) for place in product(*map(range, mesh.shape))]
    assert mesh.size == len(places)
    assert [mesh.coordinates(rank) for rank in range(mesh.size)] == places
    assert [mesh.rank(**place) for place in places] == list(range(mesh.size))


@proven
@given(meshes, st.sets(st.sampled_from(AXES)), st.data())
def test_peers_differ_along_the_asked_axes_only(mesh: Mesh, axes: set[str], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.size - 1))
    mine = mesh.coordinates(rank)
    expected = tuple(
        peer
        for peer in range(mesh.size)
        if all(mesh.coordinates(peer)[axis] == mine[axis] for axis in AXES if axis not in axes)
    )
    assert mesh.peers(rank, sorted(axes)) == mesh.peers(rank, sorted(axes, reverse=True)) == expected


@proven
@given(meshes)
def test_text_form_parses_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


def test_text_form_names_the_axes_with_more_than_one_rank() -> None:
    assert str(Mesh(tp=4, dp_replicate=2)) == "dp_replicate=2,tp=4"
    assert str(Mesh()) == "single"
    assert Mesh.parse(" tp = 4, pp=1 ") == Mesh(tp=4)


@proven
@given(meshes)
def test_a_data_rank_is_the_place_among_the_ranks_that_see_other_samples(mesh: Mesh) -> None:
    mesh.check_world(mesh.size)
    for rank in range(mesh.size):
        others = mesh.peers(rank, ("dp_replicate", "dp_shard"))
        assert mesh.data_rank(rank) == others.index(rank)
        assert mesh.num_data_ranks == len(others)
