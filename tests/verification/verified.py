"""A small model and its plans for tests of verification."""

from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.verification.report import VerificationReport
from tests.oracle.batches import NUM_WORDS, Batch, word_batch, word_loss

TENSOR = sw.Tensor(rules={"wide": "column", "narrow": "row", "embedding": "vocab", "head": "vocab"})


class Net(nn.Module):
    """An embedding, a cut and a whole layer, a head that may be tied."""

    def __init__(self, *, is_tied: bool = False, dropout: float = 0.0, has_statistics: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 8)
        self.wide = nn.Linear(8, 16)
        self.statistics = nn.BatchNorm1d(16) if has_statistics else None
        self.drop = nn.Dropout(dropout)
        self.narrow = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, NUM_WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        inner = torch.relu(self.wide(hidden))
        if self.statistics is not None:
            inner = self.statistics(inner.transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = self.head(self.norm(hidden + self.drop(self.narrow(inner))))
        return out


def tied() -> Net:
    return Net(is_tied=True)


def plan(k: int = 2, *, average: bool = True, stage: int = 1, bf16: bool = False, **settings: Any) -> sw.Plan:
    """A plan; the axes of its mesh are keywords."""
    axes = {axis: settings.pop(axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp") if axis in settings}
    if axes.get("tp", 1) > 1:
        settings.setdefault("tensor", TENSOR)
    if bf16:
        settings["precision"] = sw.Precision(compute="bfloat16")
    return sw.Plan(
        mesh=sw.Mesh(**axes),
        merge=sw.Merge(microbatches=k, average=average),
        sharding=sw.Sharding(stage=stage),
        **settings,
    )


def verified(asked: sw.Plan, *, make_model: Any = Net, steps: int = 1, **more: Any) -> VerificationReport:
    """The verification of a run of two rows per microbatch."""
    num_rows = 2 * asked.merge.microbatches * asked.mesh.dp_replicate * asked.mesh.dp_shard
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "loss": word_loss,
        **more,
    }
    return sw.verify(make_model, asked, batches(steps, num_rows), **arguments)


def batches(steps: int, num_rows: int) -> list[Batch]:
    return [word_batch(seed, num_rows) for seed in range(steps)]


def compared(report: VerificationReport, kind: str) -> tuple[int, int]:
    """How many tensors of a kind were compared, and how many were equal to the bit."""
    tallies = [each for step in report.steps for each in step.tallies if each.kind == kind]
    return sum(each.num_compared for each in tallies), sum(each.num_equal for each in tallies)
