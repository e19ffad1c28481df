"""A pipeline of two stages through a U-Net: every skip crosses from the first stage to the second.

One learns: the model stays as it is, names place its modules, and the numbers are those of one process, to the bit.

    python examples/odd_pipeline.py                 # two simulated ranks
    torchrun --nproc-per-node 2 examples/odd_pipeline.py
"""

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw

NUM_STEPS, MICROBATCHES = 4, 4


class UNet(nn.Module):
    """Cleans signals. Each level halves the length on the way down, and gets its skip back on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 8, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv1d(width, 2 * width, 4, stride=2, padding=1) for width in (8, 16, 32))
        self.middle = nn.Sequential(nn.Conv1d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU())
        self.up = nn.ModuleList(nn.ConvTranspose1d(width, width // 2, 4, stride=2, padding=1) for width in (64, 32, 16))
        self.join = nn.ModuleList(nn.Conv1d(2 * width, width, 3, padding=1) for width in (32, 16, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        states = self.start(signal)
        skips = []
        for down in self.down:
            skips.append(states)
            states = F.gelu(down(states))
        states = self.middle(states)
        for up, join in zip(self.up, self.join, strict=True):
            states = F.gelu(join(torch.cat([up(states), skips.pop()], dim=1)))
        # The head is the first convolution's weight: a parameter of the first stage, used on the second.
        return F.conv_transpose1d(states * self.scale.view(-1, 1), self.start.weight, padding=1)


def build() -> UNet:
    torch.manual_seed(0)
    return UNet()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """8 sines of 64 points, with noise and without."""
    random = torch.Generator().manual_seed(step)
    clean = torch.sin(torch.arange(64) * torch.rand(8, 1, 1, generator=random))
    return {"signal": clean + 0.3 * torch.randn(8, 1, 64, generator=random), "clean": clean}


def error(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(output, batch["clean"])


PLAN = sw.Plan(
    mesh=sw.Mesh(pp=2),
    merge=sw.Merge(microbatches=MICROBATCHES),
    pipeline=sw.Pipeline(schedule="1f1b", stages={"start": 0, "down": 0, "middle": 1, "up": 1, "join": 1, "scale": 1}),
)


def train(channel: sw.Channel) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """On one of two ranks: losses, the parameters of its stage, and how many values cross."""
    model = build()
    engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=error, channel=channel)
    losses = [engine.step(batch_of(step)).loss for step in range(NUM_STEPS)]  # both ranks get the whole batch
    assert engine.pipeline is not None
    assert engine.pipeline.transfers is not None
    held = {name: each.detach() for name, each in model.named_parameters() if not each.is_meta}
    return losses, held, len(engine.pipeline.transfers)


def train_plainly() -> tuple[list[float], UNet]:
    """One process, without shardwise: the same microbatches."""
    model = build()
    optimizer = adamw(list(model.parameters()))
    losses = []
    for step in range(NUM_STEPS):
        batch, told = batch_of(step), []
        for signal, clean in zip(*(rows.chunk(MICROBATCHES) for rows in batch.values()), strict=True):
            loss = error(model(signal), {"clean": clean})
            loss.backward()
            told.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        losses.append(math.fsum(told) / MICROBATCHES)
    return losses, model


if __name__ == "__main__":
    channel = sw.default_channel()
    ranks = sw.simulate(2, train) if channel.size == 1 else [train(channel)]
    plain, model = train_plainly()
    for losses, held, num_crossing in ranks:
        assert losses == plain
        assert num_crossing == 5
        assert all(torch.equal(held[name], each) for name, each in model.named_parameters() if name in held)
    if channel.rank == 0:
        print("losses:", *(f"{loss:.4f}" for loss in plain))
        print("5 values cross per microbatch: the states, three skips, and the weight of the head")
        print("losses and parameters are those of one process to the bit")
