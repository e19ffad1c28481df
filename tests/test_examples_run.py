"""Every program of `examples` runs, and says what it showed; the pages show the programs as they are."""

import json
import math
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.processes.as_started import ended

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

LAST_LINES = {
    "finetune_hf.py": "from_pretrained loads it, and its logits are those of the engine to the bit",
    "two_optimizers.py": "two ranks, each with whole matrices, have them but for rounding",
    "odd_pipeline.py": "losses and parameters are those of one process to the bit",
    "resume_elsewhere.py": "saved under one layout and resumed under another, the losses are those of one process",
    "train_and_serve.py": "both servers hold the weights of the trainer to the bit",
    "grpo.py": "answers got better with each of these updates, in which every plan has the same numbers",
    "grpo_two_groups.py": "answers of other ranks got better, with the weights of each update to the bit",
    "convert_and_export.py": "21 tensors were fused, saved, and taken apart again; every bit came back",
}


@pytest.fixture(autouse=True)
def _scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What examples leave in temporary folders goes with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program as `python examples/NAME` does; its names at the end."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name)])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", LAST_LINES)
def test_the_program_runs_and_says_what_it_showed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, monkeypatch)
    assert capsys.readouterr().out.splitlines()[-1] == LAST_LINES[name]


def test_the_receiver_is_short_and_loads_only_what_moves_tensors() -> None:
    text = (EXAMPLES / "inference_receiver.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    program = """
import sys
import torch, shardwise as sw
from examples.inference_receiver import Sizes, serve, tensors_of, target_of
whole = {piece: torch.ones(piece.shape, dtype=torch.bfloat16)
         for piece in target_of(tensors_of(Sizes(), 0, 1, torch.bfloat16), Sizes(), 0, 1)}
take_part = lambda channel: serve(channel, Sizes(), channel.rank - 1, 2, 1) if channel.rank else sw.stream(
    whole, None, channel=channel, delta=True)
assert sw.simulate(3, take_part)[1]["model.norm.weight"].all()
print(sw.processes.__name__, *sorted({name.split(".")[1] for name in sys.modules if name.startswith("shardwise.")}))
print(*[name for name in ("transformers", "torch.distributed.tensor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    *_, rooms, others = done.stdout.split("\n")[:-1]
    pure = {"errors", "keepers", "launchers", "plan", "rewrite", "routes", "space"}
    assert {*rooms.split()} == {"processes", "checkpoint", "comm", "moving"} | pure
    assert others == ""


def test_both_plain_loops_have_the_same_losses_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run("plain_loop/before.py", monkeypatch)["train"]()
    *steps, last = capsys.readouterr().out.splitlines()
    assert last == "PyTorch alone trained this; after.py prints the same losses"
    assert run("plain_loop/after.py", monkeypatch)["losses"] == before
    *told, last = capsys.readouterr().out.splitlines()
    assert last == "an engine trained this (data ranks: 1); before.py prints the same losses"
    assert told == steps[: len(told)]


@pytest.mark.processes
def test_the_plain_loop_on_two_processes_prints_the_losses_of_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = run("plain_loop/before.py", monkeypatch)["train"]()
    capsys.readouterr()
    program = f"import runpy; runpy.run_path({str(EXAMPLES / 'plain_loop' / 'after.py')!r}, run_name='__main__')"
    (code, out, err), (other, *silence) = ended([["-c", program]] * 2)
    assert (code, other, silence) == (0, 0, ["", ""]), err
    *steps, last = out.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in steps]
    assert all(math.isclose(a, b, abs_tol=2e-5) for a, b in zip(losses, alone, strict=True))
    assert last.startswith("an engine trained this (data ranks: 2)")


def test_the_notebook_runs_and_has_no_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    assert all(not each["outputs"] and each["execution_count"] is None for each in cells)
    names: dict[str, Any] = {"__name__": "__main__"}
    pictures = []
    for each in cells:
        exec(compile("".join(each["source"]), "tour.ipynb", "exec"), names)
        if "picture" in names:
            pictures.append(names.pop("picture")._repr_svg_())
    assert len(pictures) == 3
    assert all("<svg" in each for each in pictures)
    assert "resumed under pp=2,tp=2" in capsys.readouterr().out
