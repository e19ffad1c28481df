"""How commands end badly: an exit code, one paragraph on stderr, nothing written; whose words count."""

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._utils import ExceptionWrapper

from shardwise import checkpoint
from shardwise.cli.exit_verdicts import ExitVerdict, deciding_verdict, print_verdict
from shardwise.errors import DataError, MismatchError, PeerError
from tests.cli.processes import in_this_process
from tests.refusals import Refusals
from tests.train.runs import small_run


@cache
def files() -> Path:
    """A folder with a configuration, saves, rewrites and a schedule."""
    folder = Path(tempfile.mkdtemp())
    small_run(folder)
    sizes = {"q": 8, "k": 4, "v": 4}
    layer = {f"model.layers.0.self_attn.{name}_proj.weight": torch.zeros(size, 6) for name, size in sizes.items()}
    for step in (10, 20):
        checkpoint.save(folder / "saves", layer, step=step)
    (folder / "full").mkdir()
    for name, text in {
        "full/file": "",
        "bad": "# mine\nmodel.x -> y\nmodel.layers.$L.self_attn.q_proj.weight -> q, k\n",
        "twice": "model.x -> y\nmodel.z -> y\n",
        "own.txt": "own: 1 stage, 1 rank, 2 microbatches\nrank 0: F0.0 B0.0 F1.0 B1.0\n",
    }.items():
        (folder / name).write_text(text)
    return folder


class CommandError(Exception):
    """A command, with its exit code and what it said on stderr."""


def command(line: str, environment: Mapping[str, str] | None = None, *, begins: bool = False) -> Callable[[Path], None]:
    """A command in the folder of `files`. begins: it fails later, and has said or written something before."""

    def run(folder: Path) -> None:
        def listed() -> list[Path]:
            return sorted(each for each in folder.rglob("*") if "__pycache__" not in str(each))

        shutil.copytree(files(), folder, dirs_exist_ok=True)
        before = listed()
        with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            result = in_this_process(*shlex.split(line))
            assert (result.stdout == "" and listed() == before) or begins
            assert "Traceback" not in result.stderr
            if result.exit_code == 1:
                assert "Traceback" in in_this_process(*shlex.split(line), "--debug").stderr
        if result.exit_code:
            raise CommandError(f"exit code {result.exit_code}\n{result.stderr}")

    return run


