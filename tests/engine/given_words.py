"""Batches that are no dicts, lists of microbatches of words of all shapes, and the loop that accumulates over such."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.oracle.batches import NUM_WORDS, factors_of
from tests.oracle.one_process import Trained
from tests.oracle.program import adamw


class Sides(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    x: Any
    more: Any = None


Words = dict[str, torch.Tensor]


def words(seed: int, rows: int, length: int) -> Words:
    """Rows of words, and the word that follows each."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(NUM_WORDS, (rows, length + 1), generator=generator)
    return {"words": drawn[:, :-1], "labels": drawn[:, 1:]}


def word_loss(output: torch.Tensor, batch: Words) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
    return loss


def entries(output: torch.Tensor, batch: Words) -> dict[str, Any]:
    """A loss, and a tensor with a graph, one without, one of no stage, and a number."""
    return {
        "loss": word_loss(output, batch),
        "square": output.square().mean().reshape(1),
        "right": (output.argmax(-1) == batch["labels"]).float().mean().detach(),
        "first": batch["labels"][0, 0],
        "length": batch["labels"].shape[1],
    }


def word_metrics() -> dict[str, Any]:
    """One of torchmetrics, and a mean over rows."""
    from torchmetrics import classification

    def words(output: torch.Tensor, batch: Words) -> tuple[torch.Tensor, torch.Tensor]:
        # Of scores that are equal but for rounding, a rank along tp may take another one for the larger.
        return output.flatten(0, 1).float().round(decimals=4), batch["labels"].flatten()

    return {
        "f1": (classification.MulticlassF1Score(NUM_WORDS), words),
        "right": lambda output, batch: (output.argmax(-1) == batch["labels"]).double().mean(1),
    }


def count_words(batch: Words) -> int:
    return batch["labels"].numel()


def accumulated(model: nn.Module, steps: Sequence[Sequence[Words]], *, weigh: Callable[[Words], float]) -> Trained:
    """The loop that everybody writes. As losses all that `entries` gives, by names."""
    optimizer, trained = adamw(list(model.parameters())), Trained()
    for parts in steps:
        optimizer.zero_grad()
        weights, found = [weigh(part) for part in parts], []
        for part, factor in zip(parts, factors_of(weights), strict=True):
            found.append(entries(model(part["words"]), part))
            (found[-1]["loss"] * factor).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(parts)
        trained.grad_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        for name in sorted(found[0]):
            values = [torch.as_tensor(each[name]).detach().item() for each in found]
            trained.losses.append(math.fsum(map(math.prod, zip(weights, values, strict=True))) / math.fsum(weights))
    trained.parameters = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}
    return trained


def measured(model: nn.Module, parts: Sequence[Words]) -> dict[str, float]:
    """The metrics of a plain program: torchmetrics, and the mean over rows."""
    metrics, means = word_metrics(), list[float]()
    for part in parts:
        with torch.no_grad():
            output = model(part["words"])
        metric, inputs = metrics["f1"]
        metric.update(*inputs(output, part))
        means += metrics["right"](output, part).tolist()
    return {"f1": metrics["f1"][0].compute().item(), "right": math.fsum(means) / len(means)}
