"""`shardwise train` with pipeline stages on real processes: the same losses, one message, saves that fit any layout."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.cli.processes import done, in_this_process, losses, members_of_group, metrics, simulated, started
from tests.train.runs import without_times

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.toml"

NET = """
import os
import signal
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, fault, at):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fault, self.at, self.calls = fault, at, 0

    def forward(self, states):
        self.calls += self.training
        if self.calls == self.at and self.fault == "raise":
            raise RuntimeError("the layer went wrong")
        if self.calls == self.at and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return states + nn.functional.dropout(self.linear(states), 0.3, self.training)


class Net(nn.Module):
    def __init__(self, fault="", at=0):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.ModuleList([Layer("", 0), Layer("", 0), Layer("", 0), Layer(fault, at)])
        self.head = nn.Linear(8, 256)

    def forward(self, input_ids):
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


def loss(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
"""

CONFIG = """
model = {factory = "net.py:Net", loss = "net.py:loss"}
data = {source = "net.py", sequence_length = 16, held_out = 0.2}
train = {steps = 8, global_batch = 12, microbatch = 2, log_every = 1, evaluate_every = 3, timeout_seconds = 30}
checkpoint = {every = 2}
mesh = {pp = 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "run.toml"


STAGES = ["--set", 'pipeline.stages={embedding=0, "layers.[012]"=0, "layers.3"=1, head=1}']


def words(config: Path, output: Path, *more: str) -> list[str]:
    return ["train", str(config), "--set", f"train.output={output}", *more]


@pytest.mark.processes
def test_the_example_has_the_losses_of_one_process_and_leaves_a_trace_of_all_ranks(tmp_path: Path) -> None:
    staged, whole = tmp_path / "staged", tmp_path / "whole"
    run = done(*words(EXAMPLE, staged, "--nproc", "2", "--set", "train.steps=12"))
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    one = ["--set", "mesh.pp=1", "--set", "train.trace=false", "--set", "train.steps=12"]
    alone = in_this_process(*words(EXAMPLE, whole, *one))
    assert (alone.exit_code, alone.stderr) == (0, ""), alone.stderr
    assert without_times(metrics(staged)) == without_times(metrics(whole))
    assert run.stdout.split("held-out text:")[1] == alone.stdout.split("held-out text:")[1]
    assert "stage 1 (rank 1): model.layers.2-3, model.norm, lm_head: 115.0 k parameters, 50%" in run.stdout
    assert re.search(r"^rank 0  .*-.*=.*\nrank 1  .*-.*=.*\n", run.stdout, re.MULTILINE)
    events = json.loads((staged / "trace.json").read_text())["traceEvents"]
    assert {(event["tid"], event["name"]) for event in events if event.get("cat") in ("F", "B")} == {
        (rank, f"{kind}{microbatch}.{rank}") for rank in (0, 1) for kind in "FB" for microbatch in range(8)
    }
    (first,) = [event["ts"] for event in events if event["name"] == "F0.0"][-1:]
    (second,) = [event["ts"] + event["dur"] for event in events if event["name"] == "F0.1"][-1:]
    assert first < second, "a microbatch ends on stage 1 after it began on stage 0"
    assert (staged / "timeline.png").exists()


def ended_by(config: Path, fault: str, message: str, *, at: int) -> None:
    """A run of two stages that ends at a fault in the call `at` of the last layer, 6 calls an update."""
    model = f"model.config={{fault='{fault}', at={at}}}"
    run = done(*words(config, config.parent / "out", "--nproc", "2", *STAGES, "--set", model, "--debug"))
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
    with started(words(config, out, "--nproc", "2", *STAGES, "--set", "train.steps=1000000")) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 5/"))
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "stopped by Ctrl-C\n")
        assert not members_of_group(process.pid)
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
