"""How channels between devices add: the ranks in their order, or the library that moves the tensors.

A library such as NCCL adds in the dtype that travels, in another order. bfloat16 gradients would be rounded at every
addition, or travel as float32 with twice the bytes. `exact` moves parts, and adds here. Rank 1 of 3::

    input      | part 0 | part 1 | part 2 |   bfloat16, sent as it is: part 0 to rank 0, part 2 to rank 2
    received   | part 1 of rank 0 | part 1 of rank 2 |                  bfloat16, in memory that is kept (`PartsMemory`)
    output     (part 1 of rank 0 + own part 1) + part 1 of rank 2       float32

These are the bits that CPU channels give, and as many bytes are sent as by `backend`. An update on n ranks takes n
small kernels per bucket where the library takes none. Between hosts each pair of ranks has its own messages, where a
library may build rings or trees.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from shardwise.comm.channel import Channel, Signature, sum_in_order
from shardwise.comm.communicators import Communicator
from shardwise.comm.messages import as_bytes
from shardwise.comm.torch_private import reduce_scatter_equal

Sums = Literal["exact", "backend"]


@runtime_checkable
class SumsOnDevice(Protocol):
    """What a channel between devices can besides."""

    @property
    def sums(self) -> Sums | None:
        """How it adds; None where it adds what it receives at once, and holds nothing."""

    def summing(self, sums: Sums) -> Channel:
        """The channel of the same ranks that adds so."""


def summing(channel: Channel, sums: Sums) -> Channel:
    """The channel of the same ranks that adds so; `channel` itself where the ranks have no choice, as on the CPU."""
    return channel.summing(sums) if isinstance(channel, SumsOnDevice) else channel


def sums_of(channel: Channel) -> Sums | None:
    """How a channel adds; None for one that adds what it receives at once, as on the CPU."""
    return channel.sums if isinstance(channel, SumsOnDevice) else None


class PartsMemory:
    """Memory for what sums receive, kept from one to the next: steps that repeat allocate nothing."""

    # Safe without a wait: the next transfer into it begins behind the stream that has added the last one.

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """So many bytes, or more."""
        fitting = [at for at, each in enumerate(self._free) if each.numel() >= num_bytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda at: self._free[at].numel()))
        # In place of the largest of those that are too small: there are never more than were in use at one time.
        if self._free:
            del self._free[max(range(len(self._free)), key=lambda at: self._free[at].numel())]
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give(self, memory: torch.Tensor) -> None:
        """Take it back."""
        self._free.append(memory)


class ExactSum:
    """The sum of one `reduce_scatter`: parts travel as they are, and are added here in the order of ranks."""

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, signature: Signature, rank: int, memory: PartsMemory
    ) -> None:
        self._output = output.detach()
        self._rank = rank
        self._memory = memory
        own = output.numel()
        counts = [own if peer != rank else 0 for peer in range(len(signature.counts))]
        num_bytes = sum(counts) * input.element_size()
        self._taken = memory.take(num_bytes, input.device)
        self.given = input.detach().split(list(signature.counts))
        """For each rank its part."""
        self.received = self._taken[:num_bytes].view(input.dtype).split(counts)
        """From each other rank this rank's part."""

    def begin(self, communicator: Communicator) -> dist.Work:
        """Give each rank its part, and take theirs of this rank's."""
        # As bytes: libraries do not know all dtypes. What a rank gives itself is empty, and not copied.
        nothing = self.received[self._rank]
        given = [part if peer != self._rank else nothing for peer, part in enumerate(self.given)]
        return communicator.alltoall([as_bytes(each) for each in self.received], [as_bytes(each) for each in given])

    def finish(self) -> None:
        """Add, on the current stream, when all parts have come."""
        terms = [part if peer != self._rank else self.given[peer] for peer, part in enumerate(self.received)]
        # Where the output is this rank's own term, the sum of those before it grows in the first of them.
        sum_in_order(self._output, terms, scratch=terms[0])
        self._memory.give(self._taken)


class BackendSum:
    """The sum of one `reduce_scatter` by the library, in the dtype that travels."""

    def __init__(self, output: torch.Tensor, input: torch.Tensor, signature: Signature, memory: PartsMemory) -> None:
        self._output = self.total = output.detach()
        self._input = input.detach()
        self._counts = signature.counts
        self._memory = memory
        self._taken: torch.Tensor | None = None
        if output.dtype != input.dtype:
            num_bytes = output.numel() * input.element_size()
            self._taken = memory.take(num_bytes, input.device)
            self.total = self._taken[:num_bytes].view(input.dtype)

    def begin(self, communicator: Communicator) -> dist.Work:
        """Let the library add."""
        total, terms = _as_real(self.total), _as_real(self._input)
        if len(set(self._counts)) == 1:
            return reduce_scatter_equal(communicator, total, terms)
        per_element = 2 if self._input.is_complex() else 1
        parts = torch.split(terms, [count * per_element for count in self._counts])
        return communicator.reduce_scatter([total], [list(parts)])

    def finish(self) -> None:
        """Widen the sum."""
        if self._taken is not None:
            self._output.copy_(self.total)
            self._memory.give(self._taken)


def hand_over_parts(sums: Sequence[ExactSum]) -> None:
    """Between simulated ranks: what `ExactSum.begin` has a library do, for all ranks."""
    for rank, each in enumerate(sums):
        for peer, other in enumerate(sums):
            if peer != rank:
                each.received[peer].copy_(other.given[rank])


def _as_real(flat: torch.Tensor) -> torch.Tensor:
    """The same memory without complex numbers, which NCCL does not add; a sum of both parts is the same."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
