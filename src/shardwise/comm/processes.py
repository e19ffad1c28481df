"""The channel over real processes: shared memory between CPU ranks of one host, gloo between hosts, the devices'
backend between devices (NCCL, for one).

Here calls become messages; a `Switchboard` moves them. A collective of n ranks is n (n - 1) messages, each straight to
its reader. An all-gather gives the same bytes to all. A reduce-scatter gives each rank its own part, and the reader
adds. So a rank sends and receives as many bytes as in a ring, in one step instead of n - 1, and the sum has an order::

    reduce_scatter    input of rank 0:  [ part 0 | part 1 | part 2 ]
                                                     |        +------> rank 2 adds (0 + 1) + 2
                                                     +---------------> rank 1 adds (0 + 1) + 2
    all_gather        output of rank 0: [ part 0 | part 1 | part 2 ]
                                                     ^        ^------- from rank 2
                                                     +---------------- from rank 1

`default_channel` says which channel a program gets that names none.
"""

import contextlib
import hashlib
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize, register_after_fork

import torch
import torch.distributed as dist

from shardwise.comm.agreement import aborting, understood
from shardwise.comm.call_log import CallLog, Calls, first_difference, packed_calls, parsed_calls
from shardwise.comm.channel import (
    FINISHED,
    Channel,
    Signature,
    Work,
    all_gather_signature,
    alone,
    member_ranks,
    message_signature,
    reduce_scatter_signature,
)
from shardwise.comm.communicators import Communicators, maker
from shardwise.comm.connections import connect
from shardwise.comm.device_channel import DeviceChannel
from shardwise.comm.devices import only_device
from shardwise.comm.frames import ChannelVerdict, different
from shardwise.comm.gloo_pairs import GlooPairs
from shardwise.comm.hang_watch import QuietThread
from shardwise.comm.messages import Collecting, Inbound, MessageFilling, Outbound, Summing, TransferInFlight, as_bytes
from shardwise.comm.rank_values import RankValues
from shardwise.comm.relay import Relay
from shardwise.comm.rendezvous import meet
from shardwise.comm.switchboard import Switchboard
from shardwise.comm.tally import RankTally
from shardwise.comm.value_exchange import ValueExchange
from shardwise.errors import ShardwiseError, in_words
from shardwise.launchers import place_of

_ENDED = "has ended its program (its last line, or sys.exit) without closing its channel"


def processes(
    *,
    timeout_seconds: float = 60.0,
    shared_memory: bool = True,
    device: torch.device | None = None,
    interface: str | None = None,
    ports: str | None = None,
) -> Channel:
    """The channel of all processes that were started together.

    They meet through the default process group of torch.distributed, or, when there is none, through the environment
    that `torchrun`, `shardwise train --nproc`, `srun` or `mpirun` set. Only the group's store is used: a rank connects
    to a few others at once, and to further ones for the first message. Tensors travel in shared memory between ranks of
    one host that both allow it, else over gloo. Between devices they travel over NCCL, or the backend that torch names
    for devices of their kind.

    `device`: where the tensors live; default this rank's accelerator, unless the process group is one for the CPU.
    `interface`: the name or an address of the network interface to listen on, such as "ib0"; default the one on the
    way to the store. `ports`: a range to listen on, such as "20000-20100"; that of gloo's ports is the kernel's.
    SHARDWISE_INTERFACE and SHARDWISE_PORTS of the environment come first.
    Raises `PeerError` when a rank does not appear, is lost, or makes no progress for `timeout_seconds`.
    """
    meeting = meet(timeout_seconds=timeout_seconds, device=device, interface=interface, ports=ports)
    if meeting.size == 1:
        return alone(meeting.device)
    connected = connect(meeting, shared_memory=shared_memory)
    one_host = len(set(connected.kernels)) == 1
    pairs = None if one_host else GlooPairs(meeting.rank, meeting.store, timeout_seconds=timeout_seconds)
    board = Switchboard(
        meeting.rank,
        {},
        timeout_seconds=timeout_seconds,
        kernels=connected.kernels,
        hosts=connected.hosts,
        relay=Relay(meeting.rank, connected, timeout_seconds=timeout_seconds),
        pairs=pairs,
    )
    _watch_over(board, timeout_seconds)
    _drop_in_children(board)
    _speak_at_the_end(board)
    channel = ProcessChannel(board, tuple(range(meeting.size)), owns_board=True)
    if meeting.device.type == "cpu":
        return channel
    communicators = Communicators(maker(meeting.device, timeout_seconds=timeout_seconds), meeting.store)
    return DeviceChannel(channel, meeting.device, communicators, timeout_seconds=timeout_seconds)


