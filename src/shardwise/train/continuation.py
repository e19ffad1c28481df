"""A few words by the trained model."""

from collections.abc import Sequence

import torch
from torch import nn


def continued(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    context: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.7,
) -> list[int] | None:
    """`num_tokens` tokens drawn after `prompt`; None when the model gives no finite logits [1, tokens, vocabulary].

    The model sees the last `context` tokens: what it has been trained on.
    Runs the model's plain forward, on every rank alike: ranks with equal parameters draw equal tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(num_tokens):
                seen = torch.tensor([tokens[-context:]], device=device)
                output = model(seen)
                logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
                if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != seen.shape:
                    return None
                last = logits[0, -1].float().cpu()
                if not bool(last.isfinite().all()):
                    return None
                chances = torch.softmax(last / temperature, dim=-1)
                tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    finally:
        model.train(was_training)
    return tokens[len(prompt) :]
