"""Callbacks around the steps of a loop: of a program's own, on simulated ranks, and of a run."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm import Channel, alone, simulate
from shardwise.errors import CallbackError, PeerError
from shardwise.train import Callback, EvaluationValues, StepMetrics, TrainingLoop
from shardwise.train.references import resolve
from tests.engine.loops import begun, in_one_process, plan_of, rows, share
from tests.refusals import Refusals
from tests.train.runs import finished, small_run

LAYOUTS = {
    "alone": plan_of(),
    "dp": plan_of("dp_shard=2", 2),
    "tp": plan_of("tp=2", rules={"0": "column", "2": "row"}),
    "pp": plan_of("pp=2"),
}
BATCHES = [rows(step) for step in range(1, 5)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def engine_on(channel: Channel, layout: str = "alone") -> Any:
    return begun(channel, net, LAYOUTS[layout], sample={"x": BATCHES[0]["x"]})


def looped(engine: Any, loop: TrainingLoop, *, steps: int = 4) -> list[float]:
    """A loop of a user's own: after every second step the last batch is evaluated."""
    losses = []
    for step in range(1, steps + 1):
        report = engine.step(share(engine, BATCHES[(step - 1) % 4]))
        losses.append(report.loss)
        if loop.after_step(report, engine.evaluate(share(engine, BATCHES[-1])) if step % 2 == 0 else None):
            break
    return losses


