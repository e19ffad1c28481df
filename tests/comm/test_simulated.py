"""What `simulate` promises beyond the contract of channels: order, random states, what happens to tensors."""

import gc
import random
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shardwise.comm import Channel, Work, simulate
from shardwise.errors import MismatchError, PlanError


def meet(channel: Channel, purpose: str = "meet") -> None:
    channel.exchange(b"", purpose=purpose)


def gather(channel: Channel, purpose: str) -> Work:
    return channel.all_gather(torch.zeros(channel.size), torch.zeros(1), purpose=purpose)


# -- order


def test_results_come_in_rank_order() -> None:
    assert simulate(5, lambda channel: (channel.rank, channel.size)) == [(rank, 5) for rank in range(5)]


def test_one_rank_runs_at_a_time_and_hands_over_in_rank_order_when_it_must_wait() -> None:
    events: list[str] = []

    def body(channel: Channel) -> None:
        for step in range(3):
            events.append(f"{channel.rank} begins {step}")
            torch.randn(200, 200) @ torch.randn(200, 200)  # leaves the interpreter lock: threads would overlap here
            events.append(f"{channel.rank} ends {step}")
            meet(channel)

    simulate(3, body)
    # The last rank to arrive goes straight on to the next step; the others follow in rank order.
    turns = [(0, 0), (1, 0), (2, 0), (2, 1), (0, 1), (1, 1), (1, 2), (2, 2), (0, 2)]
    assert events == [f"{rank} {verb} {step}" for rank, step in turns for verb in ("begins", "ends")]


def test_a_rank_keeps_the_baton_while_nothing_blocks_it() -> None:
    events: list[int] = []

    def body(channel: Channel) -> None:
        works = []
        for index in range(3):
            works.append(gather(channel, f"gather {index}"))
            events.append(channel.rank)
        for work in works:
            work.wait()

    simulate(3, body)
    assert events == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_rank_may_simulate_a_world_of_its_own() -> None:
    def body(channel: Channel) -> list[int]:
        meet(channel)
        inner = simulate(3, lambda inner: inner.rank + 10 * channel.rank)
        meet(channel)
        return inner

    assert simulate(2, body) == [[0, 1, 2], [10, 11, 12]]


# -- random states


def draw() -> tuple[float, float, float, float]:
    return (float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn()))


def draw_in_turns(seed: int, meet_others: Callable[[], None]) -> list[tuple[float, ...]]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    drawn: list[tuple[float, ...]] = []
    for _ in range(4):
        drawn.append(draw())
        meet_others()
    return drawn


def test_a_rank_draws_as_in_a_process_of_its_own() -> None:
    drawn = simulate(3, lambda channel: draw_in_turns(channel.rank, lambda: meet(channel)))
    assert drawn == [draw_in_turns(rank, lambda: None) for rank in range(3)]


def test_every_rank_starts_from_the_callers_random_state_which_is_put_back() -> None:
    torch.manual_seed(5)
    expected = draw_in_turns(5, lambda: None)[:2]

    def body(channel: Channel) -> tuple[float, ...]:
        first = draw()
        meet(channel)
        draw_in_turns(99, lambda: None)
        return first

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert simulate(3, body) == [expected[0]] * 3
    assert draw() == expected[0]
    assert draw() == expected[1]


# -- tensors and channels


def test_tensors_are_let_go_after_the_wait() -> None:
    def body(channel: Channel) -> None:
        output, own, sent = torch.zeros(channel.size), torch.zeros(1), torch.zeros(3)
        alive = [weakref.ref(tensor) for tensor in (output, own, sent)]
        works = [channel.all_gather(output, own, purpose="let go")]
        if channel.rank == 0:
            works.append(channel.send(sent, 1, purpose="let go"))
        elif channel.rank == 1:
            works.append(channel.receive(sent, 0, purpose="let go"))
        for work in works:
            work.wait()
        del output, own, sent
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3

    simulate(3, body)


