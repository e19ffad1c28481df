"""What the benchmark of conversions measures: its folder is one of ZeRO-3, and it says what was met."""

from pathlib import Path

import pytest
import torch

from benchmarks import interop
from benchmarks.interop import CERTIFIED, COPY, OPEN, OURS, REWRITTEN, THEIRS, Taken
from shardwise import checkpoint


def test_the_folder_has_each_parameter_in_four_runs(tmp_path: Path) -> None:
    interop.write_zero3(tmp_path / "source", 10**6)
    found = checkpoint.open(tmp_path / "source")
    shapes = interop.shapes_of(10**6)
    assert {name: found.tensors[name].shape for name in shapes} == shapes
    ranks = [torch.load(path)["optimizer_state_dict"] for path in sorted((tmp_path / "source").rglob("*optim*.pt"))]
    first = torch.cat([each["fp32_flat_groups"][0][: 1000 * 128 // 4] for each in ranks])
    assert torch.equal(found.read("embed.weight").flatten(), first)


def test_verdicts_are_those_of_the_medians() -> None:
    def taken(*seconds: float) -> list[Taken]:
        return [Taken(each, 1000, 100 << 20) for each in seconds]

    found = {COPY: taken(1, 1), OURS: taken(1, 1), REWRITTEN: taken(1.4, 1.8), CERTIFIED: taken(3, 3)}
    found |= {THEIRS: taken(2.9, 2.9), OPEN: taken(0, 0)}
    verdicts = {(each.cell, each.what): each.met for each in interop.findings(found, 1000)}
    assert verdicts[OURS, f"time / {COPY}"]
    assert not verdicts[REWRITTEN, f"time / {COPY}"]
    assert not verdicts[OURS, f"time / {THEIRS}"]
    assert "MISSED" in interop.report(found, 1000)


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_every_run_is_made_and_measured(tmp_path: Path) -> None:
    names = [name for name in interop.RUNS if name != THEIRS]
    found = interop.measure(tmp_path, 4 * 10**6, 1, names)
    assert all(len(each) == 1 for each in found.values())
    assert found[CERTIFIED][0].read_bytes > 2.5 * found[OURS][0].read_bytes
