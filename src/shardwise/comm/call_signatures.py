"""One call of one rank: its arguments checked, its signature for the peers to compare, its arithmetic in memory.

What is wrong on this rank alone (an output of the wrong size, a tensor on another device) is a `MismatchError` as
well: the call does not fit its own tensors, or its channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.channel import Channel
from shardwise.errors import MismatchError


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What the ranks of a transfer must agree on."""

    operation: str
    purpose: str
    dtypes: tuple[torch.dtype, ...] = ()
    """Of what travels; for `reduce_scatter` also of the sum."""
    counts: tuple[int, ...] = ()
    """Elements per rank of the channel; for `send` and `receive` the one number of elements."""

    def __str__(self) -> str:
        dtypes = " summed in ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.operation} for {self.purpose!r}" + (f" of {dtypes}, counts {self.counts}" if dtypes else "")


def all_gather_signature(
    channel: Channel, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None
) -> Signature:
    """The signature of an `all_gather` on `channel`; raises `MismatchError` when it does not fit its tensors."""
    filled = (input.numel(),) * channel.size if counts is None else tuple(counts)
    signature = Signature(operation="all_gather", purpose=purpose, dtypes=(input.dtype,), counts=filled)
    if output.dtype != input.dtype:
        raise MismatchError(f"{signature}: output is {output.dtype}, input {input.dtype}; give both the same dtype")
    _check_counts(channel, signature)
    _check_flat(channel, signature, "output", output, sum(filled))
    _check_flat(channel, signature, "input", input, filled[channel.rank])
    return signature


def reduce_scatter_signature(
    channel: Channel, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None
) -> Signature:
    """The signature of a `reduce_scatter` on `channel`; raises `MismatchError` when it does not fit its tensors."""
    filled = (output.numel(),) * channel.size if counts is None else tuple(counts)
    dtypes = (input.dtype, output.dtype)
    signature = Signature(operation="reduce_scatter", purpose=purpose, dtypes=dtypes, counts=filled)
    _check_counts(channel, signature)
    _check_flat(channel, signature, "output", output, filled[channel.rank])
    _check_flat(channel, signature, "input", input, sum(filled))
    return signature


def message_signature(channel: Channel, operation: str, tensor: torch.Tensor, peer: int, *, purpose: str) -> Signature:
    """The signature of a `send` to or a `receive` from `peer`; raises `MismatchError` when that is no other rank."""
    signature = Signature(operation=operation, purpose=purpose, dtypes=(tensor.dtype,), counts=(tensor.numel(),))
    if not 0 <= peer < channel.size or peer == channel.rank:
        raise MismatchError(
            f"{signature}: the peer is {peer}, but this is rank {channel.rank} of a channel of {channel.size}; "
            "name another rank of the channel"
        )
    _check_tensor(channel, signature, "the tensor", tensor)
    return signature


def member_ranks(channel: Channel, ranks: Sequence[int]) -> tuple[int, ...]:
    """`ranks` for `channel.over`, checked: distinct, of this channel, the calling rank among them."""
    asked = tuple(ranks)
    if len(set(asked)) != len(asked) or not all(0 <= rank < channel.size for rank in asked):
        raise MismatchError(f"over({asked}): name distinct ranks of the channel, 0 to {channel.size - 1}")
    if channel.rank not in asked:
        raise MismatchError(f"over({asked}) is for its members only, and this is rank {channel.rank}")
    return asked


def gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Copy all `inputs` into each of the `outputs`, one after the other; a part that is its own input stays."""
    with torch.inference_mode():
        for output in outputs:
            for part, source in zip(torch.split(output, list(counts)), inputs, strict=True):
                if part.data_ptr() != source.data_ptr():
                    part.copy_(source)


def scatter_sum(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Leave in output r part r of ((input 0 + input 1) + input 2 ...), summed in the dtype of that output."""
    with torch.inference_mode():
        parts = [torch.split(whole, list(counts)) for whole in inputs]
        for rank, output in enumerate(outputs):
            terms = [part[rank] for part in parts]
            # An output that lies in its own rank's input must not be written before that term has been added.
            in_place = output.data_ptr() == terms[rank].data_ptr()
            total = torch.empty_like(output) if in_place and rank > 0 else output
            if total.data_ptr() != terms[0].data_ptr():
                total.copy_(terms[0])
            for term in terms[1:]:
                total.add_(term.to(output.dtype))
            if total is not output:
                output.copy_(total)


def _check_counts(channel: Channel, signature: Signature) -> None:
    if len(signature.counts) != channel.size or min(signature.counts) < 0:
        raise MismatchError(f"{signature}: give one count, zero or more, for each of the {channel.size} ranks")


def _check_flat(channel: Channel, signature: Signature, label: str, tensor: torch.Tensor, num_elements: int) -> None:
    if tensor.dim() != 1 or tensor.numel() != num_elements:
        raise MismatchError(
            f"{signature}: {label} has shape {tuple(tensor.shape)}, but rank {channel.rank} of the channel "
            f"needs ({num_elements},)"
        )
    _check_tensor(channel, signature, label, tensor)


def _check_tensor(channel: Channel, signature: Signature, label: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != channel.device.type:
        raise MismatchError(f"{signature}: {label} is on {tensor.device}, but the channel on {channel.device}")
    if not tensor.is_contiguous():
        raise MismatchError(f"{signature}: {label} is not contiguous; call .contiguous() first")
