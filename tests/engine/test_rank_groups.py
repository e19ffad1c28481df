"""What ranks of a mesh are to each other, against a loop over all of them."""

import pytest

import shardwise as sw
from shardwise.engine.channels import RankGroups


@pytest.mark.parametrize(
    "mesh", [sw.Mesh(), sw.Mesh(dp_shard=4), sw.Mesh(pp=2, dp_replicate=2, dp_shard=3, tp=2), sw.Mesh(pp=3, tp=2)]
)
def test_groups_of_ranks_are_those_of_each_rank(mesh: sw.Mesh) -> None:
    groups = RankGroups.of(sw.Plan(mesh=mesh))
    ranks = range(mesh.size)
    for axes, found in ((("tp",), groups.alike), (("dp_replicate", "dp_shard"), groups.replicas)):
        assert found == tuple(dict.fromkeys(mesh.peers(rank, axes) for rank in ranks))
    for rank in ranks:
        same = [other for other in ranks if mesh.data_rank(other) == mesh.data_rank(rank)]
        assert groups.first_of[rank] == groups.speakers[mesh.data_rank(rank)] == same[0]
    assert len(groups.speakers) == mesh.num_data_ranks
