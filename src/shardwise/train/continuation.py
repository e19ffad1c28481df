"""A few words by the trained model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class Predictor(Protocol):
    """What an engine offers to look at a model's output."""

    def predict(
        self, inputs: Mapping[str, Any], output_of: Callable[[Mapping[str, Any]], torch.Tensor]
    ) -> torch.Tensor:
        """What `output_of` makes of the inputs by calling the model, in evaluation mode; the same on all ranks."""


def continued(
    engine: Predictor, model: nn.Module, row: Sequence[int], *, num_tokens: int, seed: int, temperature: float = 0.7
) -> list[int] | None:
    """`num_tokens` tokens drawn after `row`; None when the model gives no finite logits [1, tokens, vocabulary].

    The model sees as many tokens as `row` has, each time: of another length than those it has been trained on, every
    rank with stages would have to find out the shapes of its values anew.
    All ranks call this; they draw equal tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(row)
    for _ in range(num_tokens):
        seen = torch.tensor([tokens[-len(row) :]])
        last = engine.predict({"input_ids": seen}, lambda inputs: _next_logits(model, inputs)).float().cpu()
        if not len(last) or not bool(last.isfinite().all()):
            return None
        chances = torch.softmax(last / temperature, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokens[len(row) :]


def _next_logits(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The logits of the token after the last one; without elements where the model's output has none."""
    seen = inputs["input_ids"]
    output = model(seen)
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != seen.shape:
        return torch.empty(0)
    return logits[0, -1]