class Noting(Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_begin(self, loop: TrainingLoop) -> None:
        self.calls.append("begin")

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        self.calls.append(("evaluation", evaluation.step, evaluation.values["loss"]))

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        self.calls.append(("step", metrics.step, metrics.loss, metrics.held_out_loss, metrics.learning_rate))

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        self.calls.append(("end", error))


def assert_numbers_of_a_plain_loop(layout: str, device: str = "cpu") -> None:
    losses = in_one_process(net, BATCHES).losses
    evaluations = [in_one_process(net, [*BATCHES[:at], BATCHES[-1]]).losses[-1] for at in (2, 4)]

    def body(channel: Channel) -> list[Any]:
        engine, noting = engine_on(channel, layout), Noting()
        with TrainingLoop(engine, [noting]) as loop:
            looped(engine, loop)
        assert loop.position.num_taken == 4
        return noting.calls

    for first, *calls, last in simulate(LAYOUTS[layout].mesh.size, body, device=device):
        assert (first, last) == ("begin", ("end", None))
        assert [each[0] for each in calls] == ["step", "evaluation", "step", "step", "evaluation", "step"]
        held_out = [each[2] for each in calls if each[0] == "evaluation"]
        assert held_out == pytest.approx(evaluations, rel=1e-5)
        steps = [each for each in calls if each[0] == "step"]
        assert [each[2] for each in steps] == pytest.approx(losses, rel=1e-5)
        assert [each[3:] for each in steps] == [(each, 0.1) for each in (None, held_out[0], None, held_out[1])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_called_at_every_place_with_the_numbers_of_a_plain_loop(layout: str) -> None:
    assert_numbers_of_a_plain_loop(layout)


@pytest.mark.parametrize("delays", [1], indirect=True)
def test_on_a_device_that_is_behind_a_loop_has_the_numbers_of_a_plain_one(delays: None) -> None:
    assert_numbers_of_a_plain_loop("dp", "fake")


class Asking(Callback):
    """Asks to stop after a step, on one rank only; 0: before the first."""

    def __init__(self, step: int, rank: int) -> None:
        self._step, self._rank = step, rank

    def on_begin(self, loop: TrainingLoop) -> None:
        self._ask(loop, 0)

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        self._ask(loop, metrics.step)

    def _ask(self, loop: TrainingLoop, step: int) -> None:
        if step == self._step and loop.engine.channel.rank == self._rank:
            loop.stop("the coffee is ready")


@pytest.mark.parametrize("layout", ["dp", "pp"])
def test_the_wish_of_one_rank_ends_all_loops_after_the_same_step(layout: str) -> None:
    def body(channel: Channel) -> tuple[int, str, int]:
        with TrainingLoop(engine_on(channel, "dp"), [Asking(0, rank=1)]) as loop:
            assert loop.stopped_by == "the coffee is ready", "known before the first step"
        engine = engine_on(channel, layout)
        with TrainingLoop(engine, [Asking(3, rank=1)]) as loop:
            losses = looped(engine, loop, steps=9)
            assert loop.is_last
        return len(losses), loop.stopped_by, engine.counters.exchanges

    ended = simulate(2, body)
    assert {each[:2] for each in ended} == {(4, "the coffee is ready")}

    def without(channel: Channel) -> int:
        engine = engine_on(channel, layout)
        for step in range(1, 5):
            engine.step(share(engine, BATCHES[0]))
            if step % 2 == 0:
                engine.evaluate(share(engine, BATCHES[0]))
        return int(engine.counters.exchanges)

    assert {each[2] for each in ended} == set(simulate(2, without)), "callbacks add no exchange to a step"


def test_a_signal_and_a_loop_ask_the_same_steps_and_do_not_hide_each_other() -> None:
    engine = engine_on(alone())
    for asks_first in (True, False):
        with sw.Preemption() as preemption, TrainingLoop(engine, [Asking(2, rank=0)] if asks_first else []) as loop:
            for step in range(1, 9):
                report = engine.step(BATCHES[0])
                ends = loop.after_step(report)
                if preemption.requested(engine) or ends:
                    break
                if not asks_first and step == 4:
                    signal.raise_signal(signal.SIGTERM)
        assert (step, ends, preemption.exit_code) == ((3, True, 0) if asks_first else (5, False, 143))
        assert not engine.step(BATCHES[0]).stop


class Failing(Callback):
    def __init__(self, method: str, rank: int) -> None:
        self._rank = rank
        setattr(self, method, self._fail)

    def _fail(self, loop: TrainingLoop, *_: Any) -> None:
        if loop.engine.channel.rank == self._rank:
            raise KeyError("no such key")


@pytest.mark.parametrize("method", ["on_begin", "on_evaluation", "on_step", "on_end"])
def test_what_a_callback_of_one_rank_raises_ends_all_ranks_in_words(method: str) -> None:
    words = f"callback Failing: {method} raised KeyError: 'no such key'"
    said: dict[int, BaseException] = {}
    ended: list[Any] = []

    def body(channel: Channel) -> None:
        engine, noting = engine_on(channel, "dp"), Noting()
        try:
            with TrainingLoop(engine, [noting, Failing(method, rank=1)]) as loop:
                looped(engine, loop)
            channel.exchange(b"", purpose="the next thing")  # an error of `on_end` is met here at last
        except BaseException as error:
            said[channel.rank] = error
            ended.append(noting.calls[-1])
            raise

    with pytest.raises(CallbackError, match=words.partition(" raised")[0]):
        simulate(2, body)
    assert str(said[1]) == words
    assert isinstance(said[1].__cause__, KeyError)
    assert isinstance(said[0], PeerError)
    assert words in str(said[0])
    assert [call[0] for call in ended] == ["end", "end"], "files are closed after an error too"


def test_an_error_of_the_loop_reaches_the_callbacks_and_theirs_do_not_hide_it() -> None:
    noting = Noting()
    with (
        pytest.raises(ZeroDivisionError) as caught,
        TrainingLoop(engine_on(alone()), [noting, Failing("on_end", 0)]),
    ):
        raise ZeroDivisionError
    assert noting.calls == ["begin", ("end", caught.value)]
    assert caught.value.__notes__ == ["callback Failing: on_end raised KeyError: 'no such key'"]


class Counting(Callback):
    def __init__(self, begin: Any = 0) -> None:
        self.seen = begin

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_states_travel_with_a_save_of_ones_own_and_misfits_are_said(tmp_path: Path) -> None:
    engine, counting, second = engine_on(alone()), Counting(), Counting(100)
    with TrainingLoop(engine, [counting, second]) as loop:
        looped(engine, loop, steps=3)
        loop.save(str(tmp_path), extra={"mine": 1})
    other = engine_on(alone())
    extra = sw.load(tmp_path, other)
    assert (extra["step"], extra["mine"]) == (3, 1)
    again, unsaved = Counting(), Noting()
    loop = TrainingLoop(other, [again, unsaved])
    assert loop.load_state_dict(extra["callbacks"]) == ["callback Counting-2 of the saved run is left out here"]
    assert (again.seen, loop.position.step) == (3, 3)
    fresh = TrainingLoop(other, [Counting(), Counting(), Counting()])
    assert fresh.load_state_dict(extra["callbacks"]) == [
        "callback Counting-3 has no state in the save, and begins anew"
    ]


class Half:
    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None: ...


def loop_of(callback: Any) -> TrainingLoop:
    return TrainingLoop(engine_on(alone()), [callback])


REFUSED = Refusals(
    "train.callbacks",
    {
        "no callback": lambda: loop_of(Half()),
        "a state that JSON does not know": lambda: loop_of(Counting({1})).state_dict(),
        "a state that is not finite": lambda: loop_of(Counting(float("nan"))).state_dict(),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_callback_and_no_state_is_refused_with_what_it_lacks(case: str) -> None:
    REFUSED.check(case)


# Of a configuration -------------------------------------------------------------------------------------------------


def mine(*options: str) -> str:
    """The override of a configuration with callbacks of a user's own."""
    tables = ", ".join(f'{{ factory = "mine.py:Mine", options = {{ {each} }} }}' for each in options)
    return f"train.callbacks=[{tables}]"


def log_of(folder: Path) -> list[Any]:
    found: Any = resolve("mine.py:Mine", folder=folder, key="callback")
    log: list[Any] = found.on_begin.__globals__["log"]
    return log


def test_callbacks_of_a_configuration_are_called_on_every_rank(tmp_path: Path) -> None:
    words = ["mesh.pp=2", "train.evaluate_first=true", "checkpoint.every=4"]
    done = finished(small_run(tmp_path, *words, mine(""), num_processes=2))
    for rank in range(2):
        calls = [each[2:] for each in log_of(tmp_path) if each[1] == rank]
        held_out = done.curve("held_out_loss")
        assert calls == [
            ("begin", 0, 0),
            ("evaluation", 0, held_out[0]),
            ("evaluation", 4, held_out[1]),
            ("evaluation", 6, held_out[2]),
            ("save", 4),
            ("save", 6),
            ("end", 6),
        ]
    assert f"step 0/6  held-out {held_out[0]:.4f}" in done.printed
    assert done.metrics[0] == {"step": 0, "held_out_loss": held_out[0]}


def test_a_callback_ends_a_run_as_its_last_update_would_and_it_can_go_on(tmp_path: Path) -> None:
    words = ["checkpoint.every=99", "train.decay=constant"]
    whole = finished(small_run(tmp_path, *words, f"train.output={tmp_path / 'whole'}"))
    ended = finished(small_run(tmp_path, *words, mine("stop = 2"), num_processes=2))
    assert "ended after step 3: enough" in ended.printed
    assert "saved step 3" in ended.printed
    assert ended.metrics[-1]["step"] == 3
    assert ended.metrics[-1]["held_out_loss"] is not None
    assert json.loads((tmp_path / "out" / "run.json").read_text())["ended"] == "finished"
    log_of(tmp_path).clear()
    resumed = finished(small_run(tmp_path, *words, mine("", "")), resume="auto")  # under another layout
    assert log_of(tmp_path)[0] == ("mine", 0, "begin", 3, 3), "its state was saved"
    assert "callback Mine-2 has no state in the save, and begins anew" in resumed.printed
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert resumed.curve("loss") == pytest.approx(whole.curve("loss"), rel=2e-5)
