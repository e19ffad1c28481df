"""Layouts to save and to load under, a model with everything odd in it, and states put together by brute force."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

import shardwise as sw
from shardwise.plan.specs import Owners, Partition
from tests.oracle.batches import NUM_WORDS, share_of, word_batch, word_loss

Whole = dict[str, torch.Tensor]


class Turn(nn.Module):
    """Multiplies by numbers that checkpoints leave out, as rotary embeddings do."""

    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.5, 1.5, 7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles.to(x.dtype)


class Odd(nn.Module):
    """Ties, frozen parts, running statistics, integers, scalars, 4 dims, nothing at all, and what is never used.

    For tensor parallelism it has two layers with an odd number of columns between, and two projections packed in one.
    """

    tp_plan: ClassVar = {
        **{"embedding": "embedding_rowwise", "head": "colwise_gather_output", "up": "colwise", "down": "rowwise"},
        **{"gates": "packed_colwise", "gated": "rowwise"},
    }

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
        self.up = nn.Linear(7, 33)
        self.down = nn.Linear(33, 7)
        self.gates = nn.Linear(7, 18)
        self.gated = nn.Linear(9, 7)
        self.turn = Turn()
        self.norm = nn.BatchNorm1d(7)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(7, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(words))[..., self.order]
        hidden = torch.tanh(hidden @ self.cube.sum((0, 1)) @ self.cube[0, 0].T) * self.scale + self.gate
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        left, right = self.gates(hidden).chunk(2, -1)
        hidden = hidden + self.gated(torch.sigmoid(left) * right)
        hidden = self.norm(hidden.flatten(0, 1).to(self.norm.weight.dtype)).view(hidden.shape).to(hidden.dtype)
        out: torch.Tensor = self.head(self.dropout(self.turn(hidden)))
        return out


def odd(seed: int = 0) -> Odd:
    """The same model for every caller with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Odd()


STAGES = {
    **{"embedding": 0, "cube": 1, "scale": 1, "gate": 2, "nothing": 3, "unused": 0},
    **{"frozen": 0, "order": 3, "norm": 2, "head": 3, "up": 1, "down": 1, "gates": 2, "gated": 2, "turn": 2},
}
"""Of four; the order of the frozen layer's outputs comes from the last one, back to the first."""


RULES = {
    **{"embedding": "vocab", "head": "vocab", "up": "column(parts=20+13)", "down": "row(parts=20+13)"},
    **{"gates": "column(parts=2)", "gated": "row"},
}
"""Both parts of the odd columns are cut, the second unevenly: a rank has two boxes of them."""


def layout(
    dp_replicate: int,
    dp_shard: int,
    stage: int,
    partition: Partition,
    bucket_bytes: int,
    *,
    owners: Owners = "all",
    compute: str | None = None,
    keep: tuple[str, ...] = (),
    microbatches: int = 1,
    pp: int = 1,
    chunks: int = 1,
    tp: int = 1,
    rules: Mapping[str, str] | Literal["auto"] = "auto",
) -> sw.Plan:
    """A plan in one line."""
    num_stages = pp * chunks
    stages = {name: stage * num_stages // 4 for name, stage in STAGES.items()} if num_stages > 1 else None
    return sw.Plan(
        mesh=sw.Mesh(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp),
        pipeline=sw.Pipeline(schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks, stages=stages),
        sharding=sw.Sharding(stage=stage, partition=partition, bucket_bytes=bucket_bytes, owners=owners),
        precision=sw.Precision(compute=compute, keep=keep),
        merge=sw.Merge(microbatches=microbatches),
        tensor=sw.Tensor(rules=rules if tp > 1 else None),
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
    "stage2-two": layout(1, 2, 2, "slice", 500, microbatches=2),
    "stage2-three-whole-bf16": layout(1, 3, 2, "whole", 300, compute="bfloat16"),
    "stage2-replicas": layout(2, 2, 2, "slice", 400, owners="dp_shard"),
    "stage3-two-bf16": layout(1, 2, 3, "slice", 300, compute="bfloat16", microbatches=2),
    "stage3-three-whole": layout(3, 1, 3, "whole", 500),
    "stage3-replicas-bf16": layout(2, 2, 3, "slice", 400, owners="dp_shard", compute="bfloat16", keep=("norm",)),
    "stage3-stages": layout(1, 2, 3, "slice", 500, pp=2, microbatches=2),
    "tensor-two": layout(1, 1, 1, "slice", 500, tp=2),
    "tensor-three-bf16": layout(1, 1, 0, "slice", 1 << 20, tp=3, compute="bfloat16"),
    "tensor-two-parts-x-two": layout(1, 2, 1, "slice", 130, tp=2, rules=RULES),
    "tensor-two-x-two-whole-bf16": layout(2, 1, 1, "whole", 400, tp=2, rules=RULES, compute="bfloat16"),
    "tensor-two-stages": layout(1, 1, 1, "slice", 1 << 20, pp=2, tp=2),
    "tensor-two-x-three-stage2": layout(1, 3, 2, "slice", 300, tp=2),
    "tensor-three-x-two-stage3": layout(1, 2, 3, "slice", 300, tp=3, rules=RULES, compute="bfloat16"),
    "all": layout(1, 2, 1, "slice", 400, pp=2, tp=2, compute="bfloat16", microbatches=2),
    "all-stage3": layout(1, 2, 3, "slice", 400, pp=2, tp=2, rules=RULES, microbatches=2),
}
"""Meshes, stages of both kinds, partitions, cuts of all kinds, bucket sizes and compute dtypes."""


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
    mesh = engine.plan.mesh
    data_ranks = mesh.peers(channel.rank, ("dp_replicate", "dp_shard"))
    for update in updates:
        torch.manual_seed(1000 * update + channel.rank)
        share = share_of(word_batch(update, 28), data_ranks.index(channel.rank), len(data_ranks))
        losses.append(engine.step(share).loss)
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


def state_of(engine: sw.Engine) -> dict[sw.Piece, torch.Tensor]:
    """What this rank holds now."""
    return {piece: tensor.clone() for piece, tensor in engine.state().items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whatever their shapes."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def masters_of(whole: Whole) -> Whole:
    """A state under the names that every precision has: a master under its parameter's, instead of the working copy."""
    master = "/master"
    named = {name: tensor for name, tensor in whole.items() if not name.endswith(master)}
    return named | {
        name.removeprefix("optimizer/").removesuffix(master): tensor
        for name, tensor in whole.items()
        if name.endswith(master)
    }
