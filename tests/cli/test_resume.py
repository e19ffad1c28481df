"""`shardwise train --resume`: runs of real processes that end at any instant go on as if nothing had been.

What they are compared with, and how they go on where that alone is asked, is computed on simulated ranks: the same
bits, without the start of processes.
"""

import contextlib
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from shardwise import checkpoint
from tests.cli.processes import done, in_this_process, losses, metrics, simulated
from tests.cli.small_net import back_at, words, written
from tests.forks.programs import started
from tests.train.runs import without_times

TABLES = """
precision = {compute = "bfloat16"}
train = {steps = 10, global_batch = 12, microbatch = 2, log_every = 1, evaluate_every = 4, timeout_seconds = 30}
checkpoint = {every = 2}
"""

LLAMA = """
[model]
factory = "transformers:LlamaForCausalLM"

[model.config]
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 32
attention_dropout = 0.2
use_cache = false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, TABLES)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of two ranks that went through, with all of its saves."""
    config = written(tmp_path_factory.mktemp("uninterrupted"), TABLES)
    simulated(config, output(config, "out"), "checkpoint.keep=9", num_processes=2)
    return config.parent / "out"


def output(config: Path, name: str) -> str:
    return f"train.output={config.parent / name}"


def killed(arguments: list[str], *, step: int, delay_s: float) -> None:
    """Start a run, and kill all of its processes `delay_s` after it began (step 0), or came to `step`, or ended."""
    with started(arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if (step == 0 and line.startswith("text: ")) or (line.startswith("step ") and _step_of(line) >= step):
                break
        else:
            assert process.wait(timeout=60) == 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=delay_s)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            process.send_signal(signal.SIGKILL)  # the kernel ends its ranks


def _step_of(line: str) -> int:
    return int(line.removeprefix("step ").partition("/")[0])


def test_a_llama_with_dropout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = written(tmp_path, TABLES + LLAMA, model="")
    brief = ("train.steps=4", "train.evaluate_every=2")
    simulated(config, output(config, "whole"), "checkpoint.keep=9", *brief, num_processes=2)
    back_at(2, config.parent / "whole", config)
    said = simulated(config, output(config, "out"), *brief, num_processes=2, resume="auto")
    assert "goes on from step 2, saved in " in said
    assert "saved step 4 to " in said
    assert without_times(metrics(config.parent / "out")) == without_times(metrics(config.parent / "whole"))


@pytest.mark.processes
@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.stress) for n in range(1, 30))])
def test_a_run_killed_at_any_instant_goes_on_from_its_newest_whole_save(
    config: Path, uninterrupted: Path, attempt: int
) -> None:
    chance = random.Random(attempt)
    more = ["--nproc", "2", "--set", f"checkpoint.background={str(attempt % 2 == 0).lower()}", "--resume", "auto"]
    for _ in range(1 + attempt % 3):
        killed(words(config, *more), step=chance.randrange(9), delay_s=chance.uniform(0.0, 0.1))
    simulated(config, output(config, "out"), num_processes=2, resume="auto")
    assert without_times(metrics(config.parent / "out")) == without_times(metrics(uninterrupted))
    saves = config.parent / "out" / "checkpoints"
    assert checkpoint.open(saves).step == 10
    assert checkpoint.verify(saves).good


def test_a_run_goes_on_with_another_number_of_processes(config: Path, uninterrupted: Path) -> None:
    back_at(4, uninterrupted, config)
    said = simulated(config, output(config, "out"), num_processes=3, resume="auto")
    assert "goes on from step 4, saved in " in said
    assert "seeded anew" not in said
    found, expected = metrics(config.parent / "out"), metrics(uninterrupted)
    for same in ("step", "learning_rate"):
        assert [line[same] for line in found] == [line[same] for line in expected]
    # Dropout draws the same masks; bfloat16 rounds.
    assert losses(config.parent / "out") == pytest.approx(losses(uninterrupted), rel=2e-3)


@pytest.mark.processes
def test_a_run_of_which_a_rank_is_killed_leaves_its_newest_save_to_go_on_from(config: Path) -> None:
    faults = ["--set", "model.config={fault='kill', rank='1', at=20}"]  # 3 calls make an update
    run = done(*words(config, "--nproc", "2", *faults))
    assert (run.returncode, "Error: rank 1 is gone" in run.stderr) == (1, True), run.stderr
    assert len(re.findall("^Error: ", run.stderr, flags=re.MULTILINE)) == 1, run.stderr
    assert "Traceback" not in run.stderr
    saves = config.parent / "out" / "checkpoints"
    assert checkpoint.verify(saves).good
    step = checkpoint.open(saves).step
    assert step is not None
    assert step >= 4
    resumed = in_this_process(*words(config, "--resume", "auto", "--set", f"train.steps={step + 3}"))
    assert (resumed.exit_code, resumed.stderr) == (0, ""), resumed.stderr
    assert f"goes on from step {step}, saved in {saves}" in resumed.stdout
    assert [line["step"] for line in metrics(config.parent / "out")] == list(range(1, step + 4))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "Error: {saves} holds saves of an earlier run, save-00000001 to save-00000005. Go on with it"),
        (["--resume", "auto", "--set", "train.seed=8"], "train.seed was 0 and is 8"),
        (["--resume", "{saves}/absent"], "Error: --resume: {saves}/absent holds no checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_one_paragraph_and_exit_code_2(
    config: Path, uninterrupted: Path, more: list[str], message: str
) -> None:
    saves = back_at(10, uninterrupted, config)
    result = in_this_process(*words(config, *(word.format(saves=saves) for word in more)))
    assert (result.exit_code, message.format(saves=saves) in result.stderr) == (2, True), result.stderr
    assert (result.stderr.count("Error"), "Traceback" in result.stderr) == (1, False), result.stderr
    assert metrics(config.parent / "out") == metrics(uninterrupted)


def test_a_damaged_save_is_reported_once_with_the_way_to_the_one_before_it(config: Path, uninterrupted: Path) -> None:
    saves = back_at(10, uninterrupted, config)
    (file,) = (saves / "save-00000005").glob("*rank00001.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    run = in_this_process(*words(config, "--resume", "auto"))
    assert (run.exit_code, run.stderr.count("Error")) == (1, 1), run.stderr
    assert str(file) in run.stderr
    assert run.stderr.endswith(f"to take the save before it: --resume {saves}/save-00000004 (step 8)\n")
