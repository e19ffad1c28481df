"""Callbacks around the steps of a loop: of a program's own, on simulated ranks, and of a run."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel, alone, simulate
from shardwise.engine import Engine
from shardwise.errors import CallbackError, CheckpointError, ConfigError, PeerError
from shardwise.train import Callback, EvaluationValues, StepMetrics, TrainingLoop
from shardwise.train.references import resolve
from tests.train.runs import finished, small_run, without_times

LAYOUTS = {
    "alone": sw.Mesh(),
    "dp": sw.Mesh(dp_shard=2),
    "tp": sw.Mesh(tp=2),
    "pp": sw.Mesh(pp=2),
}


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def loss_of(output: torch.Tensor, batch: Any) -> Any:
    return (output - batch["input"].sum(1, keepdim=True)).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def engine_on(channel: Channel, mesh: sw.Mesh, stage: int = 1) -> Engine[nn.Module]:
    rules = {"0": "column", "2": "row"} if mesh.tp > 1 else None
    plan = sw.Plan(mesh=mesh, sharding=sw.Sharding(stage=stage), tensor=sw.Tensor(rules=rules))
    return sw.parallelize(
        net(), plan, optimizer=lambda each: torch.optim.SGD(each, lr=0.05), loss=loss_of, channel=channel,
        sample={"input": rows(0)},
    )  # fmt: skip


def share(engine: Engine[nn.Module], step: int) -> dict[str, torch.Tensor]:
    mesh = engine.plan.mesh
    size = 8 // mesh.num_data_ranks
    start = mesh.data_rank(engine.channel.rank) * size
    return {"input": rows(step)[start : start + size]}


def looped(engine: Engine[nn.Module], loop: TrainingLoop, *, steps: int, every: int = 2) -> list[float]:
    """A loop of a user's own."""
    losses = []
    for step in range(1, steps + 1):
        report = engine.step(share(engine, step))
        losses.append(report.loss)
        if loop.after_step(report, engine.evaluate(share(engine, 0)) if step % every == 0 else None):
            break
    return losses