def test_transfers_take_parameters_and_inference_tensors() -> None:
    def body(channel: Channel) -> None:
        whole = torch.zeros(channel.size, requires_grad=True)
        channel.all_gather(whole, torch.ones(1, requires_grad=True), purpose="parameters").wait()
        assert whole.tolist() == [1.0] * channel.size
        assert whole.is_leaf
        with torch.inference_mode():
            inferred = torch.zeros(1)
            channel.reduce_scatter(inferred, torch.ones(channel.size), purpose="inferred").wait()
        assert inferred.item() == channel.size

    simulate(3, body)


def test_writing_an_output_is_seen_by_autograd() -> None:
    def body(channel: Channel) -> None:
        saved = torch.zeros(channel.size)
        product = torch.ones(channel.size, requires_grad=True) * saved
        channel.all_gather(saved, torch.ones(1), purpose="overwrite").wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    simulate(2, body)


def test_channels_of_the_same_ranks_are_one_object() -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 0:
            return
        part = channel.over([3, 2, 1])
        assert part is channel.over((3, 2, 1))
        assert part is not channel.over([1, 2, 3])
        assert part.over([0, 1, 2]) is part
        if channel.rank != 2:
            assert part.over([2, 0]) is channel.over([1, 3])

    simulate(4, body)
    simulate(2, lambda channel: meet(channel.over([0, 1])))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.over([1]), "members only, and this is rank 0"),
        (lambda c: c.over([0, 0]), "distinct ranks of the channel, 0 to 1"),
        (lambda c: c.over([0, 2]), "distinct ranks of the channel, 0 to 1"),
        (lambda c: c.send(torch.zeros(1), 0, purpose="p"), "the peer is 0, but this is rank 0 of a channel of 2"),
        (lambda c: c.receive(torch.zeros(1), 2, purpose="p"), "the peer is 2, but this is rank 0 of a channel of 2"),
        (lambda c: c.send(torch.zeros(4, 4).t(), 1, purpose="p"), "send for 'p'.*not contiguous"),
        (lambda c: c.all_gather(torch.zeros(3), torch.zeros(1), purpose="p"), r"output has shape \(3,\).*needs \(2,\)"),
        (lambda c: c.all_gather(torch.zeros(2, 1), torch.zeros(1), purpose="p"), r"output has shape \(2, 1\)"),
        (lambda c: c.all_gather(torch.zeros(2), torch.zeros(1).int(), purpose="p"), "output is torch.float32, input"),
        (lambda c: c.all_gather(torch.zeros(2), torch.zeros(1), purpose="p", counts=[2]), "each of the 2 ranks"),
        (lambda c: c.all_gather(torch.zeros(2), torch.zeros(1), purpose="p", counts=[3, -1]), "zero or more"),
        (lambda c: c.all_gather(torch.zeros(2, device="meta"), torch.zeros(1), purpose="p"), "output is on meta"),
        (lambda c: c.reduce_scatter(torch.zeros(1), torch.zeros(3), purpose="p"), r"input has shape \(3,\)"),
        (lambda c: c.reduce_scatter(torch.zeros(1), torch.zeros(3), purpose="p", counts=[2, 1]), r"output has shape"),
    ],
)
def test_a_call_that_does_not_fit_its_own_tensors_is_refused(call: Callable[[Channel], object], message: str) -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 0:
            with pytest.raises(MismatchError, match=message):
                call(channel)
        meet(channel)

    simulate(2, body)


@pytest.mark.parametrize(("size", "timeout"), [(0, 1.0), (-1, 1.0), (2, 0.0), (2, float("nan"))])
def test_a_world_without_ranks_or_time_is_refused(size: int, timeout: float) -> None:
    with pytest.raises(PlanError, match="give at least one rank and a time"):
        simulate(size, meet, timeout_seconds=timeout)


@pytest.mark.parametrize(("is_built", "count", "wanted"), [(True, 0, True), (True, 2, False), (False, 0, False)])
def test_what_torch_ties_to_a_thread_is_made_in_one_that_outlives_the_ranks(
    is_built: bool, count: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: made.append(threading.get_ident()))
    seen = simulate(2, lambda channel: list(made))
    assert seen == [[threading.get_ident()] if wanted else []] * 2
