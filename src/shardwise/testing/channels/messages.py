"""The contract of `Channel`: messages between two ranks, and channels of some ranks."""

import torch

from shardwise.testing.channels.oracles import (
    Channel,
    Work,
    assert_same_bits,
    case,
    full,
    gather_and_check,
    given,
    reduce_and_check,
    uneven,
    values,
)


@case
def both_ranks_of_a_pair_may_send_first(channel: Channel) -> None:
    peer = channel.rank ^ 1
    if peer >= channel.size:
        return
    for count in (1, 1_000_003):  # 4 bytes, 4 MB
        got = full(channel, count, torch.float32)
        sent = channel.send(given(channel, count, torch.float32), peer, purpose=f"swap {count}")
        channel.receive(got, peer, purpose=f"swap {count}").wait()
        sent.wait()
        assert_same_bits(got, values(peer, count, torch.float32))


@case
def a_ring_passes_on(channel: Channel) -> None:
    if channel.size == 1:
        return
    right, left = (channel.rank + 1) % channel.size, (channel.rank - 1) % channel.size
    held = given(channel, 1000, torch.bfloat16)
    for _ in range(channel.size):
        coming = full(channel, 1000, torch.bfloat16)
        works = [channel.send(held, right, purpose="ring"), channel.receive(coming, left, purpose="ring")]
        for work in works:
            work.wait()
        held = coming
    assert_same_bits(held, values(channel.rank, 1000, torch.bfloat16))


@case
def messages_of_a_pair_arrive_in_the_order_sent(channel: Channel) -> None:
    shapes = [(3,), (), (2, 0, 5), (40, 50), (1,), (3,), (2, 3, 4), (100_000,)]
    dtypes = [torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.float32, torch.complex64]

    def message(sender: int, receiver: int, index: int) -> torch.Tensor:
        shape = shapes[index % len(shapes)]
        count = torch.Size(shape).numel()
        return values(100 * sender + 10 * receiver + index, count, dtypes[index % len(dtypes)]).view(shape)

    sends: list[Work] = []
    receives: list[tuple[int, int, torch.Tensor, Work]] = []
    for index in range(16):
        for peer in range(channel.size):
            if peer != channel.rank:
                own = message(channel.rank, peer, index).to(channel.device)
                sends.append(channel.send(own, peer, purpose=f"message {index}"))
                got = torch.zeros_like(message(peer, channel.rank, index), device=channel.device)
                receives.append((peer, index, got, channel.receive(got, peer, purpose=f"message {index}")))
    for peer, index, got, work in reversed(receives):
        work.wait()
        assert_same_bits(got, message(peer, channel.rank, index))
    for work in sends:
        work.wait()


@case
def messages_and_collectives_do_not_disturb_each_other(channel: Channel) -> None:
    peer = channel.rank ^ 1
    got = full(channel, 10, torch.float32)
    works: list[Work] = []
    if peer < channel.size:
        works.append(channel.receive(got, peer, purpose="beside collectives"))
    gather_and_check(channel, uneven(channel), torch.float32, "beside messages")
    if peer < channel.size:
        works.append(channel.send(given(channel, 10, torch.float32), peer, purpose="beside collectives"))
    reduce_and_check(channel, uneven(channel), torch.float32, torch.float32, "beside messages")
    for work in works:
        work.wait()
    assert_same_bits(
        got, values(peer, 10, torch.float32) if peer < channel.size else full(channel, 10, torch.float32).cpu()
    )


@case
def members_talk_among_themselves(channel: Channel) -> None:
    members = [rank for rank in range(channel.size) if rank % 2 == channel.rank % 2]
    part = channel.over(members)
    assert (part.rank, part.size) == (members.index(channel.rank), len(members))
    assert part.exchange(bytes([channel.rank]), purpose="half") == [bytes([rank]) for rank in members]
    gather_and_check(part, uneven(part), torch.float32, "half")
    reduce_and_check(part, uneven(part), torch.bfloat16, torch.float32, "half")
    a_ring_passes_on(part)


