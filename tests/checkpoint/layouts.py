"""Layouts to save and to load under, a model with everything odd in it, and states put together by brute force."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.plan.specs import Owners, Partition
from tests.engine.models import NUM_WORDS, word_batch, word_loss
from tests.engine.oracle import share_of

Whole = dict[str, torch.Tensor]


class Odd(nn.Module):
    """Ties, frozen parts, running statistics, integers, scalars, 4 dims, nothing at all, and what is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 7)
        self.cube = nn.Parameter(torch.randn(3, 1, 7, 2) / 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gate = nn.Parameter(torch.tensor([0.5]))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.order = nn.Parameter(torch.arange(7), requires_grad=False)
        self.norm = nn.BatchNorm1d(7)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(7, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(words))[..., self.order]
        hidden = torch.tanh(hidden @ self.cube.sum((0, 1)) @ self.cube[0, 0].T) * self.scale + self.gate
        hidden = self.norm(hidden.flatten(0, 1).to(self.norm.weight.dtype)).view(hidden.shape).to(hidden.dtype)
        out: torch.Tensor = self.head(self.dropout(hidden))
        return out


def odd(seed: int = 0) -> Odd:
    """The same model for every caller with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Odd()


STAGES = {
    **{"embedding": 0, "cube": 1, "scale": 1, "gate": 2, "nothing": 3, "unused": 0},
    **{"frozen": 0, "order": 3, "norm": 2, "head": 3},
}
"""Of four; the order of the frozen layer's outputs comes from the last one, back to the first."""


def layout(
    dp_replicate: int,
    dp_shard: int,
    stage: int,
    partition: Partition,
    bucket_bytes: int,
    *,
    owners: Owners = "all",
    compute: str | None = None,
    microbatches: int = 1,
    pp: int = 1,
    chunks: int = 1,
) -> sw.Plan:
    """A plan in one line."""
    num_stages = pp * chunks
    stages = {name: stage * num_stages // 4 for name, stage in STAGES.items()} if num_stages > 1 else None
    return sw.Plan(
        mesh=sw.Mesh(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard),
        pipeline=sw.Pipeline(schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks, stages=stages),
        sharding=sw.Sharding(stage=stage, partition=partition, bucket_bytes=bucket_bytes, owners=owners),
        precision=sw.Precision(compute=compute),
        merge=sw.Merge(microbatches=microbatches),
        clip_grad_norm=1.0,
    )


LAYOUTS = {
    "one": layout(1, 1, 1, "slice", 1 << 20),
    "one-stage0-bf16": layout(1, 1, 0, "slice", 1 << 20, compute="bfloat16"),
    "two-stage0": layout(1, 2, 0, "slice", 500),
    "two-slice": layout(1, 2, 1, "slice", 500),
    "two-slice-bf16": layout(1, 2, 1, "slice", 300, compute="bfloat16"),
    "two-whole": layout(2, 1, 1, "whole", 500),
    "three-slice": layout(1, 3, 1, "slice", 1 << 20),
    "three-slice-fine": layout(3, 1, 1, "slice", 130),
    "three-whole-bf16": layout(1, 3, 1, "whole", 300, compute="bfloat16"),
    "four-replicas": layout(2, 2, 1, "slice", 400, owners="dp_shard"),
    "four-replicas-whole": layout(2, 2, 1, "whole", 400, owners="dp_shard"),
    "five-slice-bf16": layout(1, 5, 1, "slice", 350, compute="bfloat16"),
    "seven-slice": layout(1, 7, 1, "slice", 1 << 20),
    "stages-two": layout(1, 1, 1, "slice", 500, pp=2),
    "stages-four-bf16": layout(1, 1, 0, "slice", 1 << 20, compute="bfloat16", pp=4, microbatches=2),
    "stages-two-x-two": layout(1, 2, 1, "slice", 300, pp=2, chunks=2),
    "stages-four-x-two-whole": layout(2, 1, 1, "whole", 400, pp=4),
}
"""Meshes, stages of both kinds, partitions, bucket sizes and compute dtypes."""


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """In two groups, so that names and settings have to be kept apart."""
    trainable = [each for each in parameters if each.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trainable[::2]}, {"params": trainable[1::2], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def engine_of(plan: sw.Plan, channel: sw.Channel, *, seed: int = 0) -> sw.Engine:
    """A fresh engine."""
    return sw.parallelize(odd(seed), plan, optimizer=adamw, loss=word_loss, channel=channel)


def train(engine: sw.Engine, channel: sw.Channel, updates: Iterable[int]) -> list[float]:
    """The losses of these updates; the same rows, dropout by update and rank."""
    losses = []
    num_data_ranks = channel.size // engine.plan.mesh.pp  # pp is the outermost axis
    for update in updates:
        torch.manual_seed(1000 * update + channel.rank)
        losses.append(engine.step(share_of(word_batch(update, 28), channel.rank % num_data_ranks, num_data_ranks)).loss)
    return losses


def assembled(states: Iterable[Mapping[sw.Piece, torch.Tensor]]) -> Whole:
    """Whole tensors out of the pieces of all ranks, element by element; replicas have to agree."""
    whole: Whole = {}
    for state in states:
        for piece, tensor in state.items():
            total = 1
            for size in piece.global_shape:
                total *= size
            target = whole.setdefault(piece.name, torch.full((total,), -77, dtype=tensor.dtype))
            seen = whole.setdefault(f"seen {piece.name}", torch.zeros(total, dtype=torch.bool))
            where = torch.arange(total).view(piece.global_shape)[piece.box.slices()].reshape(-1)
            where = where[piece.elements.start : piece.elements.stop]
            values = tensor.detach().reshape(-1)
            before = target[where][seen[where]]
            assert torch.equal(before.view(torch.uint8), values[seen[where]].view(torch.uint8)), piece
            target[where] = values
            seen[where] = True
    for name in [name for name in whole if name.startswith("seen ")]:
        assert bool(whole.pop(name).all()), name
    return whole
