"""Steps of `shardwise.hf.Trainer`, its loop included, over the steps of an engine alone.

    python -m benchmarks.trainer [--write] [--rounds 40] [--shapes 1x32,4x32] [--k 4]

Both sides have a model each, from one seed, under one plan. They take turns within one process, and within two that are
joined by gloo: the engine makes its step between two steps of the Trainer, in a callback. A step of the Trainer goes
from one callback to the next: it fetches rows, collates them, steps, and steps the scheduler. A ratio is that of one
turn; the median counts.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import shardwise as sw
import shardwise.hf as hf
from benchmarks.cells import in_processes
from benchmarks.loops import NUM_BATCHES, engine_on, stepping
from benchmarks.markdown import markdown, write_page
from benchmarks.workload import ADAMW, Batch, Shape, batches, llama
from shardwise.comm import Channel, alone

RESULTS = Path(__file__).parent / "results" / "trainer.md"
READING = "Goal: 1.02 at most."
HEADER = ("tokens of a microbatch", "ranks", "engine alone, ms", "Trainer, ms", "ratio")
NUM_WARM = 5


class Turns(TrainerCallback):
    """After each step of the Trainer, one of the engine."""

    def __init__(self, engine: sw.Engine, drawn: Sequence[Batch]) -> None:
        self._step = stepping(engine, listed=True)
        self._drawn = drawn
        self._begun = 0.0
        self.found: list[tuple[float, float]] = []
        """Milliseconds of the engine alone and of the Trainer, for each turn."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A step of the Trainer has ended."""
        ended = time.perf_counter()
        self._step(self._drawn[state.global_step % len(self._drawn)])
        done = time.perf_counter()
        if self._begun and state.global_step > NUM_WARM:
            self.found.append(((done - ended) * 1e3, (ended - self._begun) * 1e3))
        self._begun = time.perf_counter()


def turns(channel: Channel, shape: Shape, k: int, num_rounds: int, build: Any = llama) -> list[tuple[float, float]]:
    """The milliseconds of both sides, for each turn."""
    drawn = batches(shape, k, rank=channel.rank, count=NUM_BATCHES)
    # As many rows as the steps take, from the batches of all data ranks: both sides compute as much.
    num_rows = (NUM_WARM + num_rounds) * k * shape.num_sequences * channel.size
    tokens = torch.cat([each.whole["input_ids"] for each in drawn])
    rows = [{"input_ids": row, "labels": row} for row in tokens[torch.arange(num_rows) % len(tokens)]]
    taking = Turns(engine_on(channel, k, build=build), drawn)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        args = hf.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=shape.num_sequences,
            gradient_accumulation_steps=k,
            max_steps=NUM_WARM + num_rounds,
            learning_rate=ADAMW["lr"],
            weight_decay=ADAMW["weight_decay"],
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size))
        hf.Trainer(build(), args, train_dataset=rows, callbacks=[taking], plan=plan, channel=channel).train()
    return taking.found


def measure(channel: Channel, shapes: Sequence[str], k: int, num_rounds: int) -> list[tuple[str, ...]]:
    """The rows of one number of ranks."""
    rows: list[tuple[str, ...]] = []
    for shape in shapes:
        found = turns(channel, Shape.parse(shape), k, num_rounds)
        engine, trainer = (statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(trainer / engine for engine, trainer in found)
        rows.append((shape, str(channel.size), f"{engine:.2f}", f"{trainer:.2f}", f"{ratio:.3f}"))
    return rows


def of_rank(rank: int, folder: Path, *, shapes: Sequence[str], k: int, num_rounds: int) -> None:
    """What a process does that is joined with others."""
    rows = measure(sw.default_channel(), shapes, k, num_rounds)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shapes", default="1x32,4x32", help="rows x tokens of a microbatch")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    shapes = arguments.shapes.split(",")
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    rows = measure(alone(), shapes, arguments.k, arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        work = partial(of_rank, shapes=shapes, k=arguments.k, num_rounds=arguments.rounds)
        in_processes(work, Path(name))
        rows += map(tuple, json.loads((Path(name) / "rows.json").read_text()))
    table = markdown(HEADER, rows)
    print(table)
    if arguments.write:
        write_page(RESULTS, "benchmarks.trainer", "Trainer", READING, table, load_before=before)


if __name__ == "__main__":
    main()
