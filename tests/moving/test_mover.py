"""The mover alone: deliveries between all ranks, with one message each way at a time."""

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.moving.copies import fill, parts_of
from shardwise.moving.mover import Delivery, Mover, by_distance
from shardwise.space import Piece, moves
from tests.moving.watched import Watched

NUM_RANKS = 4
WHOLE = Piece(name="w", dtype="int32", global_shape=(NUM_RANKS, 3))


def row(rank: int) -> Piece:
    return Piece(name="w", dtype="int32", global_shape=(NUM_RANKS, 3), offset=(rank, 0), shape=(1, 3))


@pytest.mark.parametrize("num_under_way", [1, 2])
@pytest.mark.parametrize("adds", [False, True])
def test_every_rank_gets_a_row_of_each_with_few_messages_under_way(num_under_way: int, adds: bool) -> None:
    def move(channel: sw.Channel) -> tuple[list[list[int]], int, int]:
        watched: Any = Watched(channel)
        own = torch.full((3,), channel.rank + 1, dtype=torch.int32)
        target = torch.full((NUM_RANKS, 3), 10, dtype=torch.int32)
        mover: Mover[int, str] = Mover(
            watched,
            take=lambda source, found: parts_of(own, found),
            put=lambda name, found, elements: fill(target, found, elements, adds=adds),
            purpose="rows",
        )
        deliveries = [
            Delivery(giver, taker, giver, "whole", torch.int32, moves(row(giver), WHOLE))
            for giver in range(NUM_RANKS)
            for taker in range(NUM_RANKS)
            if channel.rank in (giver, taker)
        ]
        mover.run(by_distance(deliveries, channel), num_under_way=num_under_way)
        return target.tolist(), watched.most_under_way, mover.received_bytes

    for target, most_under_way, received_bytes in sw.simulate(NUM_RANKS, move):
        assert target == [[rank + 1 + 10 * adds] * 3 for rank in range(NUM_RANKS)]
        assert most_under_way <= 2 * 16 * num_under_way  # a row, in and out
        assert received_bytes == 16 * (NUM_RANKS - 1)
