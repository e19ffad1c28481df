"""The one protocol through which ranks talk, what its calls must agree on, and the simplest channel: a world of one.

`Channel` is implemented by `simulated` (threads), `processes` (CPU), `device_channel` (GPU), `recorded` (a list around
another channel) and `alone`, here. All of them check their arguments with the same functions and compare the same
`Signature`. So a program that is wrong on one channel is wrong on all. The two sums in memory, `gather` and
`scatter_sum`, are the reference of what the others compute::

    all_gather       rank 0 gives a, rank 1 gives b        output of both: a b
    reduce_scatter   rank 0 gives a0 a1, rank 1 b0 b1      output 0: a0 + b0        output 1: a1 + b1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from shardwise.errors import MismatchError


# `wait` is not a formality: until it returns, a peer may still read the input in shared memory, or a kernel on the GPU.
class Work(Protocol):
    """A transfer in flight. Its tensors belong to the channel until `wait` returns."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once. Asking moves nothing."""

    def wait(self) -> None:
        """Return when the transfer is complete; raise `PeerError` when a peer is lost or the deadline passes."""


@runtime_checkable
class Channel(Protocol):
    """Collectives and point-to-point calls among `size` ranks.

    Every rank of the channel makes the same collective calls in the same order. Each call names its `purpose`
    ("gradients bucket 3"), which appears in errors and must be equal on all ranks. Calls return a `Work`;
    `call(...).wait()` is the blocking form. Several transfers may be in flight; waits may come in any order. The
    metadata of a transfer (operation, purpose, dtype, counts) is compared between the ranks, once per signature at
    least: a difference raises `MismatchError` on every rank.

    Tensors are contiguous and on `device`. They are flat (1-D) for collectives and of any shape for send and receive.
    Ranks in all arguments are ranks of this channel; ranks in errors are ranks of the world.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of this channel live."""

    @property
    def progresses_alone(self) -> bool:
        """Whether a transfer goes on while this rank computes, so that starting early pays.

        Such a channel carries out its collectives in the order of the calls, so that one may write what an earlier
        one reads.
        """

    def over(self, ranks: Sequence[int]) -> "Channel":
        """The channel of these ranks, numbered in this order. Called by its members only, in the same order by each."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes (uint8) on `device`, in the memory from which this channel moves tensors fastest."""

    def share(self, num_bytes: int) -> "Sequence[torch.Tensor] | None":
        """Zeroed bytes on the CPU for each rank, which all ranks read and write in place, in rank order.

        None where not all ranks of the channel share one host's memory. A collective call: every rank gives the same
        number. The ranks order their writes and reads with `exchange`.
        """

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """Give every rank's value (of any length) to every rank, in rank order. Blocking; for small things."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """Fill `output` with every rank's `input` in rank order.

        `counts[r]` is the number of elements that rank r gives (default: all the same); `output` has `sum(counts)`
        elements, `input` has `counts[rank]` and may be its part of `output`.
        """

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """Sum the ranks' `input`s and leave in `output` this rank's part of the sum.

        `input` has `sum(counts)` elements and travels in its own dtype. The sum is taken in the dtype of `output`
        (`counts[rank]` elements), in rank order ((r0 + r1) + r2 ...), unless a channel between devices was asked to
        leave it to their library (`device_sums`).
        `output` may be this rank's part of `input` when the dtypes are equal; otherwise they do not overlap.
        """

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """Send to one rank; matched there by the next `receive` from here. Two ranks may both send first.

        Messages on the CPU travel whatever the channel's device is, and are matched apart from those on the device.
        """

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """Receive from one rank, in the order in which it sent."""

    def abort(self, reason: str) -> None:
        """Tell every peer that this rank stops, and why: their pending and later calls raise `PeerError` with it."""

    def close(self) -> None:
        """Give back what the channel holds. Pending transfers must have been waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What the ranks of a transfer must agree on."""

    # Why calls are compared at all: transports do not. Gloo, tried, gives garbage where dtypes differ, leaves the rest
    # of a longer receive buffer as it was, and ends the whole process where sizes differ. None of these names a rank.

    operation: str
    purpose: str
    dtypes: tuple[torch.dtype, ...] = ()
    """Of what travels; for `reduce_scatter` also of the sum."""
    counts: tuple[int, ...] = ()
    """Elements per rank of the channel; for `send` and `receive` the one number of elements."""

    @property
    def compared(self) -> tuple[object, ...]:
        """What is equal on all ranks of the transfer: a `send` and the `receive` that takes it are one message."""
        operation = "message" if self.operation in ("send", "receive") else self.operation
        return (operation, self.purpose, self.dtypes, self.counts)

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
            f"{signature}: the peer is {peer}, but this is rank {channel.rank} of a channel of {channel.size}; name "
            "another of its ranks"
        )
    _check_tensor(channel, signature, "the tensor", tensor)
    return signature


def member_ranks(channel: Channel, ranks: Sequence[int]) -> tuple[int, ...]:
    """`ranks` for `channel.over`, checked: distinct, of this channel, the calling rank among them."""
    # The order counts: it numbers the ranks of the new channel, and is part of the name of its lanes.
    asked = tuple(ranks)
    if len(set(asked)) != len(asked) or not all(0 <= rank < channel.size for rank in asked):
        raise MismatchError(f"over({asked}): name distinct ranks of the channel, 0 to {channel.size - 1}")
    if channel.rank not in asked:
        raise MismatchError(f"over({asked}) is for its members only, and this is rank {channel.rank}")
    return asked


def gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Copy all `inputs` into each of the `outputs`, one after the other; a part that is its own input stays."""
    # Values move, not graphs: the other channels detach their tensors.
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
            sum_in_order(output, [part[rank] for part in parts])


