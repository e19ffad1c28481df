"""The calls and bytes that `Recorded` lists, against what the formulas say."""

from typing import Any

import pytest
import torch

from shardwise.comm import Channel, Recorded, RecordedCall, alone, simulate
from shardwise.errors import MismatchError


def record(size: int) -> list[Recorded]:
    """One call of every kind on `size` ranks; rank r holds r + 1 elements of the uneven ones."""

    def body(channel: Channel) -> Recorded:
        recorded = Recorded(channel)
        counts = [rank + 1 for rank in range(size)]
        own, whole = torch.zeros(counts[channel.rank]), torch.zeros(sum(counts))
        recorded.exchange(b"x" * channel.rank, purpose="lengths")
        recorded.all_gather(whole, own, purpose="parameters", counts=counts).wait()
        recorded.reduce_scatter(own, whole.to(torch.bfloat16), purpose="gradients", counts=counts).wait()
        if channel.rank == 0:
            recorded.send(torch.zeros(2, 3, dtype=torch.float64), 1, purpose="activation").wait()
        elif channel.rank == 1:
            recorded.receive(torch.zeros(2, 3, dtype=torch.float64), 0, purpose="activation").wait()
        return recorded

    return simulate(size, body)


def test_every_call_is_listed_with_what_it_moved() -> None:
    def call(
        operation: str, purpose: str, dtype: torch.dtype, *counts: int, sent: int, received: int, peers: Any
    ) -> Any:
        return RecordedCall(
            operation=operation,
            purpose=purpose,
            dtype=dtype,
            num_elements=sum(counts),
            counts=counts,
            bytes_sent=sent,
            bytes_received=received,
            peers=peers,
        )

    recorded = record(3)[1]
    totals = recorded.bytes_sent("all_gather"), recorded.bytes_received("receive"), recorded.bytes_received()
    assert totals == (16, 48, 2 + 16 + 8 + 48)
    assert recorded.calls == [
        call("exchange", "lengths", torch.uint8, 0, 1, 2, sent=2 * 1, received=2, peers=(0, 2)),
        call("all_gather", "parameters", torch.float32, 1, 2, 3, sent=2 * (2 * 4), received=(1 + 3) * 4, peers=(0, 2)),
        call("reduce_scatter", "gradients", torch.bfloat16, 1, 2, 3, sent=4 * 2, received=2 * (2 * 2), peers=(0, 2)),
        call("receive", "activation", torch.float64, 6, sent=0, received=48, peers=(0,)),
    ]


def test_parts_record_into_the_same_list_under_the_ranks_of_the_whole() -> None:
    def body(channel: Channel) -> list[tuple[str, tuple[int, ...]]]:
        recorded = Recorded(channel)
        recorded.exchange(b"", purpose="world")
        if channel.rank == 0:
            return []
        part = recorded.over([3, 2, 1])
        part.exchange(b"", purpose="part")
        if channel.rank != 2:
            part.over([2, 0]).exchange(b"", purpose="part of part")
        assert part.calls is recorded.calls
        return [(call.purpose, call.peers) for call in recorded.calls]

    assert simulate(4, body)[1:] == [
        [("world", (0, 2, 3)), ("part", (3, 2)), ("part of part", (3,))],
        [("world", (0, 1, 3)), ("part", (3, 1))],
        [("world", (0, 1, 2)), ("part", (2, 1)), ("part of part", (1,))],
    ]


def test_a_cleared_list_starts_again_and_a_refused_call_is_not_listed() -> None:
    recorded = Recorded(alone())
    recorded.exchange(b"one", purpose="first")
    recorded.clear()
    with pytest.raises(MismatchError):
        recorded.all_gather(torch.zeros(3), torch.zeros(1), purpose="wrong")
    recorded.exchange(b"two", purpose="second")
    assert [call.purpose for call in recorded.calls] == ["second"]
