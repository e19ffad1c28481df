"""The channel of some processes for tensors on the CPU: shared memory on one host, gloo between hosts.

Here calls become messages; a `Switchboard` moves them. A collective of n ranks is n (n - 1) messages, each straight to
its reader. An all-gather gives the same bytes to all. A reduce-scatter gives each rank its own part, and the reader
adds. So a rank sends and receives as many bytes as in a ring, in one step instead of n - 1, and the sum has an order::

    reduce_scatter    input of rank 0:  [ part 0 | part 1 | part 2 ]
                                                     |        +------> rank 2 adds (0 + 1) + 2
                                                     +---------------> rank 1 adds (0 + 1) + 2
    all_gather        output of rank 0: [ part 0 | part 1 | part 2 ]
                                                     ^        ^------- from rank 2
                                                     +---------------- from rank 1

Between hosts a large part of an all-gather goes to one rank of each host, which passes it on: see `host_ways`.
"""

import contextlib
from collections.abc import Sequence
from functools import cached_property

import torch

from shardwise.comm.agreement import understood
from shardwise.comm.call_log import CallLog, Calls, first_difference, packed_calls, parsed_calls
from shardwise.comm.channel import (
    FINISHED,
    Channel,
    Signature,
    Work,
    all_gather_signature,
    member_ranks,
    message_signature,
    reduce_scatter_signature,
)
from shardwise.comm.digests import number_of
from shardwise.comm.local_tensors import as_bytes
from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.frames import ChannelVerdict, different
from shardwise.comm.process.host_ways import HostWays, host_ways
from shardwise.comm.process.intakes import Collecting, MessageFilling, Summing
from shardwise.comm.process.messages import Inbound, Outbound, TransferInFlight, fits_in_frame
from shardwise.comm.process.value_exchange import ValueExchange
from shardwise.comm.rank_values import RankValues
from shardwise.comm.tally import RankTally
from shardwise.errors import ShardwiseError


def _lane(members: tuple[int, ...], kind: str) -> int:
    """The name on the wire of one order of messages; the same on every member without asking."""
    return number_of(f"{kind} {members}")


