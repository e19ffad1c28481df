"""A channel with the communication taken out: what a step would take if moving data cost nothing."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.comm import Channel, Work


class _Done:
    is_done = True

    def wait(self) -> None:
        """Nothing is in flight."""


DONE = _Done()
"""A transfer that has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """A `Channel` of `size` ranks on which this rank hears itself only.

    A reduce-scatter copies this rank's own part (no sum: adding the peers' parts counts as communication), an
    all-gather puts it in its place, an exchange gives the own value for everyone's. The numbers are wrong, the local
    work is right.
    """

    rank: int
    size: int
    progresses_alone: bool = True

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def over(self, ranks: Sequence[int]) -> Channel:
        """Fewer ranks, as silent."""
        return replace(self, rank=list(ranks).index(self.rank), size=len(ranks))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """None: there are no others."""
        return None

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """Return the own value `size` times."""
        return [value] * self.size

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """Write the own part; leave the others as they are."""
        own = self._own(output, counts)
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        return DONE

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """Copy the own part."""
        own = self._own(input, counts)
        if own.data_ptr() != output.data_ptr():
            output.copy_(own)
        return DONE

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """Send nothing."""
        return DONE

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """Leave the tensor as it is."""
        return DONE

    def abort(self, reason: str) -> None:
        """Nobody listens."""

    def close(self) -> None:
        """Nothing is held."""

    def _own(self, whole: torch.Tensor, counts: Sequence[int] | None) -> torch.Tensor:
        if counts is None:
            counts = [whole.numel() // self.size] * self.size
        return whole[_span(self.rank, tuple(counts))]


@functools.cache
def _span(rank: int, counts: tuple[int, ...]) -> slice:
    # Once: to know where a part is belongs to the communication that is taken out.
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])
