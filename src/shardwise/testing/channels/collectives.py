"""The contract of `Channel`: collectives, alone, many at once, and inside backward."""

from functools import partial
from typing import Any

import torch

from shardwise.testing.channels.oracles import (
    GATHERED,
    SUMMED,
    Channel,
    Work,
    assert_same_bits,
    assert_sum,
    case,
    full,
    gather_and_check,
    given,
    part_of,
    reduce_and_check,
    uneven,
    values,
)


@case
def a_channel_knows_its_place(channel: Channel) -> None:
    assert 0 <= channel.rank < channel.size
    places = channel.exchange(f"{channel.rank} of {channel.size}".encode(), purpose="places")
    assert places == [f"{rank} of {channel.size}".encode() for rank in range(channel.size)]


@case
def all_gather_joins_parts_in_rank_order(channel: Channel) -> None:
    for dtype in GATHERED:
        for counts in ([7] * channel.size, uneven(channel)):
            gather_and_check(channel, counts, dtype, f"parts of {counts} {dtype}")


@case
def all_gather_takes_its_input_from_its_output(channel: Channel) -> None:
    for counts in ([6] * channel.size, uneven(channel)):
        output = full(channel, sum(counts), torch.float32)
        own = part_of(output, counts, channel.rank)
        own.copy_(values(channel.rank, counts[channel.rank], torch.float32))
        channel.all_gather(output, own, purpose=f"in place {counts}", counts=counts).wait()
        assert_same_bits(output, torch.cat([values(r, count, torch.float32) for r, count in enumerate(counts)]))


@case
def memory_that_a_channel_allocates_is_zeroed_and_its_own(channel: Channel) -> None:
    for num_bytes in (0, 1, 3_000_000):
        memory = channel.allocate(num_bytes)
        assert memory.dtype == torch.uint8
        assert memory.device == channel.device
        assert len(memory) == num_bytes
        assert not memory.any()
        memory.fill_(channel.rank + 1)
        channel.exchange(b"", purpose="everybody has written")
        assert bool((memory == channel.rank + 1).all())


@case
def shared_memory_is_seen_by_all_ranks_or_by_none(channel: Channel) -> None:
    for num_bytes in (1, 3_000_000):
        shared = channel.share(num_bytes)
        assert len(set(channel.exchange(str(shared is None).encode(), purpose="who shares"))) == 1
        if shared is None:
            continue
        assert [(part.dtype, len(part), part.device.type) for part in shared] == [
            (torch.uint8, num_bytes, "cpu")
        ] * channel.size
        assert not any(bool(part.any()) for part in shared)
        channel.exchange(b"", purpose="everybody has looked")
        shared[(channel.rank + 1) % channel.size].fill_(100 + channel.rank)
        channel.exchange(b"", purpose="everybody has written to a neighbour")
        assert bool((shared[channel.rank] == 100 + (channel.rank - 1) % channel.size).all())
        channel.exchange(b"", purpose="everybody has looked again")
        for turn in (1, 2):  # what is written again is seen again
            shared[channel.rank].fill_(channel.rank + turn)
            channel.exchange(b"", purpose="everybody has written")
            assert all(bool((part == rank + turn).all()) for rank, part in enumerate(shared))
            channel.exchange(b"", purpose="everybody has read")
        others = shared[:]
        shared = None
        assert all(bool((part == rank + 2).all()) for rank, part in enumerate(others))


@case
def sharing_memory_again_and_again_keeps_none(channel: Channel) -> None:
    for turn in range(40):
        shared = channel.share(1_000_003 + turn)
        if shared is not None:
            shared[channel.rank].fill_(turn)
            channel.exchange(b"", purpose=f"written {turn}")
            assert all(int(part[-1]) == turn for part in shared)


