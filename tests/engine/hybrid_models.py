"""A tiny decoder for every axis at once, and the comparison of a layout with one process."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from tests.checkpoint.layouts import assembled
from tests.engine.models import NUM_WORDS, word_batch, word_loss
from tests.engine.pipeline.oracle import Case, State, expected
from tests.engine.pipeline.stages import train_on

WIDTH, HEADS, GROUPS, HEAD_SIZE, WIDE = 12, 6, 3, 2, 33


class Attention(nn.Module):
    """Six heads, two to each of three key-value heads: over two ranks those are two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = HEADS, GROUPS
        self.q = nn.Linear(WIDTH, HEADS * HEAD_SIZE)
        self.k = nn.Linear(WIDTH, GROUPS * HEAD_SIZE)
        self.v = nn.Linear(WIDTH, GROUPS * HEAD_SIZE)
        self.o = nn.Linear(HEADS * HEAD_SIZE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (each(x).view(rows, length, -1, HEAD_SIZE).transpose(1, 2) for each in (self.q, self.k, self.v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: torch.Tensor = self.o(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed


class Block(nn.Module):
    """Attention, and two linear maps with an odd number of columns between."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.dropout = nn.Dropout(dropout)
        self.last_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        out: torch.Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.last_norm(x)))))
        return out


class Decoder(nn.Module):
    """Embedding and head are one parameter; one layer is frozen, one is never used."""

    def __init__(self, dropout: float = 0.0, *, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(self.frozen(x)))
        return out


RULES = {
    **{"embedding": "vocab", "head": "vocab"},
    **{"blocks.*.attention.[qkv]": "column", "blocks.*.attention.o": "row"},
    **{"blocks.*.up": "column", "blocks.*.down": "row"},
}
STAGES = {"embedding": 0, "blocks.0": 1, "unused": 1, "blocks.1": 2, "frozen": 2, "norm": 3, "head": 3}
"""Of four: the tie lies on the first and on the last."""


def decoder(dropout: float = 0.0, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """The same values for every caller with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(dropout).to(dtype)


CASE = Case(make=decoder, batches=[word_batch(seed, 12) for seed in range(2)], stages=STAGES, loss=word_loss)


def plan_of(
    mesh: sw.Mesh | str,
    *,
    stage: int = 1,
    k: int = 1,
    sharding: Mapping[str, object] | None = None,
    schedule: str = "1f1b",
    clip: float | None = 0.2,
    precision: sw.Precision | None = None,
) -> sw.Plan:
    """The decoder on a mesh, in buckets so small that there are several."""
    mesh = sw.Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    chunks = 2 if schedule == "interleaved" else 1
    stages = CASE.stages_for(mesh.pp * chunks) if mesh.pp > 1 else None
    return sw.Plan(
        mesh=mesh,
        sharding=sw.Sharding(**{"stage": stage, "bucket_bytes": 2000, **(sharding or {})}),  # type: ignore[arg-type]
        merge=sw.Merge(microbatches=k),
        precision=precision or sw.Precision(),
        pipeline=sw.Pipeline(schedule=schedule if mesh.pp > 1 else "1f1b", stages=stages),
        tensor=sw.Tensor(rules=RULES if mesh.tp > 1 else None),
        clip_grad_norm=clip,
    )


def num_data_ranks(mesh: sw.Mesh) -> int:
    return mesh.dp_replicate * mesh.dp_shard


def data_rank(mesh: sw.Mesh, rank: int) -> int:
    return mesh.peers(rank, ("dp_replicate", "dp_shard")).index(rank)


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """What all ranks of a layout have, put together."""

    losses: list[float]
    grad_norms: list[float]
    held_out: float
    states: list[State]
    """After every update; flat tensors."""


def train(case: Case, plan: sw.Plan) -> Hybrid:
    """Train on simulated ranks; they report the same floats, and what several of them hold has the same bits."""
    return together(sw.simulate(plan.mesh.size, lambda channel: train_on(channel, case, plan)))


def together(ranks: Sequence[tuple[list[float], list[float], float, list[dict[sw.Piece, torch.Tensor]]]]) -> Hybrid:
    """Of what `train_on` gives on all ranks."""
    for other in ranks[1:]:
        assert other[:3] == ranks[0][:3]
    losses, grad_norms, held_out, states = ranks[0]
    whole = [assembled(rank[3][at] for rank in ranks) for at in range(len(states))]
    return Hybrid(losses=losses, grad_norms=grad_norms, held_out=held_out, states=whole)


def assert_close(got: Hybrid, wanted: Hybrid, *, relative: float, names: Iterable[str] | None = None) -> None:
    """Losses, norms and every tensor after every update, to `relative` of the largest element of each.

    The bias of keys has no gradient but rounding (softmax does not see what all scores share), and AdamW divides those
    1e-18 by an epsilon of 1e-8: how processors round shows in it, so it is compared with 1 as its largest element.
    """
    assert got.losses == pytest.approx(wanted.losses, rel=relative)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=relative)
    assert got.held_out == pytest.approx(wanted.held_out, rel=relative)
    for state, other in zip(got.states, wanted.states, strict=True):
        for name in names or other:
            one, expects = state[name].reshape(-1), other[name].reshape(-1)
            largest = float((one.double() - expects.double()).abs().max())
            scale = 1.0 if name.endswith(".k.bias") else 1e-3
            assert largest <= relative * max(scale, float(expects.abs().max())), f"{name} differs by {largest}"


def in_one_process(case: Case, plan: sw.Plan) -> Hybrid:
    """Plain PyTorch on the microbatches of all data ranks, those of the first data rank first."""
    alone = expected(case, plan.merge.microbatches * num_data_ranks(plan.mesh), clip=plan.clip_grad_norm)
    return Hybrid(losses=alone.losses, grad_norms=alone.grad_norms, held_out=alone.held_out, states=alone.states)
