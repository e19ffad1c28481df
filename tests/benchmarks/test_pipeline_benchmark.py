"""What the pipeline benchmark measures: it proves that all sides train alike, counts, and says what was met."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.limits import Finding
from benchmarks.pipeline import cells, table, timelines
from benchmarks.pipeline.__main__ import plan
from benchmarks.pipeline.asked import findings
from benchmarks.pipeline.clipping import PHASES, Clock
from benchmarks.pipeline.memory import resident_bytes
from benchmarks.pipeline.models import Net, Shape, batches, pieces, stages
from benchmarks.pipeline.ours import SCHEDULES
from benchmarks.pipeline.outcome import Cell, Clipping, Outcome
from benchmarks.pipeline.rank import prove
from benchmarks.pipeline.theirs import PEERS
from shardwise.plan.timeline import Timeline, TimeSpan

SMALL = Shape(num_layers=4, width=64, num_tokens=8)


def cell(**settings: object) -> Cell:
    given = {"work": "steps", "kind": "computing", "shape": SMALL, "num_ranks": 2, "num_microbatches": 2}
    return Cell(**{**given, "num_rounds": 1, **settings})  # type: ignore[arg-type]


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["computing", "sleeping"])
def test_a_small_cell_measures_every_side_and_prints_every_verdict(kind: str, tmp_path: Path) -> None:
    shape = Shape(num_layers=4, width=64, num_tokens=8, forward_s=0.001 if kind == "sleeping" else 0.0)
    outcome = cells.run(cell(kind=kind, shape=shape))
    sides = {f"ours {name}" for name in SCHEDULES} | {f"torch {name}" for name in PEERS.values()}
    for measured in (outcome.updates, outcome.passes, outcome.cpu_s, outcome.losses):
        assert measured.keys() == sides
    for each in outcome.memory:
        assert each.resident_bytes == each.stage_bytes > 0
        assert (each.foreign_calls, each.foreign_bytes) == (2 * (2 if kind == "sleeping" else 3), 0)
        assert each.in_flight == each.counted_in_flight == each.promised_in_flight == 2 - each.rank
    assert [seen.num_stages for seen in outcome.schedules.values()] == [2, 2, 4]
    text = table.asked_table([outcome])
    assert text.count("\n") == 1 + len(findings([outcome]))
    table.write(tmp_path, "small", [outcome], "made here")
    assert text in (tmp_path / "small.md").read_text()
    outcome.write(tmp_path / "outcome.json")
    assert Outcome.read(tmp_path / "outcome.json") == outcome


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.stress
def test_every_moment_of_a_clipped_forward_and_backward_is_charged_to_a_phase() -> None:
    outcome = cells.run(cell(work="clipping", kind="llama"))
    assert [(each.num_local, each.num_foreign) for each in outcome.clipping] == [(3, 4), (4, 3)]
    for each in outcome.clipping:
        assert each.num_lookups >= each.num_local + each.num_foreign
        assert all(each.wall_s[phase] > 0 for phase in PHASES)
    assert len(findings([outcome])) == 1


def test_pieces_cut_by_hand_are_the_whole_model() -> None:
    parts, places = pieces("computing", SMALL), stages("computing", SMALL, 2)
    assert places == [0, 0, 0, 1, 1, 1]
    words = batches("computing", SMALL, 2, 1)[0]["values"]
    cut = words
    for stage in range(2):
        cut = nn.Sequential(*(each for each, place in zip(parts, places, strict=True) if place == stage))(cut)
    assert torch.equal(Net(parts)(words), cut)


@pytest.mark.parametrize(
    ("losses", "problem"), [([3.0, 2.5], r"odd: \[3.0, 2.5\]"), ([3.0, float("nan")], "odd"), ([3.0, 3.0], "odd")]
)
def test_a_side_that_does_not_train_as_the_others_is_refused(losses: list[float], problem: str) -> None:
    prove({"a": [3.0, 2.0], "b": [3.0, 2.00001]})
    with pytest.raises(RuntimeError, match=problem):
        prove({"a": [3.0, 2.0], "odd": losses})


def test_losses_that_do_not_fall_are_refused() -> None:
    with pytest.raises(RuntimeError, match="does not fall"):
        prove({"a": [3.0, 3.0], "b": [3.0, 3.0]})


def test_stage_times_are_medians_without_the_waits_inside() -> None:
    spans = [TimeSpan(0, "F", at, 0, 10.0 * at, 10.0 * at + length) for at, length in enumerate((5.0, 6.0, 9.0))]
    spans += [TimeSpan(0, "wait", 1, 0, 11.0, 13.0), TimeSpan(0, "B", 0, 0, 40.0, 41.0)]
    times = timelines.measured(Timeline(1, tuple(spans)), 1)
    assert times.forward_s == (5.0,)
    assert times.backward_s == (1.0,)


def test_microbatches_in_flight_are_counted_from_the_forward_to_the_end_of_the_backward() -> None:
    spans = [TimeSpan(0, "F", 0, 0, 0.0, 1.0), TimeSpan(0, "F", 1, 0, 1.0, 2.0), TimeSpan(0, "B", 0, 0, 2.0, 3.0)]
    spans += [TimeSpan(0, "F", 2, 0, 3.0, 4.0), TimeSpan(0, "F", 9, 1, 2.5, 2.6)]
    assert timelines.most_in_flight(spans, 0) == 2
    assert timelines.most_in_flight(spans[:1], 0) == 1


def test_nested_phases_are_charged_once() -> None:
    clock = Clock()
    inner = clock.on("own", lambda: sum(range(200_000)))
    clock.on("glue", inner)()
    assert clock.cpu_s["own"] > 10 * clock.cpu_s["glue"] > 0
    assert clock.cpu_s["foreign"] == 0


def test_parameters_that_share_memory_are_resident_once_and_those_on_meta_are_not() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, device="meta")
    alias = nn.Linear(4, 4, bias=False)
    alias.weight = nn.Parameter(first.weight.detach().view(4, 4))
    assert resident_bytes(nn.ModuleList([first, second, alias])) == 64


def test_a_foreign_module_costs_what_the_larger_pipeline_has_more() -> None:
    few, many = (
        Outcome(
            cell=cell(work="clipping", num_ranks=ranks),
            clipping=[
                Clipping(
                    rank=0,
                    num_local=4,
                    num_foreign=foreign,
                    num_lookups=10 + foreign,
                    num_tried=3,
                    cpu_s=dict.fromkeys(PHASES, 1.0) | {"foreign": 0.01, "glue": 0.02 + foreign * 1e-5},
                    wall_s=dict.fromkeys(PHASES, 1.0),
                )
            ],
        )
        for ranks, foreign in ((2, 4), (4, 12))
    )
    (_, share, lookups) = findings([few, many])
    assert share.median == pytest.approx(0.03012 / 3.03012)
    assert share.met
    assert lookups.median == 1.0
    assert "10 us" in lookups.what


def test_the_median_of_the_rounds_counts() -> None:
    finding = Finding(cell=cell(), what="", limit=1.0, values=[0.9, 1.0, 5.0])
    assert finding.met
    assert not Finding(cell=cell(), what="", limit=0.99, values=finding.values).met


def test_a_whole_run_has_every_cell() -> None:
    kinds = [(each.kind, each.num_ranks, each.num_microbatches) for each in plan(["computing", "sleeping"], [4, 8], 1)]
    assert kinds == [("computing", 2, 4), ("computing", 2, 8), ("sleeping", 4, 4), ("sleeping", 4, 8)]
    clipping = list(plan(["clipping"], [4], 1))
    assert [(each.num_ranks, each.shape.num_layers) for each in clipping] == [(2, 8), (4, 16), (8, 32)]