def default_channel() -> Channel:
    """The initialised process group, else the processes that a launcher announces, else a world of one.

    Each rank has the accelerator of its host, if there is one and the process group is not for the CPU alone.
    Launchers are torchrun, srun and mpirun. Raises PlanError where one announces several processes, but not enough for
    them to meet.
    """
    initialised = dist.is_available() and dist.is_initialized()
    return processes() if initialised or place_of(os.environ) is not None else alone(only_device(None))


@contextmanager
def given_or_default(channel: Channel | None, doing: str) -> Iterator[Channel]:
    """A channel for one thing to do: the one given, or the default one, which is closed afterwards.

    An error that the ranks have not agreed on aborts the channel, with what this rank was `doing`: no peer waits.
    """
    # A channel that was given may serve other things after this one: only its owner closes it.
    used = channel if channel is not None else default_channel()
    try:
        with aborting(used, doing):
            yield used
    finally:
        if channel is None:
            used.close()


def channel_of(state: object) -> Channel | None:
    """The channel of an object that has one as `channel`, such as an engine: its ranks hold the object together."""
    channel = getattr(state, "channel", None)
    return channel if isinstance(channel, Channel) else None


def _watch_over(board: Switchboard, timeout_seconds: float) -> None:
    """Let a thread say where this rank is while it makes no call, and that its program ends though threads go on."""
    # Weak: a board that the program has let go of ends its connections.
    reference = weakref.ref(board)

    def look(idle_seconds: float) -> None:
        if (quiet := reference()) is not None:
            quiet.look(idle_seconds)

    def speak() -> None:
        if (left := reference()) is not None:
            # Python waits for threads of the program before it runs what `_speak_at_the_end` has left to the end.
            left.leave(f"rank {left.rank} {_end_in_words()}")

    board.quiet_thread = QuietThread(board.watch.activity, timeout_seconds=timeout_seconds, on_quiet=look, on_end=speak)
    weakref.finalize(board, board.quiet_thread.stop).atexit = False


def _drop_in_children(board: Switchboard) -> None:
    """Close in a forked worker, such as a data loader's, what it has inherited.

    Peers learn of the death of this rank by the end of its connections. A worker would keep them open. A child that the
    program forks itself does so when it first calls the channel.
    """
    # No hook of the interpreter, which would stay for good: multiprocessing forgets a board that is gone.
    register_after_fork(board, Switchboard.leave_to_parent)


def _speak_at_the_end(board: Switchboard) -> None:
    """A program that ends without `close` tells its peers why: they would only see that it is gone.

    What `sys.exit` was called with is known in processes of `multiprocessing` alone.
    """
    reference = weakref.ref(board)

    def speak() -> None:
        if (left := reference()) is not None:
            left.leave(f"rank {left.rank} {_end_in_words(sys.exception())}")

    # Not `atexit`, which processes of multiprocessing leave out. Where the process is killed nothing runs, and the
    # peers see the connection end.
    Finalize(None, speak, exitpriority=0)


def _end_in_words(error: BaseException | None = None) -> str:
    """How the program has ended: by this error, or by the one that Python has printed last, or without any."""
    error = error or getattr(sys, "last_value", None)
    return f"stopped: {in_words(error)}" if error else _ENDED


def _lane(members: tuple[int, ...], kind: str) -> int:
    """The name on the wire of one order of messages; the same on every member without asking."""
    return int.from_bytes(hashlib.blake2b(f"{kind} {members}".encode(), digest_size=8).digest(), "little")


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
            self.board.fail(different(texts))
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
            places = [
                (self._expected(member, signature), as_bytes(part))
                for member, part in zip(self.members, parts, strict=True)
                if member != self.board.rank
            ]
            # Usually the input is its own part of the output, as in a bucket of parameters.
            own = parts[self.rank]
            if own.data_ptr() != input.data_ptr():
                own.copy_(input.detach())
            outbounds = self.board.send(as_bytes(input), self._peers, self._collectives, signature)
            return self.board.start(signature, outbounds, MessageFilling(places))

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
        self.board.fail(ChannelVerdict(fact=f"rank {rank} stopped: {reason}", culprit=rank))

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

    def _expected(self, member: int, signature: Signature) -> Inbound:
        return self.board.expect(member, self._collectives, signature)
