"""A plain PyTorch training loop. `after.py` is the same program under a plan, and prints the same losses.

python examples/plain_loop/before.py
"""

import torch
from torch import nn
from torch.nn import functional as F


def build() -> nn.Module:
    """A classifier of points in 16 dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 32 points, each with the number of the largest of its first 4 coordinates."""
    points = torch.randn(10, 32, 16, generator=torch.Generator().manual_seed(1))
    return [(each, each[:, :4].argmax(dim=1)) for each in points]


def train() -> list[float]:
    """Train one update per batch."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    losses = []
    for points, labels in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(train()):
        print(f"step {step}: loss {loss:.5f}")
    print("PyTorch alone trained this; after.py prints the same losses")
