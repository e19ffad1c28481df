"""Runs with pipeline stages: the same numbers, said and measured stage by stage."""

import json
import random
import re
from pathlib import Path

import pytest

from shardwise.plan.timeline import Timeline, TimeSpan
from shardwise.train.announcement import abbreviated
from shardwise.train.run_trace import clock_offset, stage_times
from tests.train.runs import Finished, finished, laid_out, small_run, without_times

NOISY = "model.factory=net.py:Noisy"
FEW = ["train.steps=4", "train.global_batch=4"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(small_run(tmp_path_factory.mktemp("alone"), NOISY, *FEW))


@pytest.mark.parametrize(
    "layout",
    [
        ["mesh.pp=2"],
        ["mesh.pp=3", "pipeline.schedule=fthenb"],
        ["mesh.pp=1", "pipeline.schedule=interleaved"],
        ["mesh.pp=2", "pipeline.balance=flops"],
        ["mesh.pp=2", "pipeline.stages={embedding=1, norm=0, head=0}"],
    ],
)
def test_with_stages_a_run_with_dropout_is_that_of_one_process_bit_for_bit(
    tmp_path: Path, alone: Finished, layout: list[str]
) -> None:
    done = finished(laid_out(tmp_path, NOISY, *FEW, *layout))
    assert without_times(done.metrics) == without_times(alone.metrics)
    assert ("schedule run: 1f1b, as fthenb" in done.printed) == ("embedding=1" in layout[-1])
    assert alone.printed.split("held-out text:")[1] == done.printed.split("held-out text:")[1]


def test_the_first_lines_name_the_schedule_and_what_each_stage_has(tmp_path: Path) -> None:
    layout = ["mesh.pp=2", "mesh.dp_shard=2", "train.microbatch=3"]
    lines = finished(laid_out(tmp_path, *layout, "train.steps=2")).printed.splitlines()
    assert lines[0].startswith("small: Net, 4.4 k parameters, mesh pp=2,dp_shard=2, ")
    assert lines[1:4] == [
        "schedule 1f1b: 2 (microbatches) through 2 stages; a bubble of 33.3% if all took the same time",
        "  stage 0 (ranks 0-1): embedding, norm: 2.1 k parameters, 47%",
        "  stage 1 (ranks 2-3): head: 2.3 k parameters, 53%",
    ]


def test_many_names_become_few_words() -> None:
    layers = [f"model.layers.{number}" for number in range(3, 12)]
    assert abbreviated(["model.embed", *layers, "model.norm"]) == "model.embed, model.layers.3-11, model.norm"
    assert abbreviated(["a.0.b", "a.1.b", "a.1.c", "a.2.c"]) == "a.0-1.b, a.1-2.c"
    assert abbreviated(["h.0.0", "h.0.1", "h.1.0"]) == "h.0.0-1, h.1.0"
    assert abbreviated(["layers.2", "layers.0", "x1", "x2", ""]) == "layers.2, layers.0, x1, x2, "
    assert abbreviated(list("abcdefg")) == "a, b, c, ... (3 more), g"


@pytest.mark.parametrize("layout", [["mesh.pp=2"], ["mesh.pp=2", "mesh.dp_shard=2", "pipeline.schedule=fthenb"]])
def test_a_trace_has_every_forward_and_backward_of_the_last_updates_on_every_rank(
    tmp_path: Path, layout: list[str]
) -> None:
    config = laid_out(tmp_path, *layout, "train.trace=true", "train.steps=21", "train.evaluate_every=7")
    done = finished(config)
    size, num_microbatches = config.plan.mesh.size, config.plan.merge.microbatches
    trace = json.loads((config.output / "trace.json").read_text())["traceEvents"]
    actions = [(event["tid"], event["name"]) for event in trace if event.get("cat") in ("F", "B")]
    for rank in range(size):
        stage = config.plan.mesh.coordinates(rank)["pp"]
        expected = {f"{kind}{number}.{stage}" for kind in "FB" for number in range(num_microbatches)}
        names = [name for its_rank, name in actions if its_rank == rank]
        assert (set(names), len(names)) == (expected, 20 * len(expected))
    assert (config.output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    printed = done.printed
    rows = re.findall(r"^rank (\d)  (\S+)$", printed, re.MULTILINE)
    assert [int(rank) for rank, _ in rows] == list(range(size))
    assert all({"-", "="} <= set(row) for _, row in rows)
    assert len(re.findall(r"bubble \d+\.\d%$", printed, re.MULTILINE)) == 2
    assert f"{config.plan.pipeline.schedule} simulated with these times of stages" in printed
    assert f"trace of the last 20 updates, for ui.perfetto.dev: {config.output / 'trace.json'}" in printed


def test_a_run_that_is_over_leaves_the_trace_of_the_earlier_one_alone(tmp_path: Path) -> None:
    config = laid_out(tmp_path, "mesh.pp=2", "train.trace=true", "checkpoint.every=6")
    finished(config)
    before = (config.output / "trace.json").read_bytes()
    again = finished(config, resume="auto")
    assert "nothing is left to do" in again.printed
    assert "as it was measured" not in again.printed
    assert (config.output / "trace.json").read_bytes() == before


def test_the_times_of_stages_are_means_without_waits() -> None:
    spans = [
        TimeSpan(0, "F", 0, 0, 1.0, 2.0),
        TimeSpan(0, "F", 1, 0, 2.0, 6.0),
        TimeSpan(0, "wait", 1, 0, 3.0, 4.0),
        TimeSpan(1, "F", 0, 0, 0.0, 2.0),
        TimeSpan(1, "B", 0, 1, 5.0, 5.5),
        TimeSpan(1, "other", 0, 1, 6.0, 9.0),
    ]
    assert stage_times(Timeline(2, tuple(spans))) == {("F", 0): 2.0, ("B", 1): 0.5}


@pytest.mark.parametrize("seed", range(20))
def test_the_offset_of_a_clock_is_found_as_well_as_exchanges_take_time(seed: int) -> None:
    chance = random.Random(seed)
    ahead = chance.uniform(-1e6, 1e6)
    mine, reference, longest = [], [], []
    now = 0.0
    for _ in range(5):
        entered = [now + chance.uniform(0, 1e-3) for _ in range(2)]
        left = [max(entered) + chance.uniform(0, 1e-3) for _ in range(2)]
        now = max(left)
        mine.append((entered[0] + ahead, left[0] + ahead))
        reference.append((entered[1], left[1]))
        longest.append(max(left) - min(entered))
    assert clock_offset(mine, reference) == pytest.approx(ahead, abs=min(longest) + 1e-9)
    same = [(before - ahead, after - ahead) for before, after in mine]
    assert clock_offset(same, reference) == 0.0