class ProcessChannel:
    """The channel among the `members`, world ranks in the order of their ranks here, for tensors on the CPU."""

    device = torch.device("cpu")
    # Messages move inside calls. One that is begun early gains nothing while this rank computes.
    progresses_alone = False

    def __init__(self, board: Switchboard, members: tuple[int, ...], *, owns_board: bool = False) -> None:
        self.rank = members.index(board.rank)
        self.size = len(members)
        self.board = board
        """What carries the messages of all channels of this process."""
        self._owns_board = owns_board
        self.members = members
        self._peers = [member for member in members if member != board.rank]
        self._collectives = _lane(members, "collectives")
        self._messages = _lane(members, "messages")
        # Apart from `_messages`: a device posts a receive ahead of messages on the CPU that were sent before it.
        self._elsewhere = _lane(members, "messages that travel on another way")
        self._log = board.log(self._collectives, members)
        self._values = ValueExchange(board, members, self._collectives)
        self._channels: dict[tuple[int, ...], ProcessChannel] = {members: self}

    @property
    def tally(self) -> RankTally:
        """See `Tallied`."""
        return self.board.tally

    @property
    def hosts(self) -> Sequence[str]:
        """The name of each rank's host; empty where it is unknown."""
        return tuple(self.board.hosts[member] for member in self.members) if self.board.hosts else ()

    def over(self, ranks: Sequence[int]) -> Channel:
        """See `Channel.over`."""
        return self.subset(ranks)

    def subset(self, ranks: Sequence[int]) -> "ProcessChannel":
        """`over`, by its own type."""
        members = tuple(self.members[rank] for rank in member_ranks(self, ranks))
        # Two channels over the same members would be one all the same: the board counts messages by lane, and a lane is
        # a digest of the members.
        if members not in self._channels:
            channel = ProcessChannel(self.board, members)
            channel._channels = self._channels
            self._channels[members] = channel
        return self._channels[members]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`: memory that ranks on this host read where it is."""
        if num_bytes == 0 or not any(map(self.board.shares_memory_with, self._peers)):
            return torch.zeros(num_bytes, dtype=torch.uint8)
        return self.board.lend(num_bytes)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`."""
        # All take the same way: a rank that returned None alone would leave the others in the next exchange.
        reaches_all = num_bytes > 0 and all(map(self.board.shares_memory_with, self._peers))
        purpose = f"{num_bytes} bytes of shared memory"
        if not all(self.exchange(b"+" if reaches_all else b"", purpose=f"who has {purpose}")):
            return None
        own = self.board.lend(num_bytes)
        with self.board.lock:
            place = self.board.tell_place(own, self._peers)
        # Straight from each: the frame with the descriptor goes before the message that names the place, on the same
        # connection. So the memory is mapped when the message has come.
        with self.board.lock:
            places = self._values.from_each(Signature(operation="exchange", purpose=f"places of {purpose}"), place)
        shared = [
            own if member == self.board.rank else self.board.memory_of(member, there, num_bytes)
            for member, there in zip(self.members, places, strict=True)
        ]
        # Nobody gives its memory back before all see it. Else a RELEASE could come right after the SEGMENT, before a
        # slow rank has looked the memory up. A view of it, once made, keeps it mapped.
        self.exchange(b"", purpose=f"sight of {purpose}")
        return shared

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """See `Channel.exchange`."""
        return list(self.exchange_parts([value], purpose=purpose)[0])

    def exchange_parts(self, parts: Sequence[bytes], *, purpose: str) -> list[RankValues]:
        """See `agreement.exchange_parts`."""
        signature = Signature(operation="exchange", purpose=purpose)
        with self.board.lock:
            self.board.check(signature)
            self.board.note(self._log, signature)
            # The first channel has all ranks, so that all members of each channel take part.
            logs = self.board.compared_logs() if self._owns_board else [self._log] * self._log.has_transfers
            values, difference = self._values.values(signature, parts, sum(log.share for log in logs) % (1 << 64))
            if difference:
                self._compare_calls(logs, signature)
        num_bytes = sum(map(len, parts))
        received_bytes = sum(part.num_bytes for part in values) - num_bytes
        self.tally.moved(sent_bytes=num_bytes * (self.size - 1), received_bytes=received_bytes)
        return values

    def _compare_calls(self, logs: Sequence[CallLog], signature: Signature) -> None:
        """The digests of calls differ: raise on all ranks with the first call that does."""

        def exchange(calls: Calls) -> dict[int, Calls]:
            (said,), _ = self._values.values(Signature(operation="exchange", purpose="calls"), [packed_calls(calls)])
            return dict(zip(self.members, understood(said, parsed_calls, purpose="calls"), strict=True))

        # In an exchange all have made the same number of calls on this channel.
        texts = first_difference(logs, exchange, even=self._log.lane)
        # Without any, some ranks have only come further on another channel of theirs than others.
        if texts is not None:
            self.board.fail(different(texts, self.board.names))
            self.board.check(signature)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.all_gather`."""
        signature = all_gather_signature(self, output, input, purpose=purpose, counts=counts)
        self.tally.count(signature, self.rank)
        with self.board.lock:
            self.board.check(signature)
            parts = torch.split(output.detach(), list(signature.counts))
            # Usually the input is its own part of the output, as in a bucket of parameters.
            own = parts[self.rank]
            if own.data_ptr() != input.data_ptr():
                own.copy_(input.detach())
            lane, ways = self._collectives, self._ways
            is_large = {
                member: not fits_in_frame(part.nbytes, local=False)
                for member, part in zip(self.members, parts, strict=True)
            }
            takers = ways.takers if is_large[self.board.rank] else self._peers
            outbounds = self.board.send(as_bytes(input), takers, lane, signature)
            places: list[tuple[Inbound, torch.Tensor]] = []
            passed_on: dict[Inbound, Sequence[Outbound]] = {}
            # Two ranks count their messages alike: a rank gives its own part first, and then those of others in order.
            late: list[tuple[int, torch.Tensor]] = []
            for member, part in zip(self.members, parts, strict=True):
                giver = ways.givers[member] if is_large[member] and member != self.board.rank else member
                if giver != member:
                    late.append((giver, part))
                elif member != self.board.rank:
                    inbound = self._expected(member, signature)
                    places.append((inbound, as_bytes(part)))
                    if is_large[member] and member in ways.passed_on:
                        passed_on[inbound] = self.board.send(as_bytes(part), ways.near, lane, signature, passed_on=True)
                        outbounds += passed_on[inbound]
            places += [(self._expected(giver, signature), as_bytes(part)) for giver, part in late]
            return self.board.start(signature, outbounds, MessageFilling(places, passed_on))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.reduce_scatter`."""
        signature = reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts)
        self.tally.count(signature, self.rank)
        with self.board.lock:
            self.board.check(signature)
            parts = torch.split(input.detach(), list(signature.counts))
            outbounds: list[Outbound] = []
            # Every peer gets another part, so that no slot serves two readers: all messages share the slots of the
            # pool. Each rank begins with its right neighbour, so that no rank is everybody's first.
            for step in range(1, self.size):
                destination = (self.rank + step) % self.size
                outbounds += self.board.send(
                    as_bytes(parts[destination]),
                    [self.members[destination]],
                    self._collectives,
                    signature,
                    window_share=self.size - 1,
                )
            terms: list[Inbound | torch.Tensor] = [
                parts[self.rank] if member == self.board.rank else self._expected(member, signature)
                for member in self.members
            ]
            return self.board.start(signature, outbounds, Summing(output.detach(), terms, input.dtype))

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """See `Channel.send`. The message is buffered: it needs nothing more from this rank."""
        signature = message_signature(self, "send", tensor, destination, purpose=purpose)
        self.tally.count(signature, self.rank)
        with self.board.lock:
            self.board.check(signature)
            peer, source = self.members[destination], as_bytes(tensor)
            if self.board.send_in_frame(source, peer, self._messages, signature):
                return FINISHED
            outbounds = self.board.send(source, [peer], self._messages, signature, buffered=True)
            return self.board.start(signature, outbounds, None)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """See `Channel.receive`."""
        signature = message_signature(self, "receive", tensor, source, purpose=purpose)
        self.tally.count(signature, self.rank)
        with self.board.lock:
            self.board.check(signature)
            inbound = self.board.expect(self.members[source], self._messages, signature)
            return self.board.start(signature, [], MessageFilling([(inbound, as_bytes(tensor))]))

    def abort(self, reason: str) -> None:
        """See `Channel.abort`."""
        rank = self.board.rank
        self.board.was_heard = True  # the program knows what it says
        self.board.fail(ChannelVerdict(fact=f"rank {self.board.names[rank]} stopped: {reason}", culprit=rank))

    def close(self) -> None:
        """See `Channel.close`. The connections belong to the first channel; those made by `over` hold nothing."""
        if self._owns_board:
            self.board.close()

    def check(self, signature: Signature) -> None:
        """Raise if a rank is lost, or has given up."""
        self.board.check(signature)

    def has_failed(self, *, patience_seconds: float = 0.0) -> bool:
        """Whether a rank is lost or has given up, as far as can be seen so soon."""
        return self.board.has_failed(patience_seconds=patience_seconds)

    def has_closed(self, awaited: Sequence[int]) -> bool:
        """Whether one of these world ranks has closed its channel, as far as was heard."""
        return self.board.has_closed(awaited)

    def judge(self, signature: Signature, awaited: Sequence[int]) -> None:
        """Blame one of these world ranks: a call that travels on another way has waited too long for them."""
        self.board.judge(awaited)
        self.blocked(signature)

    def blocked(self, signature: Signature) -> None:
        """Errors name this call from now on: the one in which the rank was when the channel failed."""
        was_heard = self.board.was_heard
        with contextlib.suppress(ShardwiseError):
            self.board.check(signature)
        self.board.was_heard = was_heard

    @property
    def was_heard(self) -> bool:
        """Whether the program has got the error with which the channel ended."""
        return self.board.was_heard

    def agree_on(self, signature: Signature) -> None:
        """Compare the signature of a collective that travels on another way, and is called for the first time."""
        with self.board.lock:
            self.note(signature)
            # A neighbour that calls what it knows answers nothing, and finds the difference in this.
            self.board.tell_calls(self._log, self._values.neighbours)
            _, difference = self._values.values(signature, [b""], self._log.share % (1 << 64))
            if difference:
                self._compare_calls([self._log], signature)

    def note(self, signature: Signature) -> None:
        """Put a collective that travels on another way into the digest of calls, which exchanges compare."""
        with self.board.lock:
            self.board.check(signature)
            self._log.has_transfers = True
            self.board.note(self._log, signature)

    def tell_waiting(self, signature: Signature, awaited: Sequence[int]) -> bool:
        """What travels on another way has waited for a while for these world ranks: tell all. Whether that was done."""
        return self.board.tell_waiting(signature, awaited)

    def compare_message(self, signature: Signature, peer: int) -> TransferInFlight:
        """Begin to compare the signature of a `send` or `receive` that travels on another way."""
        with self.board.lock:
            self.board.check(signature)
            member = self.members[peer]
            if signature.operation == "send":
                nothing = self.board.send(torch.empty(0), [member], self._elsewhere, signature, buffered=True)
                return self.board.start(signature, nothing, None)
            return self.board.start(signature, [], Collecting([self.board.expect(member, self._elsewhere, signature)]))

    @cached_property
    def _ways(self) -> HostWays:
        return host_ways(self.board.rank, self.members, self.board.kernels)

    def _expected(self, member: int, signature: Signature) -> Inbound:
        return self.board.expect(member, self._collectives, signature)
