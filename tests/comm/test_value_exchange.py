"""Exchanges along a tree: all values everywhere, few messages per rank, and every rank raises a fault."""

import pytest

from shardwise.comm.agreement import exchange_parts
from shardwise.comm.channel import Signature
from shardwise.comm.process.channel import ProcessChannel
from shardwise.errors import CallMismatchError, PeerError
from tests.comm.boards import Sent, count_chunks, on_threads


def values_of(size: int, round_number: int) -> list[bytes]:
    """Of one length, of several, of none, and more than goes into a frame."""
    lengths = (7, None, 0, 20_000)
    length = lengths[round_number % 4]
    return [bytes([rank + 1]) * (length if length is not None else rank % 5 * 9_000) for rank in range(size)]


def exchange_all(channel: ProcessChannel) -> Sent:
    sent = count_chunks(channel)
    for _ in range(3):
        figures = channel.exchange(b"20 bytes or about it", purpose="figures")
        assert figures == [b"20 bytes or about it"] * channel.size
    small = sent.copy()
    for round_number in range(4):
        expected = values_of(channel.size, round_number)
        assert channel.exchange(expected[channel.rank], purpose=f"round {round_number}") == expected
    backwards = list(reversed(range(channel.size)))
    assert channel.over(backwards).exchange(bytes([channel.rank]), purpose="order") == [bytes([r]) for r in backwards]
    return small


@pytest.mark.parametrize("size", [2, pytest.param(5, marks=pytest.mark.quick), 16])
def test_every_rank_gets_all_values_in_few_messages_from_few_peers(size: int) -> None:
    """On hosts of several ranks, not in the order of the ranks; one rank is alone on its host."""
    remote = [rank for rank in (1, 2, 4, 9) if rank < size]
    for rank, sent in enumerate(on_threads(size, exchange_all, remote=remote)):
        assert {sender for sender, _ in sent} == {rank}
        assert set(sent.values()) == {3}  # one message to each neighbour for each exchange
        assert len(sent) <= 5


def call_something_else(channel: ProcessChannel, odd: int) -> str:
    for _ in range(3):
        channel.exchange(b"", purpose="apples")
    with pytest.raises(CallMismatchError) as caught:
        channel.exchange(b"", purpose="beans" if channel.rank == odd else "apples")
    return str(caught.value)


@pytest.mark.parametrize("odd", [0, 3])
def test_every_rank_is_told_of_a_rank_that_calls_something_else_wherever_it_is_in_the_tree(odd: int) -> None:
    for text in on_threads(8, lambda channel: call_something_else(channel, odd), remote=(5, 6, 7)):
        assert f"  - rank {odd}: exchange for 'beans'" in text
        assert text.count("exchange for 'apples'") == 1


def waits_of_an_exchange(channel: ProcessChannel) -> dict[int, float]:
    channel.exchange(b"", purpose="start")
    channel.board.tally.open()
    channel.exchange(b"", purpose="figures")
    return channel.board.tally.take().waited


def test_the_waits_of_all_ranks_count_for_the_one_that_came_last_and_not_for_neighbours_that_wait_too() -> None:
    waits = on_threads(8, waits_of_an_exchange, remote=(5, 6))
    named = [list(each) for each in waits]
    assert all(len(ranks) == 1 for ranks in named)
    assert all(seconds > 0 for each in waits for seconds in each.values())
    # All but that rank, which waits for nothing but the way of the values.
    (others,) = (
        {ranks[0] for rank, ranks in enumerate(named) if rank != last}
        for last in range(8)
        if sum(ranks == [last] for ranks in named) >= 7
    )
    assert len(others) == 1


