"""Any loop as a run: lines of the steps that it hands over, from where it is, and how it has ended."""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import alone
from shardwise.runs.run_folder import view
from shardwise.train import recorded
from tests.engine.loops import begun
from tests.refusals import Refusals

BATCH = {"input": torch.ones(2, 2)}


def engine_on(channel: sw.Channel) -> Any:
    return begun(channel, lambda: torch.nn.Linear(2, 1), sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)))


def loop(channel: sw.Channel, folder: Path, *, first: int = 0, shown: tuple[int, ...] = (1, 2, 3)) -> None:
    engine = engine_on(channel)
    with recorded(engine, folder, steps=4, step=first) as run:
        for step in range(first + 1, max(shown) + 1):
            report = engine.step(BATCH)
            if step in shown:
                with run.paused():
                    evaluation = {"loss": float(step)}
                run.after_step(report, evaluation, rows=4, step=step)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_loop_has_the_lines_that_it_shows_and_one_that_goes_on_keeps_those_before(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    sw.simulate(2, partial(loop, folder=folder))
    before = lines_of(folder)
    assert [(line["step"], len(line["ranks"]), line["held_out_loss"]) for line in before] == [
        *((1, 2, 1.0), (2, 2, 2.0), (3, 2, 3.0))
    ]
    loop(alone(), folder, first=2, shown=(4,))
    after = lines_of(folder)
    assert (after[:2], [line["step"] for line in after]) == (before[:2], [1, 2, 4])
    assert after[-1]["elapsed_s"] > before[1]["elapsed_s"]
    assert (view(folder).state, view(folder).mark["ranks"]) == ("finished", 1)


def test_what_ends_a_loop_is_in_its_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyError), recorded(engine_on(alone()), tmp_path, steps=4):
        raise KeyError("x")
    assert view(tmp_path).ended == "failed: KeyError: 'x'"
    for last, expected in ((2, "stopped after step 2"), (4, "finished")):
        engine = engine_on(alone())
        with sw.Preemption() as preemption, recorded(engine, tmp_path, steps=4) as run:
            for step in range(1, 5):
                if step == last and not preemption.requested(engine):
                    signal.raise_signal(signal.SIGTERM)
                run.after_step(engine.step(BATCH))
                if preemption.requested(engine):
                    break
        assert (view(tmp_path).ended, preemption.exit_code) == (expected, 143)


def in_the_way(folder: Path) -> None:
    (folder / "file").write_text("")
    sw.simulate(2, partial(loop, folder=folder / "file"))


REFUSED = Refusals("runs.recorded_runs", {"a file in the way": in_the_way})


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_cannot_be_is_refused_on_all_ranks(case: str) -> None:
    REFUSED.check(case)
