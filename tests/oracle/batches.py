"""Batches of programs, and how data ranks and microbatches share the rows of one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.plan import split_rows

Batch = Mapping[str, Any]

NUM_WORDS = 11


def has_rows(value: Any) -> bool:
    """Whether a value of a batch is cut: dense tensors with a dim, and lists."""
    if isinstance(value, torch.Tensor):
        return not value.is_nested and value.layout == torch.strided and value.ndim > 0
    return isinstance(value, list | tuple)


def num_rows(batch: Batch) -> int:
    """The rows of a batch, which its first value with rows tells."""
    return next(len(value) for value in batch.values() if has_rows(value))


def rows_of(batch: Batch, rows: range) -> dict[str, Any]:
    """Some rows of a batch; what has none goes along."""
    return {name: value[rows.start : rows.stop] if has_rows(value) else value for name, value in batch.items()}


def parts_of(batch: Batch, k: int) -> list[dict[str, Any]]:
    """The batch in k parts of consecutive rows, as equal as can be."""
    return [rows_of(batch, rows) for rows in split_rows(num_rows(batch), k)]


def share_of(batch: Batch, rank: int, num_ranks: int) -> dict[str, Any]:
    """The share of one data rank, in memory of its own: kernels round by the alignment of what they read."""
    share = parts_of(batch, num_ranks)[rank]
    own = {id(batch[name]): value.clone() for name, value in share.items() if isinstance(value, torch.Tensor)}
    return {name: own.get(id(batch[name]), value) for name, value in share.items()}


def microbatches_of(batch: Batch, num_ranks: int, k: int) -> list[list[dict[str, Any]]]:
    """For each data rank its k microbatches."""
    return [parts_of(share_of(batch, rank, num_ranks), k) for rank in range(num_ranks)]


def factors_of(weights: Sequence[float]) -> list[float]:
    """What makes the plain mean of losses their weighted mean; exactly 1 where all weigh the same."""
    mean = math.fsum(weights) / len(weights)
    return [1.0 if len(set(weights)) == 1 else weight / mean for weight in weights]


def count_rows(batch: Batch) -> float:
    """The weight of a microbatch without `loss_weight`."""
    return float(num_rows(batch))


def points(seed: int, rows: int, width: int = 4) -> dict[str, torch.Tensor]:
    """[rows, width] points and [rows, 1] values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, width, generator=generator),
        "y": torch.randn(rows, 1, generator=generator),
    }


def word_batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """[rows, 5] words and targets."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "words": torch.randint(0, NUM_WORDS, (rows, 5), generator=generator),
        "targets": torch.randint(0, NUM_WORDS, (rows, 5), generator=generator),
    }


def square_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean squared error."""
    loss: torch.Tensor = (output - batch["y"]).square().mean()
    return loss


def word_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over all positions, taken in float32 at least."""
    logits = output.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-100)
