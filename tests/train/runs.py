"""A small run for tests: its files, and a run of it on simulated ranks."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.checkpoint import SaveReport
from shardwise.comm import alone, simulate
from shardwise.train import RunConfig, read_config
from shardwise.train.rank import run

LOOP: Any = None
"""For callbacks that do not ask their loop."""


def saved(step: int) -> SaveReport:
    return SaveReport(location="", step=step, num_tensors=0, num_bytes=0, written_bytes=0)


NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids):
        return self.head(self.norm(self.embedding(input_ids)))


def next_token(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def silent(width):
    return Mute(width)


class Mute(Net):
    def forward(self, input_ids):
        return {"scores": super().forward(input_ids)}


def next_score(output, batch):
    return next_token(output["scores"], batch)


class Broken(Net):
    def forward(self, input_ids):
        raise RuntimeError("the forward of this net is broken")


class Noisy(Net):
    def forward(self, input_ids):
        return self.head(nn.functional.dropout(self.norm(self.embedding(input_ids)), 0.3, self.training))


class Stop(Exception):
    pass


stop_after = []  # calls that the loss still takes; nothing in it: no end
calls = []


def stops(logits, batch):
    calls.append(logits.requires_grad)
    if stop_after and sum(calls) > stop_after[0]:
        raise Stop
    return next_token(logits, batch)


not_callable = 3
"""

CONFIG = """
[model]
factory = "net.py:Net"
loss = "net.py:next_token"
config = {width = 8}

[data]
source = "text.txt"
sequence_length = 16
held_out = 0.2

[train]
steps = 6
seed = 5
global_batch = 12
microbatch = 1
learning_rate = 0.02
warmup_steps = 2
weight_decay = 0.1
clip_grad_norm = 0.5
evaluate_every = 4
log_every = 2
"""


def small_run(folder: Path, *overrides: str, num_processes: int = 1) -> RunConfig:
    """The configuration of a run that takes a fraction of a second; its output goes below `folder`."""
    (folder / "net.py").write_text(NET)
    (folder / "text.txt").write_text("".join(f"{number} squared is {number * number}.\n" for number in range(150)))
    (folder / "small.toml").write_text(CONFIG)
    output = f"train.output={folder / 'out'}"
    return read_config(folder / "small.toml", overrides=[output, *overrides], num_processes=num_processes)


def laid_out(folder: Path, *overrides: str) -> RunConfig:
    """`small_run` for as many processes as the sizes of the mesh among `overrides` ask for."""
    sizes = [int(override.partition("=")[2]) for override in overrides if override.startswith("mesh.")]
    return small_run(folder, *overrides, num_processes=math.prod(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    printed: str
    """What rank 0 said."""

    def curve(self, name: str) -> list[float]:
        return [line[name] for line in self.metrics if line[name] is not None]


TIMES = frozenset({"tokens_per_second", "rows_per_second", "elapsed_s", "ranks", "slowest"})


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of metrics has to be the same bit for bit."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in metrics]


def finished(config: RunConfig, *, resume: str | None = None) -> Finished:
    """Run `config` to its end, on simulated ranks when it wants several."""
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    if config.plan.mesh.size == 1:
        run(config, alone(), console, resume=resume)
    else:
        simulate(config.plan.mesh.size, lambda channel: run(config, channel, console, resume=resume))
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return Finished(metrics=[json.loads(line) for line in lines], printed=printed.getvalue())
