"""What it costs to bring a checkpoint of DeepSpeed to Hugging Face files, against copying and DeepSpeed's own script.

    python -m benchmarks.interop [--mb 1000] [--rounds 5] [--folder FOLDER] [--write]

A folder of ZeRO-3 of 4 ranks is written, with as many bytes of float32 masters as asked for and twice as many of
moments. Every run is a process of its own, whose time begins after its imports, on files that lie in the page cache;
runs take turns, and before each one the disk is idle (`sync`). Bytes that are read are those of all calls of `read`
(rchar of the kernel); memory is the kernel's highest mark (VmHWM).
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.limits import Finding
from benchmarks.markdown import markdown
from shardwise import checkpoint
from shardwise.rewrite import Rewrite

RESULTS = Path(__file__).with_name("results") / "interop.md"
RANKS = 4
MEBIBYTE = 1 << 20
STATEMENTS = """
layers.$L.q.weight, layers.$L.k.weight, layers.$L.v.weight -> layers.$L.qkv.weight, axis=0
layers.$L.gate.weight, layers.$L.up.weight -> layers.$L.gate_up.weight, axis=0
"""

COPY, OPEN, THEIRS = "copy the weights", "only open", "zero_to_fp32 of DeepSpeed"
OURS, REWRITTEN, CERTIFIED = "convert --to hf", "convert --to hf --rewrite", "convert --to hf --certify"
UNIVERSAL, DCP = "convert --to deepspeed-universal", "convert --to dcp"


def shapes_of(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a model of about so many bytes in float32."""
    width, inner, words = (1024, 2816, 32_000) if num_bytes >= 500 * 10**6 else (128, 352, 1000)
    layer = {
        **{f"{name}.weight": (width, width) for name in ("q", "k", "v", "o")},
        **{f"{name}.weight": (inner, width) for name in ("gate", "up")},
        "down.weight": (width, inner),
        "norm.weight": (width,),
    }
    per_layer = 4 * sum(torch.Size(shape).numel() for shape in layer.values())
    count = max(1, (num_bytes - 4 * words * width) // per_layer)
    shapes = {f"layers.{at}.{name}": shape for at in range(count) for name, shape in layer.items()}
    return {"embed.weight": (words, width), **shapes}


def write_zero3(folder: Path, num_bytes: int) -> None:
    """What `save_checkpoint` of DeepSpeed 0.19 leaves of a model in bfloat16 under stage 3."""
    shapes = {name: torch.Size(shape) for name, shape in shapes_of(num_bytes).items()}
    part = sum(-(-shape.numel() // RANKS) for shape in shapes.values())
    saved = folder / "global_step3"
    saved.mkdir(parents=True)
    (folder / "latest").write_text(saved.name)
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    groups = [{"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}]
    for rank in range(RANKS):
        vectors = {key: torch.randn(part, generator=torch.Generator().manual_seed(rank)) for key in ("exp_avg", "w")}
        state = {"step": torch.tensor(3.0), "exp_avg": vectors["exp_avg"], "exp_avg_sq": vectors["exp_avg"].square()}
        inner = {
            "zero_stage": 3,
            "partition_count": RANKS,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
            "fp32_flat_groups": [vectors["w"]],
        }
        value = {"optimizer_state_dict": inner, "ds_config": config, "ds_version": "0.19.8"}
        torch.save(value, saved / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes},
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [OrderedDict(shapes)],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "global_steps": 3,
            "dp_world_size": RANKS,
            "mp_world_size": 1,
            "ds_config": config,
            "ds_version": "0.19.8",
        }
        torch.save(model, saved / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def _copy(source: Path, destination: Path) -> None:
    destination.mkdir()
    for path in (source.parent / "weights").iterdir():
        shutil.copyfile(path, destination / path.name)
    _sync(destination)


def _theirs(source: Path, destination: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(source, destination, max_shard_size=None, safe_serialization=True)
    _sync(destination)


def _open(source: Path, _: Path) -> None:
    checkpoint.open(source)


def _sync(folder: Path) -> None:
    """What is not on the disk is not saved."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _convert(**arguments: Any) -> Callable[[Path, Path], None]:
    def run(source: Path, destination: Path) -> None:
        checkpoint.convert(source, destination, **arguments)

    return run


RUNS: Mapping[str, Callable[[Path, Path], None]] = MappingProxyType(
    {
        COPY: _copy,
        OURS: _convert(to="hf"),
        REWRITTEN: _convert(to="hf", rewrite=Rewrite(STATEMENTS)),
        CERTIFIED: _convert(to="hf", certify=True),
        UNIVERSAL: _convert(to="deepspeed-universal"),
        DCP: _convert(to="dcp"),
        THEIRS: _theirs,
        OPEN: _open,
    }
)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a run took."""

    seconds: float
    read_bytes: int
    peak_bytes: int


def run(name: str, source: Path, destination: Path) -> Taken:
    """Do it in this process, which does nothing else."""
    if name == THEIRS:
        import deepspeed.utils.zero_to_fp32  # noqa: F401 - before the time begins
    torch.set_num_threads(1)
    before = _figure("io", "rchar:")
    begun = time.perf_counter()
    RUNS[name](source, destination)
    seconds = time.perf_counter() - begun
    return Taken(seconds, _figure("io", "rchar:") - before, 1024 * _figure("status", "VmHWM:"))


def _figure(file: str, key: str) -> int:
    rows = (line.split() for line in Path(f"/proc/self/{file}").read_text().splitlines())
    return next(int(row[1]) for row in rows if row[0] == key)


Outcomes = Mapping[str, Sequence[Taken]]


def measure(folder: Path, num_bytes: int, num_rounds: int, names: Sequence[str]) -> Outcomes:
    """All runs, in turns; each round begins with another one."""
    source, destination = folder / "source", folder / "destination"
    write_zero3(source, num_bytes)
    checkpoint.convert(source, folder / "weights", to="hf")
    found: dict[str, list[Taken]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            for path in (*source.rglob("*.pt"), *(folder / "weights").iterdir()):
                path.read_bytes()
            os.sync()
            command = [sys.executable, "-m", "benchmarks.interop", "--job", name, str(source), str(destination)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(Taken(**json.loads(done.stdout.splitlines()[-1])))
            if number == 0 and name == THEIRS:
                _prove(folder / "weights", destination)
            shutil.rmtree(destination, ignore_errors=True)
    return found


def _prove(ours: Path, theirs: Path) -> None:
    """Both have the same tensors, to the bit."""
    files = [next(each.glob("*.safetensors")) for each in (ours, theirs)]
    if not checkpoint.diff(*files).equal:
        raise AssertionError("the two converters differ")


def findings(found: Outcomes, num_bytes: int) -> Iterator[Finding[str]]:
    """The numbers that were asked for."""

    def ratios(name: str, other: str) -> list[float]:
        return [its.seconds / their.seconds for its, their in zip(found[name], found[other], strict=True)]

    for name in (OURS, REWRITTEN):
        yield Finding(cell=name, what=f"time / {COPY}", limit=1.5, values=ratios(name, COPY))
        reads = [each.read_bytes / num_bytes for each in found[name]]
        yield Finding(cell=name, what="bytes read / needed", limit=1.05, values=reads)
        opened = statistics.median(each.peak_bytes for each in found[OPEN])
        peaks = [(each.peak_bytes - opened) / MEBIBYTE for each in found[name]]
        yield Finding(cell=name, what=f"peak memory above {OPEN}", limit=128, values=peaks, unit=" MiB")
    if THEIRS in found:
        yield Finding(cell=OURS, what=f"time / {THEIRS}", limit=1 / 3, values=ratios(OURS, THEIRS))
    more = [
        (certified.read_bytes - plain.read_bytes) / num_bytes
        for certified, plain in zip(found[CERTIFIED], found[OURS], strict=True)
    ]
    # Of both sides: the certificate compares what is on the disk.
    yield Finding(cell=CERTIFIED, what="more bytes read / (needed + written)", limit=1.05, values=[m / 2 for m in more])


def report(found: Outcomes, num_bytes: int) -> str:
    """Both tables."""
    asked = [
        (
            each.cell,
            each.what,
            f"<= {each.limit:.3g}{each.unit}",
            f"{each.median:.3g}{each.unit}",
            f"{min(each.values):.3g} - {max(each.values):.3g}",
            "met" if each.met else "MISSED",
        )
        for each in findings(found, num_bytes)
    ]
    rows = [
        (
            name,
            f"{statistics.median(each.seconds for each in taken):.2f}",
            f"{min(each.seconds for each in taken):.2f} - {max(each.seconds for each in taken):.2f}",
            f"{statistics.median(each.read_bytes for each in taken) / 1e6:,.0f}",
            f"{statistics.median(each.peak_bytes for each in taken) / MEBIBYTE:,.0f}",
        )
        for name, taken in found.items()
    ]
    return "\n\n".join(
        (
            markdown(("what", "", "asked", "measured", "min - max", "verdict"), asked),
            markdown(("run", "s", "min - max", "MB read", "VmHWM MiB"), rows),
        )
    )


NOTES = """\
A folder of ZeRO-3 of 4 ranks in the files and keys of DeepSpeed 0.19, written by this benchmark: float32 masters, and
twice as many bytes of moments. `copy the weights` copies the Hugging Face file of the same weights (shutil.copyfile),
and all runs end with their bytes on the disk (fsync). Every run is a process of its own, whose time begins after its
imports, on files in the page cache; runs take turns, each round beginning with another one. Ratios are medians over
rounds of the ratio within a round. Bytes read are the kernel's rchar; `zero_to_fp32` maps its files instead, which does
not count there. Its tensors and ours are compared once, bit by bit. The certificate reads the written files once more,
and has the digests of the source from the conversion. `--to dcp` and `--to deepspeed-universal` write the moments too:
three times the bytes."""


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interop", description="Conversions from DeepSpeed.")
    parser.add_argument("--mb", type=int, default=1000, help="bytes of weights in MB (default 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of everything, in turns (default 5)")
    parser.add_argument("--folder", help="where to convert (default: the folder for temporary files)")
    parser.add_argument(
        "--without", action="append", default=[], metavar="RUN", help=f"leave out one of: {THEIRS}, {UNIVERSAL}, {DCP}"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        name, source, destination = arguments.job
        taken = run(name, Path(source), Path(destination))
        print(json.dumps({"seconds": taken.seconds, "read_bytes": taken.read_bytes, "peak_bytes": taken.peak_bytes}))
        return
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes_of(arguments.mb * 10**6).values())
    names = [name for name in RUNS if name not in arguments.without]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=arguments.folder) as folder:
        found = measure(Path(folder), num_bytes, arguments.rounds, names)
    text = report(found, num_bytes)
    print(text)
    if arguments.write:
        made = shlex.join(["python", "-m", "benchmarks.interop", *sys.argv[1:]])
        machine = f"{os.cpu_count()} cores, a load of {load:.1f} before it began, priority {os.nice(0)}"
        head = f"Made by `{made}` on {date.today()}: {machine}, torch {torch.__version__}."
        asked, full = text.split("\n\n")
        RESULTS.write_text("\n\n".join(("# From DeepSpeed to other systems", head, asked, NOTES, full)) + "\n")


if __name__ == "__main__":
    main()
