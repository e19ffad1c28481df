"""Preemption in programs: a signal to one rank ends all loops after the same step, at no message of its own."""

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


BATCH = {"input": torch.ones(2, 2)}


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {signal.getsignal(number) for number in previous} == {signal.SIG_DFL}
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("asked_at", [2, None])
def test_a_signal_ends_all_loops_after_the_same_step_and_only_then_costs_a_message(asked_at: int | None) -> None:
    """One context is around the loops of all simulated ranks: a signal comes to the process."""
    exchange = "signals that ask to stop"

    def loop(channel: sw.Channel) -> tuple[list[bool], list[str]]:
        recorded = sw.Recorded(channel)
        engine = engine_on(recorded)
        said, between = [], []
        for step in range(5 if asked_at is None else 100_000):
            if step == asked_at:
                channel.exchange(b"", purpose="both are here")
                if channel.rank == 1:
                    signal.pthread_kill(main, signal.SIGUSR1)
            engine.step(BATCH)
            before = len(recorded.calls)
            said.append(preemption.requested(engine))
            between += [call.purpose for call in recorded.calls[before:]]
            if said[-1]:
                assert preemption.requested(engine)
                break
        engine.step(BATCH)
        return said, between

    main = threading.main_thread().ident or 0
    with sw.Preemption() as preemption:
        one, other = sw.simulate(2, loop)
    assert one == other
    said, between = one
    if asked_at is None:
        assert (said, between, preemption.exit_code) == ([False] * 5, [exchange], 0)
    else:
        # The thread that takes signals may get to it a step later.
        assert said.index(True) >= asked_at
        assert between == [exchange, exchange]  # the first call, which no step has answered, and the last
        assert preemption.exit_code == 128 + signal.SIGUSR1


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


def test_a_signal_after_the_last_call_is_in_the_exit_code_and_one_before_an_error_in_its_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = engine_on(alone())
    with sw.Preemption() as preemption:
        engine.step(BATCH)
        assert not preemption.requested(engine)
        signal.raise_signal(signal.SIGTERM)
    assert preemption.exit_code == 143
    assert capsys.readouterr().err == "shardwise: SIGTERM came after the last step of the loop, which did not see it\n"

    def loop() -> None:
        with sw.Preemption():
            signal.raise_signal(signal.SIGUSR1)
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
