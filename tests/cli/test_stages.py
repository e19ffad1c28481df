"""`shardwise train` with pipeline stages on real processes: the same losses, one message, saves that fit any layout."""

import json
import re
import signal
from pathlib import Path

import pytest

from shardwise import checkpoint
from tests.cli.processes import done, losses, metrics, simulated
from tests.cli.small_net import words, written
from tests.forks.programs import members_of_session, started
from tests.train.runs import without_times

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.toml"

TABLES = """
train = {steps = 8, global_batch = 12, microbatch = 2, log_every = 1, evaluate_every = 3, timeout_seconds = 30}
checkpoint = {every = 2}
mesh = {pp = 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, TABLES)


STAGES = ["--set", 'pipeline.stages={embedding=0, "layers.[012]"=0, "layers.3"=1, head=1}']


def test_the_example_on_two_stages_has_the_losses_of_one_process(tmp_path: Path) -> None:
    brief = ("train.steps=3", "train.warmup_steps=1")
    one = ("mesh.pp=1", "train.trace=false")
    said = simulated(EXAMPLE, f"train.output={tmp_path / 'staged'}", *brief, num_processes=2)
    alone = simulated(EXAMPLE, f"train.output={tmp_path / 'whole'}", *brief, *one, num_processes=1)
    assert without_times(metrics(tmp_path / "staged")) == without_times(metrics(tmp_path / "whole"))
    assert said.split("held-out text:")[1] == alone.split("held-out text:")[1]
    assert "stage 1 (rank 1): model.layers.2-3, model.norm, lm_head: 115.0 k parameters, 50%" in said


@pytest.mark.processes
def test_stages_have_the_losses_of_one_process_and_leave_a_trace_of_all_ranks(config: Path) -> None:
    out, whole = config.parent / "out", config.parent / "whole"
    run = done(*words(config, "--nproc", "2", *STAGES, "--set", "train.trace=true", "--set", "train.steps=3"))
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    simulated(config, f"train.output={whole}", "train.steps=3", "mesh.pp=1", num_processes=1)
    assert without_times(metrics(out)) == without_times(metrics(whole))
    assert re.search(r"^rank 0  .*-.*=.*\nrank 1  .*-.*=.*\n", run.stdout, re.MULTILINE)
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {(event["tid"], event["name"]) for event in events if event.get("cat") in ("F", "B")} == {
        (rank, f"{kind}{microbatch}.{rank}") for rank in (0, 1) for kind in "FB" for microbatch in range(6)
    }
    (first,) = [event["ts"] for event in events if event["name"] == "F0.0"][-1:]
    (second,) = [event["ts"] + event["dur"] for event in events if event["name"] == "F0.1"][-1:]
    assert first < second, "a microbatch ends on stage 1 after it began on stage 0"
    assert (out / "timeline.png").exists()


def ended_by(config: Path, fault: str, message: str, *, at: int) -> None:
    """A run of two stages that ends at a fault in the call `at` of the last layer, 6 calls an update."""
    model = f"model.config={{fault='{fault}', at={at}}}"
    run = done(*words(config, "--nproc", "2", *STAGES, "--set", model, "--debug"))
    assert (run.returncode, message in run.stderr) == (1, True), run.stderr
    assert len(re.findall("^Error: ", run.stderr, flags=re.MULTILINE)) == 1
    assert run.stderr.count("Traceback (most recent call last)") == 1
    if fault == "raise":
        assert run.stderr.count('raise RuntimeError("the layer went wrong")') == 1
        assert "PeerError" not in run.stderr
    assert len(losses(config.parent / "out")) == (at - 1) // 6


@pytest.mark.processes
def test_an_exception_on_one_stage_ends_all_and_is_told_once(config: Path) -> None:
    message = (
        "Error: rank 1: RuntimeError: the layer went wrong\n"
        "shardwise: in 'layers.3' on stage 1 (rank 1 of the pipeline), microbatch 1\n"
    )
    ended_by(config, "raise", message, at=14)


@pytest.mark.processes
def test_ctrl_c_stops_all_stages_and_other_stages_go_on_from_the_newest_save(config: Path) -> None:
    out = config.parent / "out"
    with started(words(config, "--nproc", "2", *STAGES, "--set", "train.steps=1000000")) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 5/"))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        kept = f"--resume auto continues from the newest save in {out}/checkpoints, if there is one"
        assert (process.returncode, err) == (130, f"stopped by Ctrl-C; {kept}\n")
        assert not members_of_session(process.pid)
    assert checkpoint.verify(out / "checkpoints").good
    newest = max(int(line["step"]) for line in metrics(out)) // 2 * 2
    steps = [f"train.output={out}", f"train.steps={newest + 4}", "train.decay=constant"]
    wide = ["mesh.dp_shard=2", "pipeline.schedule=interleaved"]
    assert "goes on from step " in simulated(config, *steps, *wide, num_processes=4, resume="auto")
    assert len(metrics(out)) == newest + 4


@pytest.mark.processes
def test_a_death_on_one_stage_is_told_once_and_others_go_on_from_its_save_with_losses_to_the_bit(config: Path) -> None:
    folder = config.parent
    simulated(config, f"train.output={folder / 'whole'}", "mesh.pp=1", num_processes=1)
    ended_by(config, "kill", "Error: rank 1 is gone (its process died), while rank 0 was in ", at=38)
    said = simulated(config, f"train.output={folder / 'out'}", "mesh.pp=3", num_processes=3, resume="auto")
    assert re.search(r"goes on from step [46], saved in ", said)
    assert "seeded anew" not in said
    assert without_times(metrics(folder / "out")) == without_times(metrics(folder / "whole"))
