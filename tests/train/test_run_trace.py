"""A trace has what every rank does under every layout, on one clock, as bars that nest."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.plan.timeline import TimeSpan
from shardwise.train.run_trace import unit_bars
from tests.train.runs import finished, laid_out, without_times

FEW = ["train.steps=3", "train.global_batch=4", "train.evaluate_every=2"]
UNITS = ["embedding", "norm", "head"]

LAYOUTS: dict[str, tuple[list[str], set[str]]] = {
    "stage 0": (["mesh.dp_replicate=2", "sharding.stage=0"], {"wait for reduce_scatter", "wait for all_gather"}),
    "stage 1": (["mesh.dp_shard=2"], {"wait for reduce_scatter", "wait for all_gather"}),
    "stage 2": (["mesh.dp_shard=2", "sharding.stage=2"], {"wait for reduce_scatter", "wait for all_gather"}),
    "stage 3": (["mesh.dp_shard=2", "sharding.stage=3"], {"wait for reduce_scatter", "wait for all_gather"}),
    "tp": (["mesh.tp=2", 'tensor.rules={head="colwise_gather_output"}'], {"wait for all_gather"}),
    "pp and dp": (["mesh.pp=2", "mesh.dp_shard=2"], {"wait for receive", "wait for reduce_scatter"}),
}


def bars_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def assert_nested(bars: Sequence[Mapping[str, Any]]) -> None:
    """Two bars of one row are one in the other, or do not overlap."""
    # The longer first of those that begin together; what rounding to microseconds takes is below a nanosecond.
    open_until = [float("inf")]
    for bar in sorted(bars, key=lambda bar: (bar["ts"], -bar["dur"])):
        while open_until[-1] <= bar["ts"] + 1e-3:
            open_until.pop()
        assert bar["ts"] + bar["dur"] <= open_until[-1] + 1e-3, bar
        open_until.append(bar["ts"] + bar["dur"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_has_calls_passes_and_updates_of_every_rank_under_every_layout(tmp_path: Path, name: str) -> None:
    layout, expected = LAYOUTS[name]
    config = laid_out(tmp_path, *FEW, *layout, "train.trace=true")
    done = finished(config)
    size, steps = config.plan.mesh.size, config.train.steps
    bars = bars_of(config.output / "trace.json")
    for rank in range(size):
        own = [bar for bar in bars if bar["tid"] == rank]
        assert_nested(own)
        names = [bar["name"] for bar in own]
        assert (names.count("step"), names.count("optimizer")) == (steps, steps)
        assert expected <= {name.partition(":")[0] for name in names}
        assert names.count("exchange: losses and norms") == steps
        if config.plan.mesh.pp == 1:
            num_microbatches = config.plan.merge.microbatches
            for way in ("forward", "backward"):
                assert [names.count(f"{way} {unit}") for unit in UNITS] == [steps * num_microbatches] * 3
    # No rank leaves an exchange before all have come to it: on one clock, all of its bars overlap.
    closes = [[bar for bar in bars if bar["tid"] == rank and "losses and norms" in bar["name"]] for rank in range(size)]
    for together in zip(*(sorted(each, key=lambda bar: float(bar["ts"])) for each in closes), strict=True):
        assert max(bar["ts"] for bar in together) <= min(bar["ts"] + bar["dur"] for bar in together)
    assert "the last update on all ranks, as it was measured" in done.printed
    assert (config.output / "timeline.png").exists()


def test_a_trace_changes_no_number(tmp_path: Path) -> None:
    layout = ["mesh.dp_shard=2", "sharding.stage=3", "precision.compute=bfloat16"]
    traced, plain = (
        finished(laid_out(tmp_path, *FEW, *layout, f"train.trace={word}", f"train.output={tmp_path / word}"))
        for word in ("true", "false")
    )
    assert without_times(traced.metrics) == without_times(plain.metrics)


@pytest.mark.parametrize("seed", range(10))
def test_units_of_any_run_nest_in_their_passes(seed: int) -> None:
    """Random forwards of modules in modules, and their backwards in the reverse order."""
    chance = random.Random(seed)
    now = 0.0
    notes: list[tuple[str, str, float]] = []
    backwards = []

    def tick() -> float:
        nonlocal now
        now += chance.uniform(1e-6, 1e-3)
        return now

    def forward(name: str, depth: int) -> list[str]:
        notes.append((name, "begin", tick()))
        inner = [each for at in range(chance.randint(0, 2 - depth)) for each in forward(f"{name}.{at}", depth + 1)]
        notes.append((name, "end", tick()))
        return [*inner, name]

    expected = []
    for _ in range(3):
        ended = [each for name in "abc" for each in forward(name, 0)]
        begin_s = tick()
        notes += [(name, "backward", tick()) for name in reversed(ended)]
        backwards.append(TimeSpan(0, "B", 0, 0, begin_s, tick()))
        expected += [f"{way} {name}" for name in ended for way in ("forward", "backward")]
    bars = unit_bars(notes, backwards)
    assert sorted(bar.name for bar in bars) == sorted(expected)
    assert_nested([{"ts": bar.start_s * 1e6, "dur": (bar.stop_s - bar.start_s) * 1e6} for bar in bars])
    backward_s = sum(bar.stop_s - bar.start_s for bar in bars if bar.name.startswith("backward"))
    begins = [next(at_s for _, what, at_s in notes if what == "backward" and at_s > each.start_s) for each in backwards]
    assert backward_s == pytest.approx(sum(each.stop_s - at_s for each, at_s in zip(backwards, begins, strict=True)))
