"""The one protocol through which ranks talk. Implementations: `processes`, `simulated`, `alone`, `recorded`."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


class Work(Protocol):
    """A transfer in flight. Its tensors belong to the channel until `wait` returns."""

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
        """Zeroed bytes (uint8) on `device`, in the memory out of which this channel moves tensors fastest."""

    def share(self, num_bytes: int) -> "Sequence[torch.Tensor] | None":
        """Zeroed bytes on the CPU for each rank, which all ranks read where they lie, in rank order; this rank's are
        its own to write.

        None where not all ranks of the channel share one host's memory. A collective call: every rank gives the same
        number. Whoever writes and reads orders that with `exchange`.
        """

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """Give every rank's value (of any length) to every rank, in rank order. Blocking; for small things."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """Fill `output` with every rank's `input` in rank order.

        `counts[r]` is the number of elements that rank r gives (default: all the same); `output` has `sum(counts)`
        elements, `input` has `counts[rank]` and may be that very part of `output`.
        """

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """Sum the ranks' `input`s and leave in `output` this rank's part of the sum.

        `input` has `sum(counts)` elements and travels in its own dtype; the sum is taken in the dtype of `output`
        (`counts[rank]` elements), in rank order ((r0 + r1) + r2 ...) except over NCCL, whose order is its own.
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