@case
def collectives_in_memory_that_the_channel_allocated_are_those_in_any_other(channel: Channel) -> None:
    counts = [count * 100_003 for count in uneven(channel)]  # of odd numbers of chunks, and not at their borders
    for turn in range(3):  # the second and third write again what peers have read
        inputs = [values(rank + turn, sum(counts), torch.bfloat16) for rank in range(channel.size)]
        gradients = channel.allocate(2 * sum(counts)).view(torch.bfloat16)
        gradients.copy_(inputs[channel.rank])
        reduced = full(channel, counts[channel.rank], torch.float32)
        work = channel.reduce_scatter(reduced, gradients, purpose="sum of allocated", counts=counts)
        parameters = channel.allocate(4 * sum(counts)).view(torch.float32)
        own = part_of(parameters, counts, channel.rank)
        own.copy_(values(channel.rank + turn, len(own), torch.float32))
        other = channel.all_gather(parameters, own, purpose="parts of allocated", counts=counts)
        other.wait()
        work.wait()
        gradients.zero_()  # free again: every peer has read it
        assert_sum(channel, reduced, inputs, counts)
        expected = [values(rank + turn, count, torch.float32) for rank, count in enumerate(counts)]
        assert_same_bits(parameters, torch.cat(expected))
        own.zero_()


@case
def collectives_of_nothing_complete(channel: Channel) -> None:
    nothing = full(channel, 0, torch.float32)
    channel.all_gather(nothing, nothing.clone(), purpose="nothing").wait()
    channel.reduce_scatter(nothing, nothing.clone(), purpose="nothing", counts=[0] * channel.size).wait()
    assert channel.exchange(b"", purpose="nothing") == [b""] * channel.size


@case
def one_rank_may_give_everything(channel: Channel) -> None:
    for giver in range(channel.size):
        counts = [11 if rank == giver else 0 for rank in range(channel.size)]
        gather_and_check(channel, counts, torch.float32, f"all from {giver}")
        reduce_and_check(channel, counts, torch.float32, torch.float32, f"all to {giver}")


@case
def reduce_scatter_sums_in_rank_order(channel: Channel) -> None:
    for dtype in SUMMED:
        for counts in ([7] * channel.size, uneven(channel)):
            reduce_and_check(channel, counts, dtype, dtype, f"sums of {counts} {dtype}")


@case
def reduce_scatter_sums_in_the_dtype_of_its_output(channel: Channel) -> None:
    widening = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)]
    for given_dtype, sum_dtype in [*widening, (torch.float32, torch.bfloat16)]:
        for counts in ([33] * channel.size, uneven(channel)):
            reduce_and_check(channel, counts, given_dtype, sum_dtype, f"{given_dtype} in {sum_dtype} {counts}")


@case
def reduce_scatter_adds_left_to_right_where_it_shows(channel: Channel) -> None:
    # (big + 1) - big, (1 + big) - big and -0 + -0: another order, or a sum that starts from zero, gives other bits.
    columns = [[1e8, 1.0, -1e8, 1.0, 3.0], [1.0, 1e8, -1e8, 1.0, 1e-3], [-0.0] * 5, [1e-8, 1.0, 1e-8, -1.0, 1e-8]]
    inputs = [torch.tensor([column[r % 5] for column in columns] * channel.size) for r in range(channel.size)]
    for dtype in (torch.float32, torch.bfloat16):
        output = full(channel, len(columns), torch.float32)
        own = inputs[channel.rank].to(channel.device, dtype)
        channel.reduce_scatter(output, own, purpose=f"order of {dtype}").wait()
        assert_sum(channel, output, [each.to(dtype) for each in inputs], [len(columns)] * channel.size)


@case
def reduce_scatter_writes_into_its_input(channel: Channel) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for counts in ([6] * channel.size, uneven(channel)):
            buffer = given(channel, sum(counts), dtype)
            output = part_of(buffer, counts, channel.rank)
            channel.reduce_scatter(output, buffer, purpose=f"in place {dtype} {counts}", counts=counts).wait()
            assert_sum(channel, output, [values(r, sum(counts), dtype) for r in range(channel.size)], counts)


@case
def large_collectives_arrive_whole(channel: Channel) -> None:
    share = 2_000_003 // channel.size  # 8 MB of float32 in all
    counts = [share + rank for rank in range(channel.size)]
    gather_and_check(channel, counts, torch.float32, "large gather")
    reduce_and_check(channel, counts, torch.float32, torch.float32, "large sum")
    reduce_and_check(channel, counts, torch.bfloat16, torch.float32, "large narrow sum")


