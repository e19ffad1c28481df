"""The smallest model that every layout can cut, engines over it, and what a plain loop makes of it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.engine.loops import sgd, share
from tests.oracle.batches import Batch
from tests.oracle.one_process import train_in_one_process
from tests.oracle.program import seeded

DATA = sw.Mesh(dp_shard=2)
RULES = {"0": "column", "2": "row"}
TP = sw.Tensor(rules=RULES)
PLANS: dict[str, sw.Plan] = {
    "one": sw.Plan(),
    "one bf16": sw.Plan(precision=sw.Precision(compute="bfloat16")),
    **{f"stage {stage}": sw.Plan(mesh=DATA, sharding=sw.Sharding(stage=stage)) for stage in (0, 1, 2, 3)},
    "whole": sw.Plan(mesh=DATA, sharding=sw.Sharding(partition="whole")),
    "bf16": sw.Plan(mesh=DATA, precision=sw.Precision(compute="bfloat16")),
    "merged": sw.Plan(mesh=DATA, merge=sw.Merge(microbatches=2)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TP),
    "pp tp": sw.Plan(mesh=sw.Mesh(pp=2, tp=2), tensor=TP),
}
HAVE_ALL = ("one", "one bf16", "stage 0")
"""Plans under which each rank has all of the optimizer's state."""

BATCH = {"input": torch.arange(16.0).view(4, 4) / 10}


def tower() -> nn.Sequential:
    """The same values for every caller."""
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))()


def away_from_three(output: torch.Tensor, batch: object = None) -> torch.Tensor:
    """A loss whose gradient is far from 0."""
    return (output.float() - 3).square().mean()


def masters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters that an optimizer has now."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def engine_on(
    channel: sw.Channel | None,
    plan: str | sw.Plan,
    optimizer: Any = sgd,
    *,
    model: nn.Module | None = None,
    loss: Any = away_from_three,
    **more: Any,
) -> sw.Engine:
    """An engine over a tower, or over `model`."""
    asked = PLANS[plan] if isinstance(plan, str) else plan
    return sw.parallelize(model or tower(), asked, optimizer=optimizer, loss=loss, channel=channel, **more)


def train(engine: sw.Engine, batches: Iterable[Batch], **more: Any) -> list[float]:
    """The losses of one update per batch."""
    return [engine.step(share(engine, batch), **more).loss for batch in batches]


def trained(engine: sw.Engine, updates: int = 2) -> list[torch.Tensor]:
    """The parameters on rank 0 after some updates."""
    train(engine, [BATCH] * updates)
    return [each.float() for each in sw.full_state_dict(engine).values()]


def plain(
    optimizer: Any = sgd, *, model: nn.Module | None = None, updates: int = 2, loss: Any = away_from_three
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after as many updates of the plain loop."""
    model = model or tower()
    made: torch.optim.Optimizer = optimizer(model.parameters())
    train_in_one_process(model, made, [BATCH] * updates, loss=loss)
    return model, made


def on_ranks(plan: str | sw.Plan, run: Callable[[sw.Channel], Any], **more: Any) -> list[Any]:
    """What `run` gives on each rank of a plan."""
    return sw.simulate((PLANS[plan] if isinstance(plan, str) else plan).mesh.size, run, **more)
