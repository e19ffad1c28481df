"""What the checkpoint benchmark measures: it proves every loader first, counts, and says what was met."""

from pathlib import Path

import pytest

from benchmarks.checkpoint import alone, cells, states, table
from benchmarks.checkpoint.__main__ import plan
from benchmarks.checkpoint.asked import Bound, Finding, findings
from benchmarks.checkpoint.jobs import jobs_of
from benchmarks.checkpoint.memory import CountingStore, peak_memory
from benchmarks.checkpoint.outcome import Cell, Outcome
from benchmarks.checkpoint.sides import LOADERS, SAVERS
from benchmarks.checkpoint.states import Specs

SMALL = Cell(work="save and load", num_bytes=1 << 20, num_ranks=2, num_savers=2, num_rounds=1, rare=True)


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_small_cell_measures_every_side_and_prints_every_verdict(tmp_path: Path) -> None:
    outcome = cells.run(SMALL, tmp_path)
    assert outcome.cell == SMALL
    assert outcome.seconds["save"].keys() == SAVERS.keys()
    for job, loaders in jobs_of(SMALL).items():
        assert outcome.seconds[job].keys() == loaders.keys() & LOADERS.keys()
    assert all(len(rounds) == 1 for sides in outcome.seconds.values() for rounds in sides.values())
    plain = outcome.reads["load rows as rows"]["plain"]
    assert all(needed <= read < needed + 50_000 for read, needed in zip(plain.read, plain.needed, strict=True))
    text = table.asked_table([outcome])
    assert text.count("\n") == 1 + len(findings(outcome))
    table.write(tmp_path, "small", [outcome], "made here")
    assert text in (tmp_path / "small.md").read_text()


def test_every_load_has_a_loader_and_every_loader_a_saver() -> None:
    named = {name for cell in plan([16], [1, 2, 4], 1) for loaders in jobs_of(cell).values() for name in loaders}
    assert named - {"torch_checkpointing"} == LOADERS.keys() - {"torch_checkpointing"}
    assert {loader.saved_by for loader in LOADERS.values()} <= SAVERS.keys()


@pytest.mark.parametrize("mebibytes", [16, 256, 1024])
def test_a_state_has_about_the_size_that_was_asked_for_and_no_value_twice_in_a_tensor(mebibytes: int) -> None:
    specs = Specs.of_bytes(mebibytes << 20)
    assert 0.99 < specs.num_bytes / (mebibytes << 20) <= 1
    assert len({spec.name for spec in specs}) == 3 * (2 + 16 * states.NUM_LAYERS)
    smallest = min(specs, key=lambda spec: spec.num_elements)
    assert smallest.values(range(smallest.shape[0])).unique().numel() == smallest.num_elements


def test_columns_of_values_are_columns_of_all_values() -> None:
    spec = next(iter(Specs.of_shapes({"w": (6, 10)})))
    whole = spec.values(range(6))
    assert spec.values(range(2, 5), range(3, 7)).equal(whole[2:5, 3:7])


def test_the_ratio_of_a_finding_is_the_median_of_the_rounds_ratios() -> None:
    outcome = Outcome(cell=SMALL, seconds={"save": {"ours": [1.0, 10.0, 2.0], "dcp": [2.0, 10.0, 3.0]}})
    (finding,) = findings(outcome)
    assert list(finding.values) == [2.0, 1.0, 1.5]
    assert finding.met
    assert not Finding(what="", bound=Bound(limit=1.6, at_least=True), values=finding.values).met
    assert not Finding(what="", bound=Bound(limit=1.4), values=finding.values).met


def test_a_peak_is_seen_although_it_is_gone_at_the_end() -> None:
    with peak_memory() as peak:
        block = bytearray(b"x") * (64 << 20)
        del block
    assert peak.kernel > 60 << 20


def test_the_counting_store_counts_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    store = CountingStore(tmp_path)
    reader = store.open("file")
    reader.read_into(memoryview(bytearray(4)), 3)
    reader.close()
    assert store.read_bytes == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_planning_and_tiny_tensors_are_measured_alone(tmp_path: Path) -> None:
    tiny = Cell(work="alone", num_bytes=64 * 20, num_ranks=1, num_savers=1, num_rounds=1, rare=True)
    outcome = alone.measure_tiny(tiny, tmp_path)
    assert outcome.seconds["load tiny tensors"].keys() == {"ours", "dcp", "torch.save"}
    few = Cell(work="alone", num_bytes=0, num_ranks=3, num_savers=5, num_rounds=1, rare=True)
    assert [each.met for each in findings(alone.measure_planning(few, num_tensors=20))] == [True]
