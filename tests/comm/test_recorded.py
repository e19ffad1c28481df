"""The calls and bytes that `Recorded` lists, against what the formulas say."""

import dataclasses

import pytest
import torch

from shardwise.comm import Channel, Recorded, RecordedCall, alone, simulate


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
    lengths, parameters, gradients, activation = record(3)[1].calls
    assert lengths == RecordedCall(
        operation="exchange",
        purpose="lengths",
        dtype=torch.uint8,
        num_elements=3,
        counts=(0, 1, 2),
        bytes_sent=2 * 1,
        bytes_received=2,
        peers=(0, 2),
    )
    assert parameters == RecordedCall(
        operation="all_gather",
        purpose="parameters",
        dtype=torch.float32,
        num_elements=6,
        counts=(1, 2, 3),
        bytes_sent=2 * (2 * 4),
        bytes_received=(1 + 3) * 4,
        peers=(0, 2),
    )
    assert gradients == RecordedCall(
        operation="reduce_scatter",
        purpose="gradients",
        dtype=torch.bfloat16,
        num_elements=6,
        counts=(1, 2, 3),
        bytes_sent=(1 + 3) * 2,
        bytes_received=2 * (2 * 2),
        peers=(0, 2),
    )
    assert activation == RecordedCall(
        operation="receive",
        purpose="activation",
        dtype=torch.float64,
        num_elements=6,
        counts=(6,),
        bytes_sent=0,
        bytes_received=48,
        peers=(0,),
    )


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_sent_is_received(size: int) -> None:
    ranks = record(size)
    for operation in (None, "exchange", "all_gather", "reduce_scatter"):
        sent = [rank.bytes_sent(operation) for rank in ranks]
        assert sum(sent) == sum(rank.bytes_received(operation) for rank in ranks) > 0
    assert [rank.bytes_sent("send") for rank in ranks] == [48] + [0] * (size - 1)
    assert [rank.bytes_received("receive") for rank in ranks] == [0, 48] + [0] * (size - 2)
    for rank in ranks:
        assert rank.bytes_sent() == sum(call.bytes_sent for call in rank.calls)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_an_even_step_sends_the_share_of_the_formula(size: int) -> None:
    num_elements = 64

    def body(channel: Channel) -> tuple[int, int]:
        recorded = Recorded(channel)
        own, whole = torch.zeros(num_elements // size), torch.zeros(num_elements, dtype=torch.bfloat16)
        recorded.reduce_scatter(own, whole, purpose="gradients").wait()
        recorded.all_gather(whole, own.to(torch.bfloat16), purpose="parameters").wait()
        return recorded.bytes_sent(), recorded.bytes_received()

    # (d - 1) / d * N * (bytes of gradient + bytes of working copy)
    expected = (size - 1) * num_elements * (2 + 2) // size
    assert simulate(size, body) == [(expected, expected)] * size


def test_parts_record_into_the_same_list_under_the_ranks_of_the_whole() -> None:
    def body(channel: Channel) -> list[tuple[str, tuple[int, ...]]]:
        recorded = Recorded(channel)
        recorded.exchange(b"", purpose="world")
        if channel.rank == 0:
            return []
        part = recorded.over([3, 2, 1])
        assert part is recorded.over([3, 2, 1])
        assert (part.rank, part.size, part.device) == (3 - channel.rank, 3, channel.device)
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


def test_a_cleared_list_starts_again() -> None:
    recorded = Recorded(alone())
    recorded.exchange(b"one", purpose="first")
    recorded.clear()
    recorded.exchange(b"two", purpose="second")
    assert [call.purpose for call in recorded.calls] == ["second"]


def test_a_call_cannot_be_changed_afterwards() -> None:
    recorded = Recorded(alone())
    recorded.exchange(b"one", purpose="first")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recorded.calls[0].bytes_sent = 3  # type: ignore[misc]


def test_a_refused_call_is_not_listed() -> None:
    recorded = Recorded(alone())
    with pytest.raises(Exception, match="output has shape"):
        recorded.all_gather(torch.zeros(3), torch.zeros(1), purpose="wrong")
    assert recorded.calls == []


def test_the_wrapped_channel_is_seen_through() -> None:
    def body(channel: Channel) -> None:
        recorded = Recorded(channel)
        assert (recorded.rank, recorded.size) == (channel.rank, channel.size)
        assert recorded.progresses_alone == channel.progresses_alone
        recorded.close()

    simulate(2, body)
