"""The ways of large parts between hosts: each crosses once to a host, and every rank gets every part once."""

import pytest
import torch

from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.host_ways import HostWays, host_ways
from shardwise.comm.process.messages import INLINE_BYTES_BETWEEN_HOSTS
from shardwise.errors import PeerError
from tests.comm.boards import count_chunks, on_threads, relayed_boards

HOSTS = {
    "one host": [0, 0, 0],
    "each alone": [0, 1, 2],
    "two and two": [0, 0, 2, 2],
    "three and one": [0, 0, 0, 3],
    "in turns": [0, 1, 0, 1, 0],
    "many": [each // 3 for each in range(8)],
}


@pytest.mark.parametrize("kernels", HOSTS.values(), ids=HOSTS)
def test_every_rank_gets_every_part_once_and_a_host_gets_it_once(kernels: list[int]) -> None:
    members = [*range(len(kernels))]
    ways = {rank: host_ways(rank, members, kernels) for rank in members}
    for of in members:
        came: list[tuple[int, int]] = [(of, to) for to in ways[of].takers]
        for passing in members:
            if of in ways[passing].passed_on:
                assert ways[passing].givers[of] == of
                came += [(passing, to) for to in ways[passing].near]
        assert sorted(to for _, to in came) == [rank for rank in members if rank != of]
        assert all(ways[to].givers[of] == giver for giver, to in came)
        crossings = [kernels[to] for giver, to in came if kernels[giver] != kernels[to]]
        assert sorted(crossings) == sorted({*kernels} - {kernels[of]})


def test_ranks_of_a_host_share_out_what_they_take() -> None:
    assert host_ways(0, (0, 1, 2, 3), (0, 0, 2, 2)) == HostWays(
        takers=[1, 2], givers={1: 1, 2: 2, 3: 1}, passed_on=[2], near=[1]
    )


def test_members_are_those_of_the_channel_in_its_order() -> None:
    ways = host_ways(5, (5, 1, 4), (0, 0, 0, 0, 7, 7))
    assert (ways.takers, ways.givers, ways.near) == ([1, 4], {1: 1, 4: 4}, [4])


COUNTS = [5 << 20, INLINE_BYTES_BETWEEN_HOSTS + 1, 0, 17]
"""Bytes that each rank gives: two are large, of which one ends in the middle of a chunk."""


def part(rank: int, call: int) -> torch.Tensor:
    return (torch.arange(COUNTS[rank]) * (rank + 3 * call + 1)).to(torch.uint8)


def gather_many(channel: ProcessChannel) -> list[bool]:
    """Several gathers in flight, whose outputs are plain or lent memory, waited for in opposite orders."""
    works = []
    for call in range(4):
        output = channel.allocate(sum(COUNTS)) if call % 2 else torch.zeros(sum(COUNTS), dtype=torch.uint8)
        given = part(channel.rank, call)
        works.append((channel.all_gather(output, given, purpose=f"gather {call}", counts=COUNTS), output, given))
    for work, _, _ in works if channel.rank % 2 else reversed(works):
        work.wait()
    return [
        torch.equal(output, torch.cat([part(rank, call) for rank in range(4)]))
        for call, (_, output, _) in enumerate(works)
    ]


def test_large_parts_come_whole_by_way_of_a_neighbour() -> None:
    assert on_threads(4, gather_many, among=relayed_boards(4, ranks_of_a_host=2)) == [[True] * 4] * 4


def gather_after_counting(channel: ProcessChannel) -> dict[int, int]:
    gather_many(channel)  # all links are there
    sent = count_chunks(channel)
    gather_many(channel)
    return {peer: num for (_, peer), num in sent.items()}


def test_a_part_crosses_to_another_host_once() -> None:
    """Rank 0 gives two chunks to rank 2, which gives them to rank 3 as five; rank 1 gives its one to rank 3."""
    sent = on_threads(4, gather_after_counting, among=relayed_boards(4, ranks_of_a_host=2))
    small, calls = 1, 4
    assert sent[0] == {1: 5 * calls, 2: 2 * calls}
    assert sent[1] == {0: 1 * calls, 3: 1 * calls}
    assert sent[2] == {0: small * calls, 1: small * calls, 3: (small + 5) * calls}
    assert sent[3] == {0: small * calls, 1: small * calls, 2: (small + 1) * calls}


def leave_instead(channel: ProcessChannel) -> tuple[int | None, str]:
    gather_many(channel)
    if channel.rank == 0:
        channel.abort("no more")
        return 0, ""
    output = torch.zeros(sum(COUNTS), dtype=torch.uint8)
    with pytest.raises(PeerError) as caught:
        channel.all_gather(output, part(channel.rank, 0), purpose="the last", counts=COUNTS).wait()
    return caught.value.rank, str(caught.value)


def test_all_ranks_name_the_giver_and_not_who_passes_on() -> None:
    for rank, text in on_threads(4, leave_instead, among=relayed_boards(4, ranks_of_a_host=2))[1:]:
        assert rank == 0, text
