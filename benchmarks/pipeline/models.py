"""What is trained: plain blocks, blocks that sleep for a known time, and a Llama from transformers, unmodified.

The first two are lists of pieces. We get them as one model that calls them one after the other; the peer gets them cut
by hand. Both therefore run the same modules.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

__all__ = ["ADAMW", "Batch", "Kind", "Net", "Shape", "batches", "llama", "loss_of", "net", "pieces", "stages"]

Kind = Literal["computing", "sleeping", "llama"]
Batch = dict[str, torch.Tensor]

VOCABULARY = 512
"""Small: embedding and head are to make the first and the last stage hardly longer than the others."""
HEAD_WIDTH = 64
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How much is computed."""

    num_layers: int
    width: int
    num_tokens: int
    """Of one microbatch, which is one sequence."""
    forward_s: float = 0.0
    """Sleep of one layer; a backward sleeps twice as long."""

    @property
    def backward_s(self) -> float:
        """Sleep of one layer's backward."""
        return 2 * self.forward_s


class Block(nn.Module):
    """A transformer block, as anybody would write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads = max(1, width // HEAD_WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(sequences, tokens, width) -> the same."""
        split = self.qkv(self.attention_norm(values)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = values + self.down(functional.gelu(self.up(self.mlp_norm(values))))
        return out


class Head(nn.Module):
    """Logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(sequences, tokens, width) -> (sequences, tokens, words)."""
        out: torch.Tensor = self.linear(self.norm(values))
        return out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """Takes a known time and no core: ranks beyond the number of cores do not disturb each other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape.width))
        self.forward_s, self.backward_s = shape.forward_s, shape.backward_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same."""
        slept: torch.Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            values * self.scale, self.forward_s, self.backward_s
        )
        return slept


def pieces(kind: Kind, shape: Shape) -> list[nn.Module]:
    """The model in the order in which it is run; the same values on every rank and for every side."""
    torch.manual_seed(0)
    if kind == "sleeping":
        return [Sleeper(shape) for _ in range(shape.num_layers)]
    blocks = [Block(shape.width) for _ in range(shape.num_layers)]
    return [nn.Embedding(VOCABULARY, shape.width), *blocks, Head(shape.width)]


def stages(kind: Kind, shape: Shape, num_stages: int) -> list[int]:
    """The stage of each piece: as many layers on each; the embedding on the first, the head on the last."""
    of_layers = [layer * num_stages // shape.num_layers for layer in range(shape.num_layers)]
    return of_layers if kind == "sleeping" else [0, *of_layers, num_stages - 1]


class Net(nn.Module):
    """All pieces as one model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(parts)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for piece in self.pieces:
            values = piece(values)
        return values


def net(kind: Kind, shape: Shape, num_stages: int) -> tuple[nn.Module, dict[str, int]]:
    """The model for us, and where its modules lie."""
    if kind == "llama":
        return llama(shape), _stages_of_llama(shape, num_stages)
    places = stages(kind, shape, num_stages)
    return Net(pieces(kind, shape)), {f"pieces.{at}": stage for at, stage in enumerate(places)}


def llama(shape: Shape) -> nn.Module:
    """A Llama in float32; the same values on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        intermediate_size=8 * shape.width // 3,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=max(1, shape.width // HEAD_WIDTH),
        num_key_value_heads=max(1, shape.width // HEAD_WIDTH),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def _stages_of_llama(shape: Shape, num_stages: int) -> dict[str, int]:
    layers = {f"model.layers.{at}": at * num_stages // shape.num_layers for at in range(shape.num_layers)}
    return {"model.embed_tokens": 0, **layers, "model.norm": num_stages - 1, "lm_head": num_stages - 1}


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of words where there are words, else the mean square error."""
    if target.is_floating_point():
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(kind: Kind, shape: Shape, num_microbatches: int, count: int) -> list[Batch]:
    """The same on every rank; a row is a microbatch."""
    generator = torch.Generator().manual_seed(1)
    size = (num_microbatches, shape.num_tokens)
    drawn: list[Batch] = []
    for _ in range(count):
        if kind == "sleeping":
            values = torch.randn(*size, shape.width, generator=generator)
            drawn.append({"values": values, "target": values.flip(-1)})
            continue
        words = torch.randint(0, VOCABULARY, size, generator=generator)
        drawn.append(
            {"input_ids": words, "labels": words.clone()} if kind == "llama" else {"values": words, "target": words}
        )
    return drawn
