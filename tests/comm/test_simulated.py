"""What `simulate` promises beyond the contract of channels: order, random states, devices, what happens to tensors."""

import gc
import random
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel, alone, simulate
from shardwise.errors import MismatchError, PlanError
from tests.refusals import Refusals


def meet(channel: Channel, purpose: str = "meet") -> None:
    channel.exchange(b"", purpose=purpose)


# -- order


def test_one_rank_runs_at_a_time_and_hands_over_in_rank_order_when_it_must_wait() -> None:
    events: list[str] = []

    def body(channel: Channel) -> int:
        for step in range(3):
            events.append(f"{channel.rank} begins {step}")
            torch.randn(200, 200) @ torch.randn(200, 200)  # leaves the interpreter lock: threads would overlap here
            events.append(f"{channel.rank} ends {step}")
            meet(channel)
        return channel.rank

    assert simulate(3, body) == [0, 1, 2]
    # The last rank to arrive goes straight on to the next step; the others follow in rank order.
    turns = [(0, 0), (1, 0), (2, 0), (2, 1), (0, 1), (1, 1), (1, 2), (2, 2), (0, 2)]
    assert events == [f"{rank} {verb} {step}" for rank, step in turns for verb in ("begins", "ends")]


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


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw_in_turns(seed: int, meet_others: Callable[[], None]) -> list[tuple[float, ...]]:
    seed_all(seed)
    drawn: list[tuple[float, ...]] = []
    for _ in range(4):
        drawn.append(draw())
        meet_others()
    return drawn


def test_a_rank_draws_as_in_a_process_of_its_own() -> None:
    drawn = simulate(3, lambda channel: draw_in_turns(channel.rank, lambda: meet(channel)))
    assert drawn == [draw_in_turns(rank, lambda: None) for rank in range(3)]


@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_starts_from_the_callers_random_state_which_is_put_back(fails: bool) -> None:
    expected = draw_in_turns(5, lambda: None)[:2]
    drawn: list[tuple[float, ...]] = []

    def body(channel: Channel) -> None:
        drawn.append(draw())
        meet(channel)
        draw_in_turns(99, lambda: None)
        if fails:
            raise ZeroDivisionError

    seed_all(5)
    if fails:
        with pytest.raises(ZeroDivisionError):
            simulate(3, body)
    else:
        simulate(3, body)
    assert drawn == [expected[0]] * 3
    assert [draw(), draw()] == expected


# -- tensors


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


def test_transfers_take_parameters_and_inference_tensors_and_autograd_sees_what_they_write() -> None:
    def body(channel: Channel) -> None:
        whole = torch.zeros(channel.size, requires_grad=True)
        channel.all_gather(whole, torch.ones(1, requires_grad=True), purpose="parameters").wait()
        assert whole.tolist() == [1.0] * channel.size
        assert whole.is_leaf
        with torch.inference_mode():
            inferred = torch.zeros(1)
            channel.reduce_scatter(inferred, torch.ones(channel.size), purpose="inferred").wait()
        assert inferred.item() == channel.size
        saved = torch.zeros(channel.size)
        product = torch.ones(channel.size, requires_grad=True) * saved
        channel.all_gather(saved, torch.ones(1), purpose="overwrite").wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    simulate(3, body)


# -- what is refused


def of_first(call: Callable[[Channel], object]) -> Callable[[], object]:
    """A call of the first of two ranks."""
    return lambda: simulate(2, lambda channel: call(channel) if channel.rank == 0 else None)


def a(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


REFUSED = Refusals(
    "comm.calls",
    {
        "a channel without its rank": of_first(lambda c: c.over([1])),
        "a rank twice": of_first(lambda c: c.over([0, 0])),
        "a rank that is not there": of_first(lambda c: c.over([0, 2])),
        "a message to itself": of_first(lambda c: c.send(a(1), 0, purpose="p")),
        "a message from nobody": of_first(lambda c: c.receive(a(1), 2, purpose="p")),
        "strides": of_first(lambda c: c.send(a(4, 4).t(), 1, purpose="p")),
        "an output too long": of_first(lambda c: c.all_gather(a(3), a(1), purpose="p")),
        "a matrix for an output": of_first(lambda c: c.all_gather(a(2, 1), a(1), purpose="p")),
        "two dtypes": of_first(lambda c: c.all_gather(a(2), a(1, dtype=torch.int32), purpose="p")),
        "a count for one rank": of_first(lambda c: c.all_gather(a(2), a(1), purpose="p", counts=[2])),
        "a count below zero": of_first(lambda c: c.all_gather(a(2), a(1), purpose="p", counts=[3, -1])),
        "another device": of_first(lambda c: c.all_gather(a(2, device="meta"), a(1), purpose="p")),
        "an input too long": of_first(lambda c: c.reduce_scatter(a(1), a(3), purpose="p")),
        "a part of another rank": of_first(lambda c: c.reduce_scatter(a(1), a(3), purpose="p", counts=[2, 1])),
        "alone, a message to itself": lambda: alone().send(a(1), 0, purpose="p"),
        "alone, a message from another one": lambda: alone().receive(a(1), 1, purpose="p"),
        "alone, another rank": lambda: alone().over([1]),
        "alone, another device": lambda: alone("meta").all_gather(a(1), a(1), purpose="p"),
        "no rank": lambda: simulate(0, meet),
        "fewer than none": lambda: simulate(-1, meet),
        "no time": lambda: simulate(2, meet, timeout_seconds=0.0),
        "a time that is none": lambda: simulate(2, meet, timeout_seconds=float("nan")),
    },
    kind=(MismatchError, PlanError),
)


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_does_not_fit_its_own_tensors_or_ranks_is_refused(case: str) -> None:
    REFUSED.check(case)


# -- devices


def test_rank_r_has_the_device_of_number_r_as_its_current_one_where_devices_are_asked_for(fake: str) -> None:
    def run(channel: Channel) -> tuple[torch.device, torch.device, torch.device, int]:
        part = channel.over([channel.rank])
        return channel.device, channel.allocate(8).device, part.device, torch.accelerator.current_device_index()

    for rank, found in enumerate(simulate(3, run, device=fake)):
        assert found == (*[torch.device(fake, rank)] * 3, rank)
    assert torch.accelerator.current_device_index() == 0
    assert simulate(2, lambda channel: channel.device.type) == ["cpu"] * 2


@pytest.mark.parametrize(
    ("num_ranks", "device", "refusal"),
    [
        (1, "cuda", "device='cuda'.*: torch has devices of the kind 'fake' only; leave device out, and ranks compute"),
        (1, "nonsense", "device='nonsense'.*: torch has devices of the kind 'fake' only"),
        (2, "fake:1", "rank r has the device of number r; give the kind alone, as in 'fake'"),
        (9, "fake", "8 devices of this kind are visible.*Simulate at most 8 ranks, or leave device out"),
    ],
)
def test_devices_that_are_not_there_are_refused(fake: str, num_ranks: int, device: str, refusal: str) -> None:
    with pytest.raises(PlanError, match=refusal):
        sw.simulate(num_ranks, lambda channel: None, device=device)


@pytest.mark.parametrize(("is_built", "count", "wanted"), [(True, 0, True), (True, 2, False), (False, 0, False)])
def test_what_torch_ties_to_a_thread_is_made_in_one_that_outlives_the_ranks(
    is_built: bool, count: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    # Torch has no public name for it, and only a build for CUDA shows the effect.
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: made.append(threading.get_ident()))
    seen = simulate(2, lambda channel: list(made))
    assert seen == [[threading.get_ident()] if wanted else []] * 2
