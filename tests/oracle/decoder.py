"""A tiny decoder for every axis at once."""

import torch
from torch import nn
from torch.nn import functional

from tests.oracle.batches import NUM_WORDS, word_batch, word_loss
from tests.oracle.program import Program

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


DECODER = Program(
    make=decoder,
    batches=[word_batch(seed, 12) for seed in range(2)],
    stages=STAGES,
    rules=RULES,
    loss=word_loss,
    keep=("*norm*",),
    noise=(".k.bias", ".k.bias/exp_avg", ".k.bias/exp_avg_sq"),
)
