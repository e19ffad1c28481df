"""A world of one rank: every collective is a copy at most, and there is nobody to send to."""

from collections.abc import Sequence

import torch

from shardwise.comm.call_signatures import (
    all_gather_signature,
    gather,
    member_ranks,
    message_signature,
    reduce_scatter_signature,
    scatter_sum,
)
from shardwise.comm.channel import Channel, Work


def alone(device: torch.device | str = "cpu") -> Channel:
    """The channel of a world of one rank, whose tensors live on `device`."""
    return _Alone(torch.device(device))


class _FinishedWork:
    def wait(self) -> None:
        """Everything was done in the call."""


class _Alone:
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
        return _FinishedWork()

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        signature = reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts)
        scatter_sum([output], [input], signature.counts)
        return _FinishedWork()

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
