"""Preemption in programs: a signal to one rank ends all loops after the same step, at no message of its own."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import alone
from tests.engine.loops import begun
from tests.refusals import Refusals

BATCH = {"input": torch.ones(2, 2)}


def engine_on(channel: sw.Channel) -> Any:
    return begun(channel, lambda: torch.nn.Linear(2, 1), sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)))


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


@pytest.mark.parametrize("comes", ["before", "within", "after"])
def test_a_signal_ends_a_loop_and_the_one_around_it(comes: str) -> None:
    engine = engine_on(alone())
    with sw.Preemption() as outer:
        engine.step(BATCH)
        assert not outer.requested(engine)
        if comes == "before":
            signal.raise_signal(signal.SIGTERM)
        with sw.Preemption() as inner:
            if comes == "within":
                signal.raise_signal(signal.SIGTERM)
            engine.step(BATCH)
            assert inner.requested(engine) == (comes != "after")
        if comes == "after":
            signal.raise_signal(signal.SIGTERM)
        engine.step(BATCH)
        assert outer.requested(engine)
    assert (inner.exit_code, outer.exit_code) == (0 if comes == "after" else 143, 143)


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


def asked_of_no_engine() -> None:
    with sw.Preemption() as preemption:
        preemption.requested(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


REFUSED = Refusals(
    "runs.preemption",
    {
        "outside of the context": lambda: sw.Preemption().requested(engine_on(alone())),
        "no engine": asked_of_no_engine,
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_cannot_be_answered_say_what_to_do(case: str) -> None:
    REFUSED.check(case)
