"""A small model of words for tests of devices, its batches, of which some are broken, and plans for it."""

from typing import Any

import torch
from torch import nn

import shardwise as sw

Batch = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Words(nn.Module):
    """With a tied head two stages share a parameter."""

    def __init__(self, *, num_blocks: int = 2, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(num_blocks))
        self.head = nn.Linear(8, 13, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def words(device: torch.device, *, num_blocks: int = 2, is_tied: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Words(num_blocks=num_blocks, is_tied=is_tied).to(device)
        if is_tied:
            model.head.weight = model.embedding.weight
        return model


def loss_of(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    loss = nn.functional.cross_entropy(output.float().flatten(0, 1), batch["ids"].flatten())
    # A row of zeros is a broken sample: its loss is not finite.
    scaled: torch.Tensor = loss / (batch["ids"].sum(1) > 0).all()
    return scaled


def batch_of(seed: int, device: torch.device | str, *, is_broken: bool = False) -> Batch:
    ids = torch.randint(1, 13, (4, 5), generator=torch.Generator().manual_seed(seed))
    return {"ids": (ids * (not is_broken)).to(device)}


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def tokens(batch: Batch) -> torch.Tensor:
    """A weight that is where the batch is."""
    found: torch.Tensor = (batch["ids"] > 3).sum()
    return found


CUT = {f"blocks.*.{name}": rule for name, rule in {"up": "column", "down": "row"}.items()}


def plan(k: int = 1, *, stage: int = 1, bf16: bool = False, clip: float | None = 0.5, **mesh: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        sharding=sw.Sharding(stage=stage),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute="bfloat16") if bf16 else sw.Precision(),
        tensor=sw.Tensor(rules=CUT, prove=False) if "tp" in mesh else sw.Tensor(),
        clip_grad_norm=clip,
    )
