"""The tree of an exchange: one tree over all ranks, few neighbours each, few edges between hosts, and short ways."""

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.process.tree import place_in_tree, relay_neighbours
from tests.properties import tried


@tried(15)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_any_ranks_on_any_hosts_are_one_tree_of_short_ways(hosts: list[int], random: Random) -> None:
    members = random.sample(range(len(hosts)), random.randint(1, len(hosts)))
    places = {rank: place_in_tree(rank, members, hosts) for rank in members}
    (root,) = (rank for rank, place in places.items() if place.parent is None)
    order: list[int] = []
    depths: list[int] = []

    def walk(rank: int, depth: int) -> None:
        order.append(rank)
        depths.append(depth)
        for child in places[rank].children:
            assert places[child].parent == rank
            walk(child, depth + 1)

    walk(root, 0)
    assert sorted(order) == sorted(members)
    # What a rank collects comes in the order of the walk, and `positions` leads back to that of the channel.
    positions = places[root].positions
    assert members == (order if positions is None else [order[position] for position in positions])
    num_hosts = len({hosts[rank] for rank in members})
    crossings = [
        rank for rank, place in places.items() if place.parent is not None and hosts[place.parent] != hosts[rank]
    ]
    assert len(crossings) == num_hosts - 1
    assert max(depths) <= math.log2(num_hosts) + math.log2(len(members)) + 1
    assert all(len(place.neighbours) <= 5 for place in places.values())


def reached(ranks: set[int], neighbours: dict[int, list[int]]) -> tuple[set[int], int]:
    """The ranks to which words of one of these come through these alone, and after how many ways."""
    heard = last = {min(ranks)}
    num_ways = 0
    while last := {other for rank in last for other in neighbours[rank] if other in ranks} - heard:
        heard = heard | last
        num_ways += 1
    return heard, num_ways


@tried(15)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=40))
def test_words_reach_all_ranks_but_any_one_or_those_of_any_host(hosts: list[int]) -> None:
    ranks = set(range(len(hosts)))
    neighbours = {rank: relay_neighbours(rank, hosts) for rank in ranks}
    for rank, others in neighbours.items():
        assert rank not in others
        assert len(others) <= 7
        assert all(rank in neighbours[other] for other in others)
    silent = [{rank} for rank in ranks] + [{rank for rank in ranks if hosts[rank] == host} for host in set(hosts)]
    for each in silent:
        if left := ranks - each:
            assert reached(left, neighbours)[0] == left


def test_words_reach_1024_ranks_in_few_ways_also_around_a_host() -> None:
    hosts = [rank // 8 for rank in range(1024)]
    neighbours = {rank: relay_neighbours(rank, hosts) for rank in range(1024)}
    for silent in (range(0), range(8), range(512, 520), range(8, 16)):
        heard, num_ways = reached(set(range(1024)) - {*silent}, neighbours)
        assert len(heard) == 1024 - len(silent)
        assert num_ways <= 40
