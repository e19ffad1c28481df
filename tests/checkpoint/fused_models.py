"""One small model under two sets of names, what turns the one into the other, and the same by hand."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.plan.names import split_state_name, state_name
from shardwise.plan.specs import Partition
from tests.engine.models import NUM_WORDS, word_batch, word_loss
from tests.engine.oracle import share_of

Whole = dict[str, torch.Tensor]

FUSING = """
q.weight, k.weight, v.weight -> qkv.weight, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0
q.bias, k.bias, v.bias -> qkv.bias, fused_qkv, num_heads=4, num_key_value_groups=2
gate.weight, up.weight -> gate_up.weight, axis=0
gate.bias, up.bias -> gate_up.bias, axis=0
down.weight^T -> project.weight        # as GPT-2 has it
down.bias -> project.bias
embedding.weight -> words.weight
head.weight -> logits.weight           # tied to the embedding
"""


class Apart(nn.Module):
    """Query, key and value apart, as a Hugging Face model has them; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 6)
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)
        self.out = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.gate, self.up = nn.Linear(6, 5), nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)
        self.head = nn.Linear(6, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 1.0]))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(words) * self.scale)
        x = x + self.out(torch.tanh(self.q(x)) * torch.cat([self.k(x), self.v(x)], -1))
        out: torch.Tensor = self.head(x + self.down(torch.sigmoid(self.gate(x)) * self.up(x)))
        return out


class Transposed(nn.Module):
    """A linear layer whose weight has the other order of dims."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.randn(outputs) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Fused(nn.Module):
    """The same function of other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 6)
        self.qkv = nn.Linear(6, 16)
        self.out = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.gate_up = nn.Linear(6, 10)
        self.project = Transposed(5, 6)
        self.logits = nn.Linear(6, NUM_WORDS, bias=False)
        self.logits.weight = self.words.weight
        self.register_buffer("scale", torch.zeros(6))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(words) * self.scale)
        heads = self.qkv(x).unflatten(-1, (2, 8))
        q, kv = heads[..., :4].flatten(-2), torch.cat([heads[..., 4:6].flatten(-2), heads[..., 6:].flatten(-2)], -1)
        x = x + self.out(torch.tanh(q) * kv)
        gate, up = self.gate_up(x).chunk(2, -1)
        out: torch.Tensor = self.logits(x + self.project(torch.sigmoid(gate) * up))
        return out


def model_of(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model for every caller with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


def plan_of(
    kind: type[nn.Module],
    dp_shard: int = 1,
    *,
    stage: int = 1,
    partition: Partition = "slice",
    compute: str | None = None,
) -> sw.Plan:
    """A plan for one of the two models."""
    return sw.Plan(
        mesh=sw.Mesh(dp_shard=dp_shard),
        sharding=sw.Sharding(stage=stage, partition=partition, bucket_bytes=500),
        precision=sw.Precision(compute=compute),
    )


def adamw(parameters: list[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    matrices = [each for each in parameters if each.dim() > 1]
    vectors = [each for each in parameters if each.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def engine_of(
    kind: type[nn.Module], plan: sw.Plan, channel: sw.Channel, *, seed: int = 0, lr: float = 1e-2
) -> sw.Engine:
    """A fresh engine."""
    optimizer = partial(adamw, lr=lr)
    return sw.parallelize(model_of(kind, seed), plan, optimizer=optimizer, loss=word_loss, channel=channel)


def train(engine: sw.Engine, channel: sw.Channel, updates: Iterable[int]) -> list[float]:
    """The losses of these updates."""
    return [engine.step(share_of(word_batch(update, 8), channel.rank, channel.size)).loss for update in updates]


def wholes(states: Iterable[Mapping[sw.Piece, torch.Tensor]]) -> Whole:
    """Whole tensors out of the pieces of all ranks."""
    whole: Whole = {}
    for state in states:
        for piece, tensor in state.items():
            target = whole.setdefault(piece.name, torch.full(piece.global_shape, -77, dtype=tensor.dtype))
            where = torch.arange(target.numel()).view(piece.global_shape)[piece.box.slices()].reshape(-1)
            target.view(-1)[where[piece.elements.start : piece.elements.stop]] = tensor.detach().reshape(-1)
    return whole


def fused(state: Mapping[str, torch.Tensor]) -> Whole:
    """What the rewrite makes of a state of `Apart`, by hand: parameters, buffers, and the state of optimizers."""
    planes: dict[str | None, Whole] = {}
    for name, tensor in state.items():
        parameter, key = split_state_name(name) or (name, None)
        planes.setdefault(key, {})[parameter] = tensor
    return {
        name if key is None else state_name(name, key): tensor
        for key, plane in planes.items()
        for name, tensor in _fused(plane).items()
    }


def _fused(plane: Mapping[str, torch.Tensor]) -> Whole:
    left = dict(plane)
    made: Whole = {}
    for end in ("weight", "bias"):
        q, k, v, gate, up, down = (left.pop(f"{name}.{end}") for name in ("q", "k", "v", "gate", "up", "down"))
        if q.dim():
            q, k, v = (each.unflatten(0, (2, -1)) for each in (q, k, v))
            made[f"qkv.{end}"] = torch.cat([q, k, v], 1).flatten(0, 1)
            made[f"gate_up.{end}"] = torch.cat([gate, up])
            made[f"project.{end}"] = down.T if end == "weight" else down
        else:
            made |= {f"qkv.{end}": q, f"gate_up.{end}": gate, f"project.{end}": down}
    if "embedding.weight" in left:
        made["words.weight"] = left.pop("embedding.weight")
    if "head.weight" in left:
        made["logits.weight"] = left.pop("head.weight")
    return made | left
