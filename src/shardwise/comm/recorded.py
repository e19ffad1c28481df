"""A channel that lists what passes through it: the calls of one rank, with their bytes.

The bytes are what any implementation must move at least. Rank 0 of 3 with counts (4, 2, 2) of float32::

    all_gather        sends its 4 elements to 2 peers: 32 bytes       receives 2 + 2 elements: 16 bytes
    reduce_scatter    sends 2 + 2 elements: 16 bytes                  receives its 4 from 2 peers: 32 bytes
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.channel import Channel, Signature, Work
from shardwise.comm.device.sums import Sums, summing, sums_of
from shardwise.comm.hosts import hosts_of
from shardwise.comm.tally import RankTally, tally_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One call of one rank, with the bytes that this rank must send and receive at least to fulfil it."""

    operation: str
    """`exchange`, `all_gather`, `reduce_scatter`, `send` or `receive`."""
    purpose: str
    """What the caller named the call."""
    dtype: torch.dtype
    """Of what travels (of the `input` of `reduce_scatter`; `uint8` for `exchange`)."""
    num_elements: int
    """Of all ranks' parts together, or of the message."""
    counts: tuple[int, ...]
    """Elements per rank of the channel (bytes for `exchange`); of the message alone for `send` and `receive`."""
    bytes_sent: int
    """By this rank, to all peers together."""
    bytes_received: int
    """By this rank, from all peers together."""
    peers: tuple[int, ...]
    """The other ranks of the call, in the channel's order, as ranks of the channel that was first wrapped."""


class Recorded:
    """A `Channel` around another one, which lists every call in `calls`; channels from `over` share the list."""

    def __init__(self, channel: Channel) -> None:
        self.calls: list[RecordedCall] = []
        """In the order of the calls; an `exchange` when it has returned."""
        self._channel = channel
        self._ranks = tuple(range(channel.size))
        self._family = {id(channel): self}  # the wrapped channel is held, so its id stays its own

    def bytes_sent(self, operation: str | None = None) -> int:
        """Total bytes that this rank sent, in all calls or in those of one operation."""
        return sum(call.bytes_sent for call in self.calls if operation in (None, call.operation))

    def bytes_received(self, operation: str | None = None) -> int:
        """Total bytes that this rank received, in all calls or in those of one operation."""
        return sum(call.bytes_received for call in self.calls if operation in (None, call.operation))

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    @property
    def rank(self) -> int:
        """This rank in the wrapped channel."""
        return self._channel.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._channel.size

    @property
    def device(self) -> torch.device:
        """Where the tensors of the wrapped channel live."""
        return self._channel.device

    @property
    def progresses_alone(self) -> bool:
        """As the wrapped channel says."""
        return self._channel.progresses_alone

    def over(self, ranks: Sequence[int]) -> "Recorded":
        """The recorded channel of these ranks; see `Channel.over`."""
        return self._around(self._channel.over(ranks), ranks)

    @property
    def sums(self) -> Sums | None:
        """As the wrapped channel says; see `device_sums`."""
        return sums_of(self._channel)

    @property
    def hosts(self) -> Sequence[str]:
        """Of the wrapped channel."""
        return hosts_of(self._channel)

    @property
    def tally(self) -> RankTally:
        """Of the wrapped channel."""
        return tally_of(self._channel)

    def summing(self, sums: Sums) -> "Recorded":
        """The recorded channel of the same ranks that adds so."""
        return self._around(summing(self._channel, sums), range(self.size))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`."""
        return self._channel.allocate(num_bytes)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`."""
        return self._channel.share(num_bytes)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """See `Channel.exchange`."""
        values = self._channel.exchange(value, purpose=purpose)
        self._record("exchange", purpose, torch.uint8, [len(each) for each in values])
        return values

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.all_gather`."""
        work = self._channel.all_gather(output, input, purpose=purpose, counts=counts)
        filled = [input.numel()] * self.size if counts is None else counts
        self._record("all_gather", purpose, input.dtype, filled)
        return work

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.reduce_scatter`."""
        work = self._channel.reduce_scatter(output, input, purpose=purpose, counts=counts)
        filled = [output.numel()] * self.size if counts is None else counts
        self._record("reduce_scatter", purpose, input.dtype, filled)
        return work

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """See `Channel.send`."""
        # Listed after the call: one that is refused has moved nothing.
        work = self._channel.send(tensor, destination, purpose=purpose)
        self._record("send", purpose, tensor.dtype, [tensor.numel()], destination)
        return work

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """See `Channel.receive`."""
        work = self._channel.receive(tensor, source, purpose=purpose)
        self._record("receive", purpose, tensor.dtype, [tensor.numel()], source)
        return work

    def abort(self, reason: str) -> None:
        """See `Channel.abort`."""
        self._channel.abort(reason)

    def close(self) -> None:
        """Close the wrapped channel; the list stays."""
        self._channel.close()

    def _around(self, inner: Channel, ranks: Sequence[int]) -> "Recorded":
        if id(inner) not in self._family:
            part = self._wrapped(inner)
            part.calls, part._family = self.calls, self._family
            part._ranks = tuple(self._ranks[rank] for rank in ranks)
            self._family[id(inner)] = part
        return self._family[id(inner)]

    def _wrapped(self, inner: Channel) -> "Recorded":
        return Recorded(inner)

    def _record(
        self, operation: str, purpose: str, dtype: torch.dtype, counts: Sequence[int], peer: int | None = None
    ) -> None:
        """peer: of a message; else the call is one of all ranks."""
        call = Signature(operation=operation, purpose=purpose, dtypes=(dtype,), counts=tuple(counts))
        tally = RankTally()
        tally.open()
        tally.count(call, self.rank)
        counted = tally.take()
        others = [rank for rank in range(self.size) if rank != self.rank] if peer is None else [peer]
        self.calls.append(
            RecordedCall(
                operation=operation,
                purpose=purpose,
                dtype=dtype,
                num_elements=sum(counts),
                counts=call.counts,
                bytes_sent=counted.sent_bytes,
                bytes_received=counted.received_bytes,
                peers=tuple(self._ranks[rank] for rank in others),
            )
        )