class Noting(Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_begin(self, loop: TrainingLoop) -> None:
        self.calls.append("begin")

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        self.calls.append(("evaluation", evaluation.step, dict(evaluation.values)))

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        self.calls.append(("step", metrics.step, metrics.loss, metrics.held_out_loss, metrics.learning_rate))

    def on_save(self, loop: TrainingLoop, report: Any) -> None:
        self.calls.append(("save", report.step))

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        self.calls.append(("end", error))


def plainly(steps: int) -> tuple[list[float], list[float]]:
    """The losses and the evaluations of a plain loop; every second step is evaluated."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, evaluations = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model(rows(step)), {"input": rows(step)})
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2 == 0:
            evaluations.append(loss_of(model(rows(0)), {"input": rows(0)}).item())
    return losses, evaluations


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_called_at_every_place_with_the_numbers_of_a_plain_loop(layout: str) -> None:
    losses, evaluations = plainly(4)

    def body(channel: Channel) -> list[Any]:
        engine, noting = engine_on(channel, LAYOUTS[layout]), Noting()
        with TrainingLoop(engine, [noting]) as loop:
            looped(engine, loop, steps=4)
        return noting.calls

    size = LAYOUTS[layout].size
    for calls in simulate(size, body):
        assert calls[0] == "begin"
        assert calls[-1] == ("end", None)
        kinds = [each[0] for each in calls[1:-1]]
        assert kinds == ["step", "evaluation", "step", "step", "evaluation", "step"]
        steps = [each for each in calls if each[0] == "step"]
        assert [each[2] for each in steps] == pytest.approx(losses, rel=1e-5)
        held_out = [each[2]["loss"] for each in calls if each[0] == "evaluation"]
        assert held_out == pytest.approx(evaluations, rel=1e-5)
        assert [each[3] for each in steps] == [None, held_out[0], None, held_out[1]]
        assert {each[4] for each in steps} == {0.05}


class Asking(Callback):
    """Asks to stop after a step, on one rank only."""

    def __init__(self, step: int, rank: int) -> None:
        self._step, self._rank = step, rank

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        if metrics.step == self._step and loop.engine.channel.rank == self._rank:
            loop.stop("the coffee is ready")


@pytest.mark.parametrize("layout", ["dp", "tp", "pp"])
def test_the_wish_of_one_rank_ends_all_loops_after_the_same_step(layout: str) -> None:
    def body(channel: Channel) -> tuple[int, str, int]:
        engine = engine_on(channel, LAYOUTS[layout])
        with TrainingLoop(engine, [Asking(3, rank=1)]) as loop:
            losses = looped(engine, loop, steps=9)
            assert loop.is_last
        return len(losses), loop.stopped_by, engine.counters.exchanges

    ended = simulate(2, body)
    assert {each[:2] for each in ended} == {(4, "the coffee is ready")}

    def without(channel: Channel) -> int:
        engine = engine_on(channel, LAYOUTS[layout])
        for step in range(1, 5):
            engine.step(share(engine, step))
            if step % 2 == 0:
                engine.evaluate(share(engine, 0))
        return engine.counters.exchanges

    assert {each[2] for each in ended} == set(simulate(2, without)), "callbacks add no exchange to a step"


def test_a_wish_before_the_first_step_is_known_to_all_ranks_at_once() -> None:
    class Unwilling(Callback):
        def on_begin(self, loop: TrainingLoop) -> None:
            if loop.engine.channel.rank == 1:
                loop.stop("no data")

    def body(channel: Channel) -> str:
        with TrainingLoop(engine_on(channel, sw.Mesh(dp_shard=2)), [Unwilling()]) as loop:
            return loop.stopped_by

    assert simulate(2, body) == ["no data", "no data"]


def test_a_signal_and_a_loop_ask_the_same_steps_and_do_not_hide_each_other() -> None:
    engine = engine_on(alone(), sw.Mesh())
    for asks_first in (True, False):
        with sw.Preemption() as preemption, TrainingLoop(engine, [Asking(2, rank=0)] if asks_first else []) as loop:
            for step in range(1, 9):
                report = engine.step(share(engine, step))
                ends = loop.after_step(report)
                if preemption.requested(engine) or ends:
                    break
                if not asks_first and step == 4:
                    signal.raise_signal(signal.SIGTERM)
        assert (step, ends, preemption.exit_code) == ((3, True, 0) if asks_first else (5, False, 143))
        loop.engine.channel.exchange(b"", purpose="nothing is left over")
        assert not engine.step(share(engine, 0)).stop


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
        engine, noting = engine_on(channel, sw.Mesh(dp_shard=2)), Noting()
        try:
            with TrainingLoop(engine, [noting, Failing(method, rank=1)]) as loop:
                looped(engine, loop, steps=4)
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
        TrainingLoop(engine_on(alone(), sw.Mesh()), [noting, Failing("on_end", 0)]),
    ):
        raise ZeroDivisionError
    assert noting.calls == ["begin", ("end", caught.value)]
    assert caught.value.__notes__ == ["callback Failing: on_end raised KeyError: 'no such key'"]


def test_what_is_no_callback_is_refused_with_what_it_lacks() -> None:
    class Half:
        def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None: ...

    half: Any = Half()
    with pytest.raises(ConfigError, match="Half has no on_begin, on_evaluation, on_save, on_end; derive it from"):
        TrainingLoop(engine_on(alone(), sw.Mesh()), [half])


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
    engine, counting, second = engine_on(alone(), sw.Mesh()), Counting(), Counting(100)
    with TrainingLoop(engine, [counting, second]) as loop:
        looped(engine, loop, steps=3)
        loop.save(str(tmp_path), extra={"mine": 1})
    other = engine_on(alone(), sw.Mesh())
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


@pytest.mark.parametrize("state", [{1, 2}, float("nan")])
def test_a_state_that_json_does_not_hold_is_named(state: Any) -> None:
    loop = TrainingLoop(engine_on(alone(), sw.Mesh()), [Counting(state)])
    with pytest.raises(CheckpointError, match="callback Counting: JSON does not hold what state_dict gives"):
        loop.state_dict()


def mine(*options: str) -> str:
    """The override of a configuration with callbacks of a user's own."""
    tables = ", ".join(f'{{ factory = "mine.py:Mine", options = {{ {each} }} }}' for each in options)
    return f"train.callbacks=[{tables}]"


def log_of(folder: Path) -> list[Any]:
    found: Any = resolve("mine.py:Mine", folder=folder, key="callback")
    log: list[Any] = found.on_begin.__globals__["log"]
    return log


@pytest.mark.parametrize("words", [[], ["mesh.dp_shard=2", "sharding.stage=3"], ["mesh.pp=2"]])
def test_callbacks_of_a_configuration_are_called_on_every_rank(tmp_path: Path, words: list[str]) -> None:
    size = 2 if words else 1
    config = small_run(tmp_path, *words, mine(""), "train.evaluate_first=true", "checkpoint.every=4",
                       num_processes=size)  # fmt: skip
    done = finished(config)
    for rank in range(size):
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
    resumed = finished(small_run(tmp_path, *words, mine("")), resume="auto")  # under another layout
    assert log_of(tmp_path)[0] == ("mine", 0, "begin", 3, 3), "its state was saved"
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert resumed.curve("loss") == pytest.approx(whole.curve("loss"), rel=2e-5)


def test_callbacks_that_come_and_go_between_two_parts_of_a_run_are_named(tmp_path: Path) -> None:
    words = ["checkpoint.every=2"]
    finished(small_run(tmp_path, *words, mine("", "name = 'two'"), "train.steps=2"))
    fewer = finished(small_run(tmp_path, *words, mine(""), "train.steps=4"), resume="auto")
    assert "callback Mine-2 of the saved run is left out here" in fewer.printed
    more = finished(small_run(tmp_path, *words, mine("", ""), "train.steps=6"), resume="auto")
    assert "callback Mine-2 has no state in the save, and begins anew" in more.printed


def test_callbacks_do_not_change_a_run(tmp_path: Path) -> None:
    plain = finished(small_run(tmp_path, f"train.output={tmp_path / 'plain'}"))
    assert without_times(finished(small_run(tmp_path, mine(""))).metrics) == without_times(plain.metrics)


def test_the_error_of_a_callback_on_one_rank_ends_a_run_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="callback Mine: on_step raised ValueError: not today"):
        finished(small_run(tmp_path, mine("fails = 1"), num_processes=2))
    ended = json.loads((tmp_path / "out" / "run.json").read_text())["ended"]
    assert "callback Mine: on_step raised ValueError: not today" in ended


@pytest.mark.parametrize("delays", [1, 2], indirect=True)
def test_on_a_device_that_is_behind_a_loop_has_the_numbers_of_a_plain_one(delays: None) -> None:
    losses, evaluations = plainly(4)

    def body(channel: Channel) -> list[Any]:
        engine, noting = engine_on(channel, LAYOUTS["dp"], stage=2), Noting()
        with TrainingLoop(engine, [noting]) as loop:
            looped(engine, loop, steps=4)
        assert loop.position.num_taken == 4
        return noting.calls

    for calls in simulate(2, body, device="fake"):
        assert [each[2] for each in calls if each[0] == "step"] == pytest.approx(losses, rel=1e-5)
        held_out = [each[2]["loss"] for each in calls if each[0] == "evaluation"]
        assert held_out == pytest.approx(evaluations, rel=1e-5)
