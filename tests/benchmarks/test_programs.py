"""Benchmarks are programs that can be started, and cells of the large ones run."""

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import cells as steps
from benchmarks import stream
from benchmarks.checkpoint import cells as checkpoint
from benchmarks.checkpoint.outcome import Cell as CheckpointCell
from benchmarks.pipeline import cells as pipeline
from benchmarks.pipeline.models import Shape
from benchmarks.pipeline.outcome import Cell as PipelineCell
from benchmarks.rank import Cell as StepsCell
from benchmarks.rewrite import rounds
from benchmarks.rewrite.outcome import Cell as RewriteCell

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    ".".join(each.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for each in (ROOT / "benchmarks").rglob("*.py")
    if "argparse" in (text := each.read_text(encoding="utf-8")) and '__name__ == "__main__"' in text
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_says_how_to_start_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["checkpoint", "pipeline", "rewrite", "steps", "stream"])
def test_a_small_cell_of_a_benchmark_is_measured(name: str, tmp_path: Path) -> None:
    """Each proves, before it times anything, that its sides do the same."""
    if name == "checkpoint":
        cell = CheckpointCell(
            work="save and load", num_bytes=1 << 20, num_ranks=2, num_savers=2, num_rounds=1, rare=True
        )
        assert checkpoint.run(cell, tmp_path).seconds["save"]
    elif name == "pipeline":
        shape = Shape(num_layers=4, width=64, num_tokens=8)
        one = PipelineCell(work="steps", kind="computing", shape=shape, num_ranks=2, num_microbatches=2, num_rounds=1)
        assert pipeline.run(one).updates
    elif name == "rewrite":
        assert rounds.measure(RewriteCell(work="converting", size=26 * 10**6, num_rounds=1), tmp_path).seconds
    elif name == "steps":
        some = StepsCell(
            sides=("ours", "ddp"), shape="1x8", num_microbatches=2, num_rounds=1, num_layers=1, seconds_per_turn=0.01
        )
        assert steps.run(some).seconds
    else:
        assert "tp 2 to tp 2, 1 MiB" in stream.table([1], 1, cells=[0])
