"""Gradients of parameters that are whole on all ranks along `tp`, but see other activations on each."""

from collections.abc import Sequence
from itertools import groupby

import torch

from shardwise.comm import Channel
from shardwise.engine.tensor.movements import Movements


@torch.no_grad()
def sum_over_ranks(gradients: Sequence[torch.Tensor], channel: Channel) -> None:
    """Replace each gradient by its sum over the ranks of `channel`, which all give the same ones in the same order."""
    if channel.size == 1 or not gradients:
        return
    movements = Movements(channel, "gradients of parameters that are whole along tp")
    for _, group in groupby(gradients, key=lambda gradient: gradient.dtype):
        alike = list(group)
        lengths = [gradient.numel() for gradient in alike]
        flat = torch.cat([gradient.reshape(-1) for gradient in alike])
        for gradient, total in zip(alike, movements.sum_of(flat).split(lengths), strict=True):
            gradient.copy_(total.view(gradient.shape))
