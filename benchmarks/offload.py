"""A step with masters and moments in the host's memory over one without, at the size of the examples; in turns.

    python -m benchmarks.offload [--write] [--rounds 15] [--ranks 1,2] [--k 1,4] [--devices fake,cpu]

Simulated ranks train the Llama of `workload.py` in bfloat16 with float32 masters and AdamW (fused, on all sides). On
the fake accelerator of the tests both sides compute with the kernels of the CPU: what is added is the copies, the wait
of the host for gradients, and its clip. That the processors of a host are slower is not seen there. On CPU ranks there
is nothing to move. Every round takes one update of each side; a ratio is that within a round, of the time that passes
and of the processor time of all ranks, which are threads of one process.
"""

import argparse
import gc
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import date
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any, TypeAlias

import torch

import shardwise as sw
from benchmarks.markdown import Row, markdown
from benchmarks.workload import ADAMW, Shape, batches, llama
from shardwise.comm import Channel

RESULT = Path(__file__).parent / "results" / "offload.md"
ASKED = 1.25
"""A step with `offload="state"` over one without, at most."""

SIDES: dict[str, tuple[int, Any]] = {
    "stage 1": (1, None),
    "stage 1, state": (1, "state"),
    "stage 3": (3, None),
    "stage 3, state": (3, "state"),
    "stage 3, parameters": (3, "parameters"),
}
"""Stage and offload; each is compared with the side before it that has none."""

HEADER: Row = (
    *("device", "ranks", "k", "side", "step, ms", "over the one without", "of processor time"),
    *("on the device, MiB", "host, MiB"),
)
Found: TypeAlias = dict[str, tuple[list[float], list[float], int, int]]
"""For each side the seconds of its updates, those of a processor, and what the device and the host hold."""


def engine_of(channel: Channel, side: str, k: int, layers: int) -> sw.Engine:
    """An engine of one side."""
    stage, offload = SIDES[side]
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=channel.size),
        sharding=sw.Sharding(stage=stage, bucket_bytes=4 << 20, offload=offload),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute="bfloat16"),
        clip_grad_norm=1.0,
    )
    return sw.parallelize(
        llama(num_layers=layers),
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **ADAMW),
        channel=channel,
    )


def sides_of(channel: Channel) -> list[str]:
    """Alone, stage 3 is stage 1."""
    return [side for side, (stage, _) in SIDES.items() if channel.size > 1 or stage < 3]


def measure(channel: Channel, k: int, rounds: int, layers: int) -> Found:
    """What one rank sees of all sides."""
    engines = {side: engine_of(channel, side, k, layers) for side in sides_of(channel)}
    shape = Shape(num_sequences=2, num_tokens=128)
    drawn = batches(shape, k, rank=channel.rank, count=3)
    seconds: dict[str, list[float]] = {side: [] for side in engines}
    used: dict[str, list[float]] = {side: [] for side in engines}
    for number in range(-2, rounds):
        for side, engine in engines.items():
            gc.collect()
            channel.exchange(b"", purpose="all begin")
            begun, begun_use = time.perf_counter(), time.process_time()
            engine.step(drawn[number % 3].whole)
            if channel.device.type != "cpu":
                torch.accelerator.synchronize(channel.device)
            channel.exchange(b"", purpose="all have ended")
            if number >= 0:
                seconds[side].append(time.perf_counter() - begun)
                used[side].append(time.process_time() - begun_use)
    found = {}
    for side, engine in engines.items():
        planned, moments = engine.footprint(), 8 * engine.footprint().owned_elements
        device = planned.working_bytes + planned.gradient_bytes + planned.master_bytes + planned.reducing_bytes
        is_offloaded = planned.host_bytes > 0
        found[side] = (
            seconds[side],
            used[side],
            device + planned.gathered_bytes + (0 if is_offloaded else moments),
            planned.host_bytes + (moments if is_offloaded else 0),
        )
    return found


def rows_of(device: str, ranks: int, k: int, found: Found) -> list[Row]:
    """Medians, and medians of ratios within a round."""
    rows: list[Row] = []
    bases: tuple[list[float], list[float]] = [], []
    for side, (seconds, used, held, on_host) in found.items():
        if SIDES[side][1] is None:
            bases = seconds, used
        ratios = [
            "" if own is base else f"{statistics.median(map(truediv, own, base)):.3f}"
            for own, base in zip((seconds, used), bases, strict=True)
        ]
        sizes = f"{held / 2**20:.0f}", f"{on_host / 2**20:.0f}"
        rows.append((device, str(ranks), str(k), side, f"{statistics.median(seconds) * 1e3:.0f}", *ratios, *sizes))
    return rows


def table(
    ranks: Sequence[int], merges: Sequence[int], rounds: int, layers: int = 8, devices: Sequence[str] = ("fake", "cpu")
) -> list[Row]:
    """All rows of a run."""
    from shardwise.testing.accelerator import NAME, load, present

    load()
    rows: list[Row] = []
    for device in devices:
        with present() if device == NAME else nullcontext():
            for size in ranks:
                for k in merges:
                    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
                    found = sw.simulate(size, partial(measure, k=k, rounds=rounds, layers=layers), device=device)
                    rows += rows_of(device, size, k, found[0])
    return rows


def main() -> None:
    """Measure, print, and write if asked."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--rounds", type=int, default=15)
    asked.add_argument("--ranks", default="1,2")
    asked.add_argument("--k", default="1,4")
    asked.add_argument("--devices", default="fake,cpu")
    asked.add_argument("--layers", type=int, default=8)
    asked.add_argument("--write", action="store_true")
    arguments = asked.parse_args()
    ranks, merges = ([int(each) for each in given.split(",")] for given in (arguments.ranks, arguments.k))
    rows = table(ranks, merges, arguments.rounds, arguments.layers, arguments.devices.split(","))
    worst = max(float(row[5]) for row in rows if row[3].endswith("state"))
    found = f"{markdown(HEADER, rows)}\n\nThe worst ratio of `state`: {worst:.3f}; asked: {ASKED}."
    print(found)
    if arguments.write:
        made = f"{date.today().isoformat()}: {os.cpu_count()} cores, Python {platform.python_version()}"
        text = [
            "# State on the host",
            "",
            f"Made by `{shlex.join(['python', '-m', 'benchmarks.offload', *sys.argv[1:]])}` on {made}, torch",
            f"{torch.__version__}. Times are medians over {arguments.rounds} rounds, ratios medians of those within a",
            "round. `fake` is the fake accelerator of the tests, with the kernels of the CPU. What the device and the",
            "host hold is that of the formula, with AdamW's moments.",
            "",
            found,
            "",
        ]
        RESULT.write_text("\n".join(text))


if __name__ == "__main__":
    main()
