"""A trace has what every rank does under every layout, on one clock, as bars that nest."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shardwise.plan.timeline import TimeSpan
from shardwise.runs.run_trace import unit_bars
from tests.train.runs import finished, laid_out, without_times

FEW = ["train.steps=3", "train.global_batch=4", "train.evaluate_every=2", "train.trace=true"]
UNITS = ["embedding", "norm", "head"]
SHARDED = {"wait for reduce_scatter", "wait for all_gather"}
LAYOUTS: dict[str, tuple[list[str], set[str]]] = {
    "stage 3": (["mesh.dp_shard=2", "sharding.stage=3"], SHARDED),
    "tp": (["mesh.tp=2", 'tensor.rules={head="colwise_gather_output"}'], {"wait for all_gather"}),
    "pp and dp": (["mesh.pp=2", "mesh.dp_shard=2"], {"wait for receive", "wait for reduce_scatter"}),
}


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
def test_a_trace_has_calls_passes_and_updates_of_every_rank_under_every_layout(tmp_path: Any, name: str) -> None:
    layout, expected = LAYOUTS[name]
    config = laid_out(tmp_path, *FEW, *layout)
    done = finished(config)
    mesh, steps = config.plan.mesh, config.train.steps
    num_microbatches = config.plan.merge.microbatches
    trace = json.loads((config.output / "trace.json").read_text())["traceEvents"]
    bars = [event for event in trace if event["ph"] == "X"]
    for rank in range(mesh.size):
        own = [bar for bar in bars if bar["tid"] == rank]
        assert_nested(own)
        names = [bar["name"] for bar in own]
        assert (names.count("step"), names.count("optimizer")) == (steps, steps)
        assert expected <= {name.partition(":")[0] for name in names}
        assert names.count("exchange: losses and norms") == steps
        if mesh.pp == 1:
            for way in ("forward", "backward"):
                assert [names.count(f"{way} {unit}") for unit in UNITS] == [steps * num_microbatches] * 3
        else:
            stage = mesh.coordinates(rank)["pp"]
            passes = [bar["name"] for bar in own if bar.get("cat") in ("F", "B")]
            wanted = {f"{kind}{number}.{stage}" for kind in "FB" for number in range(num_microbatches)}
            assert (set(passes), len(passes)) == (wanted, steps * len(wanted))
    # No rank leaves an exchange before all have come to it: on one clock, all of its bars overlap.
    closes = [
        [bar for bar in bars if bar["tid"] == rank and "losses and norms" in bar["name"]] for rank in range(mesh.size)
    ]
    for together in zip(*(sorted(each, key=lambda bar: float(bar["ts"])) for each in closes), strict=True):
        assert max(bar["ts"] for bar in together) <= min(bar["ts"] + bar["dur"] for bar in together)
    assert "the last update on all ranks, as it was measured" in done.printed
    assert (config.output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    if mesh.pp > 1:
        shown = re.findall(r"^rank (\d)  (\S+)$", done.printed, re.MULTILINE)
        assert [int(rank) for rank, _ in shown] == list(range(mesh.size))
        assert len(re.findall(r"bubble \d+\.\d%$", done.printed, re.MULTILINE)) == 2
        assert f"{config.plan.pipeline.schedule} simulated with these times of stages" in done.printed


def test_a_trace_changes_no_number_and_stays_where_a_run_is_over(tmp_path: Any) -> None:
    layout = ["mesh.dp_shard=2", "sharding.stage=3", "precision.compute=bfloat16", "checkpoint.every=3"]
    config = laid_out(tmp_path, *FEW, *layout, f"train.output={tmp_path / 'traced'}")
    traced = finished(config)
    plain = finished(laid_out(tmp_path, *FEW, *layout, "train.trace=false"))
    assert without_times(traced.metrics) == without_times(plain.metrics)
    before = (config.output / "trace.json").read_bytes()
    again = finished(config, resume="auto")
    assert "nothing is left to do" in again.printed
    assert "as it was measured" not in again.printed
    assert (config.output / "trace.json").read_bytes() == before


@pytest.mark.parametrize("seed", range(5))
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