def note_and_exchange(channel: ProcessChannel, odd: int) -> str:
    """Transfers on another way: all agree on two of them, and one rank calls them in another order later."""
    pair = channel.over([rank for rank in range(channel.size) if rank // 2 == channel.rank // 2])
    assert isinstance(pair, ProcessChannel)
    gather, reduce = (Signature(operation=name, purpose="weights") for name in ("all_gather", "reduce_scatter"))
    for signature in (gather, reduce):
        pair.agree_on(signature)
    for _ in range(2):
        for signature in (gather, reduce):
            pair.note(signature)
        channel.exchange(b"", purpose="figures")
    for signature in (reduce, gather) if channel.rank == odd else (gather, reduce):
        pair.note(signature)
    with pytest.raises(CallMismatchError) as caught:
        channel.exchange(b"", purpose="figures")
    return str(caught.value)


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (4, 0), (8, 5)])
def test_an_exchange_of_all_finds_calls_that_differ_in_a_part_and_names_both_ranks(size: int, odd: int) -> None:
    (text,) = set(on_threads(size, lambda channel: note_and_exchange(channel, odd)))
    lines = {f"  - rank {odd}: reduce_scatter for 'weights'", f"  - rank {odd ^ 1}: all_gather for 'weights'"}
    assert set(text.splitlines()[1:]) == lines


def leave_out(channel: ProcessChannel, odd: int, agrees: bool) -> str:
    """One rank leaves out more calls than a frame names, and goes on in step with the others."""
    signatures = [Signature(operation="all_gather", purpose=f"weights {number}") for number in range(100)]
    for signature in signatures:
        channel.agree_on(signature)
    try:
        for signature in signatures if channel.rank != odd else signatures[:7] + signatures[97:]:
            channel.note(signature)
        if agrees:
            channel.agree_on(Signature(operation="all_gather", purpose="new weights"))
        channel.exchange(b"", purpose="figures")
    except CallMismatchError as error:
        return str(error)
    return "all is well"


@pytest.mark.parametrize(("size", "odd", "agrees"), [(2, 1, False), (5, 0, False), (5, 4, True)])
def test_a_rank_that_leaves_out_many_known_calls_is_found_by_the_next_exchange(
    size: int, odd: int, agrees: bool
) -> None:
    (text,) = set(on_threads(size, lambda channel: leave_out(channel, odd, agrees)))
    assert text.count("\n") == 2
    assert f"  - rank {odd}: all_gather for " in text
    if not agrees:
        assert f"  - rank {odd}: all_gather for 'weights 97'" in text
        assert text.count("all_gather for 'weights 7'") == 1


def test_known_calls_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = Signature(operation="all_gather", purpose="weights")

    def body(channel: ProcessChannel) -> None:
        channel.agree_on(signature)
        channel.exchange(b"", purpose="all have agreed")
        for link in channel.board.links.values():
            monkeypatch.setattr(link, "put", None)
        for _ in range(10):
            channel.note(signature)
        for link in channel.board.links.values():
            monkeypatch.delattr(link, "put")

    on_threads(3, body)


def test_parts_of_values_arrive_as_they_were_given_and_what_is_alike_once() -> None:
    def body(channel: ProcessChannel) -> None:
        size = channel.size
        for order in (list(range(size)), list(reversed(range(size)))):
            among = channel.over(order)
            mine = [b"all say this", bytes([among.rank]) * 5, b"x" * among.rank]
            alike, own, uneven = exchange_parts(among, mine, purpose="parts")
            assert alike.runs == [(b"all say this", size)]
            assert own.rows is not None
            assert own.rows.tolist() == [[rank] * 5 for rank in range(size)]
            assert [*uneven] == [b"x" * rank for rank in range(size)]

    for size in (2, 3, 9):
        on_threads(size, body, remote=[rank for rank in (2, 4, 5) if rank < size])


def test_ranks_that_give_unlike_numbers_of_parts_are_told() -> None:
    def body(channel: ProcessChannel) -> str:
        with pytest.raises(PeerError) as caught:
            exchange_parts(channel, [b""] * (3 if channel.rank == 4 else 2), purpose="parts")
        return str(caught.value)

    for text in on_threads(6, body):
        assert "sent values that are none (values of " in text
