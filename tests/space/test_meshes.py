"""Meshes against the row-major list of their coordinates."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
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


def test_a_text_that_is_no_mesh_is_refused_with_every_problem() -> None:
    with pytest.raises(PlanError) as caught:
        Mesh.parse("tp=0,dp_shrad=2,pp=2,pp=3,dp_shard=two,dp_replicate")
    axis, near, twice, word, bare = caught.value.problems
    assert axis == "mesh axis tp has size '0'; a size is a whole number, 1 or more"
    assert near.startswith(
        "'dp_shrad' is no mesh axis; the axes are pp, dp_replicate, dp_shard, tp (did you mean dp_sh"
    )
    assert twice.startswith("mesh axis pp is given twice")
    assert word.startswith("mesh axis dp_shard has size 'two'")
    assert bare.startswith("mesh axis dp_replicate has size ''")


@pytest.mark.parametrize("text", ["", "single,tp=2", "tp=2,", "tp=-2", "tp=2=2", "tp=\u0662"])
def test_a_text_that_nearly_is_a_mesh_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Mesh.parse(text)


def test_every_bad_size_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        Mesh(pp=0, dp_shard=2.0, tp=True)  # type: ignore[arg-type]
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "mesh axis pp has size 0",
        "mesh axis dp_shard has size 2.0",
        "mesh axis tp has size True",
    ]


def test_a_mesh_that_does_not_fill_the_world_is_refused_with_both_numbers_and_a_way_out() -> None:
    mesh = Mesh(dp_shard=2, tp=2)
    mesh.check_world(4)
    with pytest.raises(PlanError, match=r"dp_shard=2,tp=2 asks for 4 ranks, .* has 8; start 4 .* set dp_shard=4"):
        mesh.check_world(8)
    with pytest.raises(PlanError, match=r"has 5; start 4 processes, so that"):
        mesh.check_world(5)


def test_a_rank_coordinate_or_axis_outside_the_mesh_is_refused() -> None:
    mesh = Mesh(dp_shard=2, tp=2)
    for rank in (-1, 4):
        with pytest.raises(PlanError, match=f"ranks 0 to 3, but was asked for rank {rank}"):
            mesh.coordinates(rank)
    with pytest.raises(PlanError, match="2 problems") as caught:
        mesh.rank(pp=1, tp=-1)
    assert "coordinates 0 to 0 along pp" in caught.value.problems[0]
    with pytest.raises(PlanError, match=r"'dp_shards' is no mesh axis; .* \(did you mean dp_shard\?\)"):
        mesh.peers(0, ["dp_shards"])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 3, 2), (1, 2, 3, 1), (2, 3, 2, 2)])
def test_a_data_rank_is_the_place_among_the_ranks_that_see_other_samples(sizes: tuple[int, int, int, int]) -> None:
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    for rank in range(mesh.size):
        others = mesh.peers(rank, ("dp_replicate", "dp_shard"))
        assert mesh.data_rank(rank) == others.index(rank)
        assert mesh.num_data_ranks == len(others)


@pytest.mark.parametrize("rank", [-1, 2, 1.0, True, "0", None])
def test_what_is_no_rank_of_the_mesh_is_refused(rank: object) -> None:
    with pytest.raises(PlanError, match="rank"):
        Mesh(dp_shard=2).data_rank(rank)  # type: ignore[arg-type]
