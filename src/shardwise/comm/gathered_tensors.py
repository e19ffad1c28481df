"""A tensor of every rank, of any shape, on every rank."""

import json

import torch

from shardwise.comm.agreement import a_list, understood
from shardwise.comm.channel import Channel


def gathered(channel: Channel, tensor: torch.Tensor, *, purpose: str) -> list[torch.Tensor]:
    """The tensors that the ranks give, in rank order, without graphs. All have one dtype; their shapes may differ."""
    mine = tensor.detach().to(channel.device).contiguous()
    said = channel.exchange(json.dumps(mine.shape).encode(), purpose=f"shapes of {purpose}")
    shapes = [torch.Size(shape) for shape in understood(said, a_list, purpose=f"shapes of {purpose}")]
    counts = [shape.numel() for shape in shapes]
    output = mine.new_empty(sum(counts))
    channel.all_gather(output, mine.reshape(-1), purpose=purpose, counts=counts).wait()
    return [part.reshape(shape) for part, shape in zip(output.split(counts), shapes, strict=True)]
