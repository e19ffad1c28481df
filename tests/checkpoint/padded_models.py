"""A model whose vocabulary is padded on its way, and the layouts in which it is cut."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

import shardwise as sw
from tests.checkpoint.fused_models import model_of
from tests.engine.models import word_loss


class Model(nn.Module):
    """Embedding and head apart, and a bias: words that nobody says have no probability."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, num_words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(torch.tanh(self.up(self.embedding(words)))))
        return out


RULES = {"embedding": "vocab", "up": "column", "down": "row", "head": "vocab"}
BFLOAT16 = sw.Precision(compute="bfloat16")
LAYOUTS: Mapping[str, sw.Plan] = {
    "one": sw.Plan(),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=RULES)),
    "runs": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=3), precision=BFLOAT16),
    "tp and runs": sw.Plan(mesh=sw.Mesh(dp_shard=2, tp=2), tensor=sw.Tensor(rules=RULES), precision=BFLOAT16),
}


def engine_of(layout: str, num_words: int, channel: sw.Channel) -> sw.Engine:
    """A fresh engine, the same for every caller."""
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    model = model_of(partial(Model, num_words))
    return sw.parallelize(model, LAYOUTS[layout], optimizer=optimizer, loss=word_loss, channel=channel)
