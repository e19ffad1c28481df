"""Lists of microbatches of words, none of one shape, and the loop that accumulates over such."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.oracle.batches import NUM_WORDS, factors_of
from tests.oracle.one_process import Trained
from tests.oracle.program import adamw

Words = dict[str, torch.Tensor]

SHAPES = [(3, 5), (1, 7), (2, 2), (4, 3), (2, 6), (1, 1)]
"""Of the microbatches of a step: rows and length."""


def words(seed: int, rows: int, length: int) -> Words:
    """Rows of words, and the word that follows each."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(NUM_WORDS, (rows, length + 1), generator=generator)
    return {"words": drawn[:, :-1], "labels": drawn[:, 1:]}


def word_loss(output: torch.Tensor, batch: Words) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
    return loss


def count_words(batch: Words) -> int:
    return batch["labels"].numel()


def given(step: int, rank: int, num_ranks: int) -> list[Words]:
    """The microbatches of a data rank, all of one number and none of one shape."""
    count = len(SHAPES) // num_ranks
    shapes = SHAPES[step:] + SHAPES[:step]
    return [words(100 * step + at, *shapes[at]) for at in range(rank * count, (rank + 1) * count)]


def accumulated(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    *,
    weigh: Callable[[Any], float],
    loss: Callable[[Any, Any], torch.Tensor] = word_loss,
) -> Trained:
    """The loop that everybody writes."""
    optimizer, trained = adamw([each for each in model.parameters() if each.requires_grad]), Trained()
    for parts in steps:
        optimizer.zero_grad()
        weights, values = [weigh(part) for part in parts], []
        for part, weight, factor in zip(parts, weights, factors_of(weights), strict=True):
            if weight:
                value = loss(model(next(iter(part.values()))), part)
                (value if factor == 1.0 else value * factor).backward()
                values.append(weight * value.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(parts)
        trained.grad_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        trained.losses.append(math.fsum(values) / math.fsum(weights))
    trained.parameters = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}
    return trained