@case
def members_are_numbered_in_the_order_given(channel: Channel) -> None:
    members = list(reversed(range(channel.size)))
    part = channel.over(members)
    assert part.rank == channel.size - 1 - channel.rank
    assert part.exchange(bytes([channel.rank]), purpose="reversed") == [bytes([rank]) for rank in members]
    gather_and_check(part, uneven(part), torch.float32, "reversed")
    reduce_and_check(part, uneven(part), torch.float32, torch.float32, "reversed")
    a_ring_passes_on(part)


@case
def parts_have_parts_of_their_own(channel: Channel) -> None:
    if channel.rank == channel.size // 2:
        lonely = channel.over([channel.rank])
        assert lonely.exchange(b"me", purpose="lonely") == [b"me"]
        gather_and_check(lonely, [4], torch.float32, "lonely")
        return
    others = [rank for rank in reversed(range(channel.size)) if rank != channel.size // 2]
    outer = channel.over(others)
    pair = outer.rank // 2
    inner = outer.over([rank for rank in (2 * pair, 2 * pair + 1) if rank < outer.size])
    expected = [bytes([rank]) for rank in others[2 * pair : 2 * pair + 2]]
    assert inner.exchange(bytes([channel.rank]), purpose="pair") == expected
    gather_and_check(inner, uneven(inner), torch.float32, "pair")


@case
def the_same_ranks_have_one_channel_wherever_it_was_asked_for(channel: Channel) -> None:
    turned = channel.over(range(channel.size)[::-1])
    assert channel.over(range(channel.size)) is channel
    assert turned is channel.over(list(reversed(range(channel.size))))
    assert turned.over(range(channel.size)[::-1]) is channel
    assert turned.rank == channel.size - 1 - channel.rank
    lonely = turned.over([turned.rank])
    assert lonely is channel.over([channel.rank])


@case
def channels_do_not_mix_their_messages(channel: Channel) -> None:
    part = channel.over(list(reversed(range(channel.size))))
    peer = channel.rank ^ 1
    if peer >= channel.size:
        return
    peer_in_part = channel.size - 1 - peer
    over_channel, over_part = full(channel, 5, torch.float32), full(channel, 5, torch.float32)
    own = given(channel, 5, torch.float32)
    works = [
        channel.send(own, peer, purpose="message"),
        part.send(-own, peer_in_part, purpose="message"),
        part.receive(over_part, peer_in_part, purpose="message"),
        channel.receive(over_channel, peer, purpose="message"),
    ]
    for work in works:
        work.wait()
    assert_same_bits(over_channel, values(peer, 5, torch.float32))
    assert_same_bits(over_part, -values(peer, 5, torch.float32))


@case
def two_groups_work_side_by_side(channel: Channel) -> None:
    """Rows and columns of a grid, as the axes of a mesh use them, with transfers of both in flight."""
    width = 2 if channel.size % 2 == 0 else channel.size
    row = channel.over([rank for rank in range(channel.size) if rank // width == channel.rank // width])
    column = channel.over([rank for rank in range(channel.size) if rank % width == channel.rank % width])
    own = given(channel, 3, torch.float32)
    over_row, over_column = full(row, 3 * row.size, torch.float32), full(column, 3 * column.size, torch.float32)
    works = [row.all_gather(over_row, own, purpose="row"), column.all_gather(over_column, own, purpose="column")]
    for work in reversed(works):
        work.wait()
    rows = [channel.rank // width * width + each for each in range(row.size)]
    columns = [channel.rank % width + each * width for each in range(column.size)]
    assert_same_bits(over_row, torch.cat([values(rank, 3, torch.float32) for rank in rows]))
    assert_same_bits(over_column, torch.cat([values(rank, 3, torch.float32) for rank in columns]))