def sum_in_order(output: torch.Tensor, terms: Sequence[torch.Tensor], *, scratch: torch.Tensor | None = None) -> None:
    """Leave in `output` ((term 0 + term 1) + term 2) ..., summed in its dtype; it may be one of the terms itself.

    scratch: memory for the sum where it is, in its dtype: the first term, if that may be overwritten.
    """
    # The order is part of the promise: floating-point sums depend on it. In rank order a sum is the same on every run,
    # on every transport, and for every way to cut the elements over owners.
    with torch.inference_mode():
        # An output that is a later term must not be written before that term has been added.
        in_place = any(output.data_ptr() == term.data_ptr() for term in terms[1:])
        total = output
        if in_place:
            total = torch.empty_like(output) if scratch is None else scratch
        if total.data_ptr() != terms[0].data_ptr():
            total.copy_(terms[0])
        for term in terms[1:]:
            # Each term is widened as it is added: bfloat16 gradients travel as they are and are summed in float32,
            # where they would lose bits with every addition in their own dtype. Wider ones are rounded first.
            is_wider = torch.promote_types(term.dtype, output.dtype) != output.dtype
            total.add_(term.to(output.dtype) if is_wider else term)
        if total is not output:
            output.copy_(total)


# The checks look at the arguments of this rank alone and send nothing. Where they raise, the peers learn of it when
# this rank aborts the channel or ends.
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
    # Transports see flat bytes. Those of a strided tensor would be a copy, and what is received into it would be lost.
    if tensor.device.type != channel.device.type:
        raise MismatchError(f"{signature}: {label} is on {tensor.device}, but the channel on {channel.device}")
    if not tensor.is_contiguous():
        raise MismatchError(f"{signature}: {label} is not contiguous; call .contiguous() first")


def alone(device: torch.device | str = "cpu") -> Channel:
    """The channel of a world of one rank, whose tensors live on `device`."""
    return _Alone(torch.device(device))


class _FinishedWork:
    is_done = True

    def wait(self) -> None:
        """Everything was done in the call."""


FINISHED: Work = _FinishedWork()
"""Of a call that leaves nothing to wait for."""


class _Alone:
    # Calls are checked as on any channel: an argument that is wrong must not wait for a second rank to be found.
    rank = 0
    size = 1
    progresses_alone = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def over(self, ranks: Sequence[int]) -> Channel:
        member_ranks(self, ranks)
        return self

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`."""
        return [torch.zeros(num_bytes, dtype=torch.uint8)]

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        return [value]

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        signature = all_gather_signature(self, output, input, purpose=purpose, counts=counts)
        gather([output], [input], signature.counts)
        return FINISHED

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        signature = reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts)
        scatter_sum([output], [input], signature.counts)
        return FINISHED

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        message_signature(self, "send", tensor, destination, purpose=purpose)
        raise AssertionError("a world of one has no peer that passes the check")

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        message_signature(self, "receive", tensor, source, purpose=purpose)
        raise AssertionError("a world of one has no peer that passes the check")

    def abort(self, reason: str) -> None:
        """There is no peer to tell."""

    def close(self) -> None:
        """Nothing is held."""
