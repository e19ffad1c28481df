"""What every side trains: one transformers Llama from one seed, on the same microbatches, with the same optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 2048
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
"""Every side's optimizer. On a CPU torch's fused AdamW takes a third of the others' time, so all sides have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The tokens of one microbatch on one rank."""

    num_sequences: int
    num_tokens: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read `2x128`; raise `ValueError` for anything else."""
        num_sequences, num_tokens = text.split("x")
        return cls(num_sequences=int(num_sequences), num_tokens=int(num_tokens))

    def __str__(self) -> str:
        return f"{self.num_sequences}x{self.num_tokens}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's share of one update, cut into microbatches and whole (some libraries take the one, some the other)."""

    whole: dict[str, torch.Tensor]
    microbatches: list[dict[str, torch.Tensor]]


def llama(
    *, num_heads: int = 6, num_layers: int = 8, width: int = 384, vocabulary: int = VOCABULARY, num_positions: int = 512
) -> nn.Module:
    """Build a Llama in float32, by default with 8 layers of 15.7 M parameters; the same values on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64 or 64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=num_positions,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def batches(shape: Shape, num_microbatches: int, *, rank: int, count: int) -> list[Batch]:
    """Draw `count` batches of random tokens, the same for every side and different on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    drawn = []
    for _ in range(count):
        size = (num_microbatches * shape.num_sequences, shape.num_tokens)
        tokens = torch.randint(0, VOCABULARY, size, generator=generator)
        cuts = tokens.split(shape.num_sequences)
        drawn.append(
            Batch(
                whole={"input_ids": tokens, "labels": tokens.clone()},
                microbatches=[{"input_ids": cut.clone(), "labels": cut.clone()} for cut in cuts],
            )
        )
    return drawn


Step = Callable[[Batch], float]
"""One update on one batch; returns the mean loss of its microbatches (this rank's, or all ranks')."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A side made ready."""

    step: Step
    predicted_bytes: int | None = None
    """What the side says it holds between two steps, where it says so."""
    passes_s: Callable[[], float] | None = None
    """Seconds of all its forwards and backwards so far, where it clocks them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to train the workload."""

    name: str
    about: str
    """Settings, for the notes under the table."""
    prepare: Callable[[nn.Module, int], Training]
    """From a fresh model and the number of microbatches to a training."""
    trains_fully: bool = True
    """False where the ranks do not really exchange anything, so that losses need not equal the other sides'."""
    tolerance: float = 0.005
    """How far its last loss may be from the other sides', as a part of it."""