QKV = "--rewrite llama-qkv"
HEADS = "--parameter num_attention_heads=4 --parameter num_key_value_heads=2"
SIZES = "--ranks 2 --microbatches 2"
LINES = [
    *("ckpt ls absent", "ckpt verify absent", "ckpt verify saves --step 7", "ckpt ls"),
    *("ckpt ls unknown-scheme://x", "ckpt ls saves/save-00000002/manifest.json", "ckpt verify saves --step first"),
    *("ckpt repair saves", "ckpt diff saves none", "ckpt diff saves saves --step-b 9", "ckpt diff saves"),
    *("ckpt convert saves full --to hf", "ckpt convert none x", "ckpt convert saves x --config x"),
    *("ckpt convert saves x --step 9", "ckpt convert saves x --to gguf", "ckpt convert saves x --dtype float32"),
    *("ckpt convert saves x --lossy", "ckpt convert saves x --to hf --dtype int8", f"ckpt convert saves x {QKV}"),
    *("ckpt convert saves x --rewrite lama-qkv", "ckpt convert saves x --inverse", "ckpt convert saves x --set a=1"),
    *("ckpt convert saves x --rewrite bad", "ckpt convert saves x --rewrite bad --dry-run"),
    *("ckpt convert saves x --rewrite twice", "ckpt convert saves x --parameter a=1", "ckpt convert saves x --dry-run"),
    *(f"ckpt convert saves x {QKV} --parameter a", f"ckpt convert saves x {QKV} {HEADS} --like saves"),
    f"ckpt convert saves x {QKV} {HEADS} --parameter num_atention_heads=4",
    f"ckpt convert saves full --to hf {QKV} {HEADS} --dry-run",
    *(f"schedule 1f1 {SIZES}", "schedule 1f1b --ranks 2", f"schedule 1f1b {SIZES} --chunks 2"),
    *(f"schedule 1f1b {SIZES} --forward-ms 1,x", "schedule 1f1b --ranks 3 --microbatches 2 --backward-ms 1,2"),
    *(f"schedule 1f1b {SIZES} --transfers 0-1", f"schedule 1f1b {SIZES} --transfers '0>2'"),
    "schedule own.txt --microbatches 4",
    *("top .", "top . --once"),
    "train small.toml --set train.step=3 --set train.steps=many --set sharding.stage=9",
    *("train absent.toml", "train small.toml --set model.factory=net.py:Nets", "train small.toml --nproc 0"),
    *(
        "train small.toml --set model.config.depth=3",
        "train small.toml --set model.factory=net.py:exits --set model.config={}",
    ),
    *("train small.toml --set data.source=absent.txt", "train small.toml --set data.sequence_length=4000"),
    *("train small.toml --set mesh.dp_shard=2", "train small.toml --nproc 5", "train small.toml --resume absent"),
    *(
        "train small.toml --device GPU",
        "train small.toml --device xpu:0 --nproc 2",
    ),
    "train small.toml --set train.device=auto:1",
    *("verify small.toml", "verify small.toml --against dp_shard=5", "verify small.toml --against pq=2"),
    "verify small.toml --against dp_shard=2 --nproc 3",
    "verify small.toml --against pp=2 --simulate --nproc 2",
    "verify small.toml --against pp=2 --set train.step=2",
]
UNDER_SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a"}
UNDER_MPIRUN = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
UNDER_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
REFUSED = Refusals(
    "cli.exit_verdicts",
    {
        **{line: command(line) for line in LINES},
        "a step that is not saved": command("ckpt ls saves --step 7", begins=True),
        "a picture of another kind": command(f"schedule 1f1b {SIZES} --picture a.pdf", begins=True),
        "a loss of the user's that fails": command("train small.toml --set model.loss=net.py:fails", begins=True),
        "ranks that fail": command("verify small.toml --against pp=2 --set model.loss=net.py:fails"),
        "srun has started two": command("train small.toml --nproc 2", UNDER_SRUN),
        "mpirun has started two": command("train small.toml --nproc 2", UNDER_MPIRUN),
        "torchrun has started two": command("verify small.toml --against dp_shard=2 --nproc 2", UNDER_TORCHRUN),
    },
    kind=CommandError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_told_in_one_paragraph_with_its_exit_code(case: str) -> None:
    REFUSED.check(case)


def test_the_words_of_a_rank_that_failed_go_before_those_of_its_peers(tmp_path: Path) -> None:
    assert deciding_verdict(tmp_path) is None
    ExitVerdict.of(PeerError("rank 2 stopped: ValueError", rank=2), rank=0, debug=False).leave(tmp_path, 0)
    assert deciding_verdict(tmp_path) == ExitVerdict(
        paragraph="Error: rank 2 stopped: ValueError", exit_code=1, is_about_peer=True
    )
    error = ValueError("seven")
    error.add_note("in microbatch 3 of 4")
    for rank in (10, 2):
        ExitVerdict.of(error, rank=rank, debug=False).leave(tmp_path, rank)
    assert deciding_verdict(tmp_path) == ExitVerdict(
        paragraph="Error: rank 2: ValueError: seven\nin microbatch 3 of 4", exit_code=1, is_about_peer=False
    )


def test_what_ranks_cannot_do_together_is_no_wrong_usage() -> None:
    assert ExitVerdict.of(MismatchError("x"), rank=None, debug=False).exit_code == 1


@pytest.mark.parametrize("kind", [OSError, KeyError, DataError])
def test_an_error_of_a_loader_s_worker_is_said_without_its_traceback(kind: type[Exception]) -> None:
    try:
        try:
            raise ValueError("an earlier one")
        except ValueError as cause:
            raise kind("file 17\n  is damaged") from cause
    except kind:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(kind) as caught:
        wrapped.reraise()
    paragraph = ExitVerdict.of(caught.value, rank=2, debug=False).paragraph
    assert "Traceback" not in paragraph
    assert "earlier" not in paragraph
    assert "file 17" in paragraph
    assert "is damaged" in paragraph
    assert paragraph.endswith(" (in DataLoader worker process 0)")


def test_the_traceback_that_is_told_is_that_of_the_rank_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, raised in enumerate([PeerError("rank 1 stopped", rank=1), ValueError("seven")]):
        try:
            raise raised
        except Exception as error:
            ExitVerdict.of(error, rank=rank, debug=True).leave(tmp_path, rank)
    chosen = deciding_verdict(tmp_path)
    assert chosen is not None
    print_verdict(chosen)
    told = capsys.readouterr().err
    assert (told.count("Traceback"), told.count("PeerError")) == (1, 0)
    assert told.endswith("ValueError: seven\n\nError: rank 1: ValueError: seven\n")
