"""The model of the tests on devices, what a plain loop makes of it, and the layouts under which it trains."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils.checkpoint import checkpoint

import shardwise as sw

NUM_WORDS, WIDTH, NUM_BLOCKS = 96, 32, 4
ROWS, TOKENS = 16, 6
STEPS = 3

Batch = Mapping[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, dropout: float, *, recomputed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.recomputed = recomputed

    def compute(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.norm(states)))))
        return states + out

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.recomputed and self.training:
            out: torch.Tensor = checkpoint(self.compute, states, use_reentrant=False)
            return out
        return self.compute(states)


class Net(nn.Module):
    """A language model without attention: what layouts cut, and nothing else."""

    def __init__(self, dropout: float = 0.0, *, recomputed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, recomputed=recomputed) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states = self.embedding(words)
        for block in self.blocks:
            states = block(states)
        out: torch.Tensor = self.head(states)
        return out


def net(dropout: float = 0.0, *, recomputed: bool = False) -> Net:
    """The same one for every caller, built on the CPU."""
    torch.manual_seed(0)
    return Net(dropout, recomputed=recomputed)


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["next"].flatten())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    # Not Adam, whose first update is the sign of a gradient: where one is near zero, rounding would turn the update.
    # Fused, where torch has that: others make the host wait once per step.
    listed = list(parameters)
    fused = listed[0].device.type in _get_fused_kernels_supported_devices()
    return torch.optim.SGD(listed, lr=0.5, momentum=0.9, fused=fused)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """All rows of an update."""
    generator = torch.Generator().manual_seed(100 + step)
    words = torch.randint(0, NUM_WORDS, (ROWS, TOKENS + 1), generator=generator)
    return {"words": words[:, :-1], "next": words[:, 1:]}


def share(plan: sw.Plan, rank: int, step: int) -> dict[str, torch.Tensor]:
    """The rows of one rank."""
    num_ranks = plan.mesh.num_data_ranks
    at = plan.mesh.data_rank(rank)
    return {name: rows.chunk(num_ranks)[at] for name, rows in batch_of(step).items()}


def _data(stage: Any) -> Callable[[int], sw.Plan]:
    return lambda size: sw.Plan(
        mesh=sw.Mesh(dp_shard=size),
        sharding=sw.Sharding(stage=stage, bucket_bytes=32 << 10),
        merge=sw.Merge(microbatches=2),
        clip_grad_norm=0.5,
    )


def _cut(stage: Any, **axes: int) -> Callable[[int], sw.Plan]:
    rules = {"blocks.*.up": "column", "blocks.*.down": "row"} if "tp" in axes else None
    return lambda size: sw.Plan(
        mesh=sw.Mesh(**axes, dp_shard=size // math.prod(axes.values())),
        sharding=sw.Sharding(stage=stage),
        merge=sw.Merge(microbatches=2),
        tensor=sw.Tensor(rules=rules),
        clip_grad_norm=0.5,
    )


LAYOUTS: dict[str, tuple[int, Callable[[int], sw.Plan]]] = {
    **{f"stage {stage}": (1, _data(stage)) for stage in range(4)},
    "pp": (2, _cut(1, pp=2)),
    "tp": (2, _cut(1, tp=2)),
    "pp, tp and stage 3": (4, _cut(3, pp=2, tp=2)),
}
"""Name -> the fewest ranks, and the plan for a number of ranks."""

SIZES = (1, 2, 4, 8)

CELLS = [
    (size, name) for size in SIZES for name, (least, _) in LAYOUTS.items() if least <= size and (size < 8 or least == 4)
]
"""On eight ranks the layout that uses all axes; the others differ from those on four in sizes alone."""


def plan_of(name: str, size: int) -> sw.Plan:
    return LAYOUTS[name][1](size)


def engine_of(
    channel: sw.Channel, plan: sw.Plan, *, dropout: float = 0.0, recomputed: bool = False, seed: int = 0
) -> sw.Engine[Net]:
    return sw.parallelize(
        net(dropout, recomputed=recomputed), plan, optimizer=optimizer_of, loss=loss_of, channel=channel, seed=seed
    )


def full(engine: sw.Engine[Net], *, optimizer: bool = False) -> dict[str, torch.Tensor]:
    return dict(sw.full(engine, optimizer=optimizer))


def plain(device: torch.device) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the parameters of the loop that anybody would write, on one device."""
    model = net().to(device)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        batch = {name: rows.to(device) for name, rows in batch_of(step).items()}
        optimizer.zero_grad()
        loss = loss_of(model(batch["words"]), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: each.detach().cpu() for name, each in model.named_parameters()}
