"""A small run for tests: its files, a run of it on simulated ranks, and the loop that anybody would write."""

import inspect
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from shardwise.comm import alone, simulate
from shardwise.data import DataPlace, first_batches
from shardwise.errors import ShardwiseError
from shardwise.train import RunConfig, read_config
from shardwise.train.rank import run
from shardwise.train.run_build import build_model, optimizer_factory
from shardwise.train.run_data import build_data
from shardwise.train.turns import build_loss, build_turns
from tests.train.user_files import FILES

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
    for name, content in FILES.items():
        (folder / name).write_text(content)
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


def words_of(folder: Path, *overrides: str) -> str:
    """What the configuration of these words is refused with, also before it runs."""
    with pytest.raises(ShardwiseError) as caught:
        finished(laid_out(folder, *overrides))
    return str(caught.value)


def rows_in(batch: Any) -> list[Any]:
    """Each row of a batch."""
    return [{name: each[at : at + 1] for name, each in batch.items()} for at in range(len(batch["labels"]))]


PLAIN = ("train.decay=constant", "train.warmup_steps=null", "train.clip_grad_norm=null")
"""Settings of a run that `plain_losses` knows."""


def plain_losses(config: RunConfig, *, begin: int = 0, state: Mapping[str, torch.Tensor] | None = None) -> list[float]:
    """A loop in plain PyTorch over the global batches from `begin` on, each one microbatch: a turn, its loss, AdamW.

    state: parameters and moments to go on from, by the names of a save.
    """
    model = build_model(config)
    optimizers: Any = optimizer_factory(config, model)(list(model.parameters()))
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    state = state or {}
    for name, parameter in model.named_parameters() if state else ():
        parameter.data.copy_(state[name])
        if parameter.requires_grad and f"optimizer/{name}/step" in state:
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizers[0].state[parameter] = {key: state[f"optimizer/{name}/{key}"] for key in keys}
    names = inspect.signature(model.forward).parameters
    trained = {name: each.requires_grad for name, each in model.named_parameters()}
    turns, usual, losses = build_turns(config, model), build_loss(config, model), []
    for step, batch in enumerate(first_batches(build_data(config).data, DataPlace(), config.train.steps), start=1):
        if step <= begin:
            continue
        turn = turns.of(step)
        only = turn.get("only") or ()
        for name, parameter in model.named_parameters():
            groups = [only] if isinstance(only, str) else only
            parameter.requires_grad_(trained[name] and (not groups or name.split(".")[0] in groups))
        model.zero_grad()
        loss: Any = turn.get("loss") or usual
        total = 0.0
        # Models of transformers give the mean over tokens, and a row is a microbatch: a mean of means, unless weighed.
        for part in [batch] if loss is not None or config.model.loss_weight else rows_in(batch):
            output = model(**{name: each for name, each in part.items() if name in names})
            found = output["loss"] if loss is None else loss(output, part)
            found = found["loss"] if isinstance(found, dict) else found
            found = found * (len(part["labels"]) / len(batch["labels"])) if loss is None else found
            found.backward()
            total += found.item()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total)
    return losses
