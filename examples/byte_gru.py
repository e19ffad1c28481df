"""A model of one's own for `shardwise train`: any torch module, and a loss f(output, batch)."""

from collections.abc import Mapping

import torch
from torch import nn


class ByteGru(nn.Module):
    """Predicts the next byte from all bytes before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Tokens [rows, length] -> logits [rows, length, 256]."""
        states, _ = self.gru(self.embedding(input_ids))
        logits: torch.Tensor = self.head(states)
        return logits


def next_byte(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of every byte but the first, in nats."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
