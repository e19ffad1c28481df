"""The loop of `before.py` under a plan: alone, or on as many data ranks as torchrun starts.

python examples/plain_loop/after.py
torchrun --nproc-per-node 2 examples/plain_loop/after.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw


def build() -> nn.Module:
    """A classifier of points in 16 dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 32 points, each with the number of the largest of its first 4 coordinates."""
    points = torch.randn(10, 32, 16, generator=torch.Generator().manual_seed(1))
    return [(each, each[:, :4].argmax(dim=1)) for each in points]


def train(channel: sw.Channel) -> list[float]:
    """Train one update per batch."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    engine = sw.parallelize(
        model,
        sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), clip_grad_norm=1.0),
        optimizer=optimizer,
        loss=lambda output, batch: F.cross_entropy(output, batch["labels"]),
        channel=channel,
    )
    losses = []
    for points, labels in batches():
        mine = slice(channel.rank, None, channel.size)  # each data rank takes other rows
        report = engine.step({"points": points[mine], "labels": labels[mine]})
        scheduler.step()
        losses.append(report.loss)
    return losses


if __name__ == "__main__":
    channel = sw.default_channel()
    losses = train(channel)
    if channel.rank == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.5f}")
        print(f"an engine trained this (data ranks: {channel.size}); before.py prints the same losses")
