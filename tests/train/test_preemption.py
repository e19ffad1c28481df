"""Preemption in programs: a signal to one rank ends all loops after the same step, at no message of its own."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import alone


def engine_on(channel: sw.Channel) -> sw.Engine[Any]:
    torch.manual_seed(0)
    return sw.parallelize(
        torch.nn.Linear(2, 1),
        sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
        channel=channel,
    )


def loop(channel: sw.Channel, *, asked_at: int | None, on_rank: int) -> tuple[list[bool], int, list[str]]:
    """Four steps at most; what `requested` said after each, the exit code, and the exchanges between steps."""
    recorded = sw.Recorded(channel)
    engine = engine_on(recorded)
    said, between = [], []
    with sw.Preemption() as preemption:
        for step in range(4):
            if step == asked_at and channel.rank == on_rank:
                preemption._signals.number = signal.SIGUSR1  # what the handler notes; threads have none
            engine.step({"input": torch.ones(2, 2)})
            before = len(recorded.calls)
            said.append(preemption.requested(engine))
            between += [call.purpose for call in recorded.calls[before:]]
            if said[-1]:
                assert preemption.requested(engine)
                break
    engine.step({"input": torch.ones(2, 2)})
    assert not engine.asked_to_stop  # it is no longer asked
    return said, preemption.exit_code, between


def test_a_signal_to_one_rank_ends_all_loops_after_the_same_step_and_only_then_costs_a_message() -> None:
    exchange = "signals that ask to stop"
    for said, code, between in sw.simulate(2, lambda channel: loop(channel, asked_at=2, on_rank=1)):
        assert (said, code) == ([False, False, True], 128 + signal.SIGUSR1)
        assert between == [exchange, exchange]  # the first call, which no step has answered, and the last
    for said, code, between in sw.simulate(2, lambda channel: loop(channel, asked_at=None, on_rank=1)):
        assert (said, code, between) == ([False] * 4, 0, [exchange])


BATCH = {"input": torch.ones(2, 2)}


@pytest.fixture
def default_handlers() -> Iterator[None]:
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {signal.getsignal(number) for number in previous} == {signal.SIG_DFL}
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("comes_within", [True, False])
def test_a_loop_inside_of_another_ends_both_and_each_signal_reaches_both(comes_within: bool) -> None:
    engine = engine_on(alone())
    with sw.Preemption() as outer:
        engine.step(BATCH)
        assert not outer.requested(engine)
        if not comes_within:
            signal.raise_signal(signal.SIGTERM)
        with sw.Preemption() as inner:
            if comes_within:
                signal.raise_signal(signal.SIGTERM)
            engine.step(BATCH)
            assert inner.requested(engine)
        engine.step(BATCH)
        assert outer.requested(engine)
    assert (inner.exit_code, outer.exit_code) == (143, 143)


@pytest.mark.usefixtures("default_handlers")
def test_an_inner_loop_that_ends_leaves_the_outer_one_its_question() -> None:
    engine = engine_on(alone())
    with sw.Preemption() as outer:
        engine.step(BATCH)
        assert not outer.requested(engine)
        with sw.Preemption() as inner:
            engine.step(BATCH)
            assert not inner.requested(engine)
        signal.raise_signal(signal.SIGUSR1)
        engine.step(BATCH)
        assert engine.asked_to_stop
        assert outer.requested(engine)
    assert (inner.exit_code, outer.exit_code) == (0, 138)


@pytest.mark.usefixtures("default_handlers")
def test_one_context_around_simulated_ranks_ends_all_their_loops_after_the_same_step() -> None:
    def ranks(channel: sw.Channel) -> int:
        engine = engine_on(channel)
        for step in range(5):
            if (step, channel.rank) == (2, 1):
                # As if it came now: the thread that takes signals may get to it a step later.
                preemption._signals._came(signal.SIGTERM, None)
            engine.step(BATCH)
            if preemption.requested(engine):
                return step
        return -1

    with sw.Preemption() as preemption:
        assert sw.simulate(3, ranks) == [2, 2, 2]
    assert preemption.exit_code == 143


def after_the_last_call(channel: sw.Channel) -> int:
    engine = engine_on(channel)
    with sw.Preemption() as preemption:
        engine.step(BATCH)
        assert not preemption.requested(engine)
        if channel.rank == 1:
            preemption._signals.number = signal.SIGTERM  # what the handler notes; threads have none
    return preemption.exit_code


def test_a_signal_after_the_last_call_is_in_the_exit_code_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert sw.simulate(2, after_the_last_call) == [143, 143]
    assert capsys.readouterr().err == "shardwise: SIGTERM came after the last step of the loop, which did not see it\n"


def test_a_signal_before_an_error_is_in_its_note() -> None:
    def loop() -> None:
        with sw.Preemption() as preemption:
            preemption._signals.number = signal.SIGUSR1
            raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        loop()
    assert caught.value.__notes__ == ["shardwise: SIGUSR1 had come, and its loop was not asked again"]


def test_calls_that_cannot_be_answered_say_what_to_do() -> None:
    engine, preemption = engine_on(alone()), sw.Preemption()
    with pytest.raises(sw.ShardwiseError, match=r"put the loop into `with sw.Preemption"):
        preemption.requested(engine)
    with preemption, pytest.raises(sw.ShardwiseError, match=r"given a Linear; give the engine that sw.parallelize"):
        preemption.requested(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_real_signal_is_noted_from_the_first_line_of_the_context_on_and_handlers_come_back() -> None:
    assert threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        engine = engine_on(alone())
        with sw.Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            engine.step({"input": torch.ones(2, 2)})
            assert preemption.requested(engine)
        assert preemption.exit_code == 143
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