@case
def an_input_is_free_once_its_wait_returned(channel: Channel) -> None:
    own = given(channel, 50_000, torch.float32)
    output = full(channel, 50_000 * channel.size, torch.float32)
    work = channel.all_gather(output, own, purpose="input is reused")
    if channel.rank == 0:
        work.wait()
        own.zero_()
    channel.exchange(b"", purpose="rank 0 has reused its input")
    work.wait()
    assert_same_bits(output, torch.cat([values(rank, 50_000, torch.float32) for rank in range(channel.size)]))


@case
def exchange_carries_any_length(channel: Channel) -> None:
    def value(rank: int) -> bytes:
        return bytes([rank + 1]) * (0, 1, 1 << 20, 1000)[(rank + shift) % 4]

    for shift in range(4):
        got = channel.exchange(value(channel.rank), purpose=f"lengths {shift}")
        assert got == [value(rank) for rank in range(channel.size)]


@case
def many_in_flight_may_be_waited_for_in_any_order(channel: Channel) -> None:
    works: list[Work] = []
    outputs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for index in range(12):
        outputs.append(full(channel, (index + 1) * channel.size, torch.float32))
        own = given(channel, index + 1, torch.float32)
        works.append(channel.all_gather(outputs[-1], own, purpose=f"gather {index}"))
        sums.append(full(channel, index + 1, torch.float32))
        whole = given(channel, (index + 1) * channel.size, torch.float32)
        works.append(channel.reduce_scatter(sums[-1], whole, purpose=f"sum {index}"))
    for work in works if channel.rank % 2 else reversed(works):  # neighbours wait in opposite orders
        work.wait()
    for index in range(12):
        count = index + 1
        assert_same_bits(outputs[index], torch.cat([values(r, count, torch.float32) for r in range(channel.size)]))
        inputs = [values(r, count * channel.size, torch.float32) for r in range(channel.size)]
        assert_sum(channel, sums[index], inputs, [count] * channel.size)


@case
def waiting_twice_is_harmless(channel: Channel) -> None:
    output = full(channel, channel.size, torch.int64)
    work = channel.all_gather(output, given(channel, 1, torch.int64), purpose="twice")
    work.wait()
    output.zero_()
    work.wait()
    assert not output.any()


class GatherScatter(torch.autograd.Function):
    """All ranks' parts of a parameter joined for the forward; the parts of its summed gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        whole = part.new_empty(part.numel() * channel.size)
        channel.all_gather(whole, part.detach(), purpose="forward").wait()
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        part = gradient.new_empty(gradient.numel() // ctx.channel.size)
        ctx.channel.reduce_scatter(part, gradient.contiguous(), purpose="backward").wait()
        return part, None


@case
def a_function_calls_in_forward_and_backward(channel: Channel) -> None:
    part = given(channel, 4, torch.float32).requires_grad_()
    factors = [values(50 + rank, 4 * channel.size, torch.float32) for rank in range(channel.size)]
    # Twice, so that backward calls come between others of the same graph.
    whole: torch.Tensor = GatherScatter.apply(part, channel)  # type: ignore[no-untyped-call]
    (whole * factors[channel.rank].to(channel.device)).sum().backward()
    assert part.grad is not None
    assert_sum(channel, part.grad, factors, [4] * channel.size)


@case
def hooks_start_transfers_while_backward_goes_on(channel: Channel) -> None:
    parameters = [given(channel, 4 * channel.size, torch.float32).zero_().requires_grad_() for _ in range(5)]
    sums = [full(channel, 4, torch.float32) for _ in parameters]
    works: list[Work] = []

    def start(index: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        works.append(channel.reduce_scatter(sums[index], parameter.grad, purpose=f"gradient {index}"))

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(start, index))

    def factor(rank: int, index: int) -> torch.Tensor:
        return values(10 * rank + index, 4 * channel.size, torch.float32)

    terms = [parameter * factor(channel.rank, index).to(channel.device) for index, parameter in enumerate(parameters)]
    torch.stack(terms).sum().backward()
    assert len(works) == len(parameters)
    for work in works:
        work.wait()
    for index in range(len(parameters)):
        assert_sum(channel, sums[index], [factor(r, index) for r in range(channel.size)], [4] * channel.size)
