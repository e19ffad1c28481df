"""Channels that differ from those of simulated ranks in one respect."""

from collections.abc import Sequence
from typing import ClassVar

import torch

import shardwise as sw
from shardwise.comm import Work


class GoesOnAlone:
    """A channel whose transfers are said to go on while the rank computes: reductions then start within backward."""

    progresses_alone = True

    def __init__(self, channel: sw.Channel) -> None:
        self._channel = channel
        self.rank, self.size, self.device = channel.rank, channel.size, channel.device

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return GoesOnAlone(self._channel.over(ranks))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._channel.allocate(num_bytes)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        return self._channel.share(num_bytes)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        return self._channel.exchange(value, purpose=purpose)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        return self._channel.all_gather(output, input, purpose=purpose, counts=counts)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        return self._channel.reduce_scatter(output, input, purpose=purpose, counts=counts)

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        return self._channel.send(tensor, destination, purpose=purpose)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        return self._channel.receive(tensor, source, purpose=purpose)

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()


class SharesMemory(GoesOnAlone):
    """A channel of simulated ranks that share memory, as CPU ranks of one host do."""

    progresses_alone = False
    _memories: ClassVar[dict[int, torch.Tensor]] = {}
    """Until all ranks have seen it."""

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return SharesMemory(self._channel.over(ranks))

    def share(self, num_bytes: int) -> Sequence[torch.Tensor]:
        own = torch.zeros(num_bytes, dtype=torch.uint8)
        self._memories[id(own)] = own
        shared = [self._memories[int(each)] for each in self.exchange(b"%d" % id(own), purpose="shared memory")]
        self.exchange(b"", purpose="sight of shared memory")
        del self._memories[id(own)]
        return shared
