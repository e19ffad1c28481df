"""The channel over real processes: shared memory between CPU ranks of one host, TCP otherwise, NCCL between GPUs.

Here calls become messages; a `Switchboard` moves them. A collective of n ranks is n (n - 1) messages, each straight to
its reader: an all-gather gives the same bytes to all, a reduce-scatter gives each rank its own part, and the reader
adds. So a rank sends and receives as many bytes as in a ring, in one step instead of n - 1, and the sum has an order::

    reduce_scatter    input of rank 0:  [ part 0 | part 1 | part 2 ]
                                                     |        +------> rank 2 adds (0 + 1) + 2
                                                     +---------------> rank 1 adds (0 + 1) + 2
    all_gather        output of rank 0: [ part 0 | part 1 | part 2 ]
                                                     ^        ^------- from rank 2
                                                     +---------------- from rank 1

`default_channel` says which channel a program gets that names none.
"""

import hashlib
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist

from shardwise.comm.agreement import aborting
from shardwise.comm.channel import (
    Channel,
    Signature,
    Work,
    all_gather_signature,
    alone,
    member_ranks,
    message_signature,
    reduce_scatter_signature,
)
from shardwise.comm.connections import connect
from shardwise.comm.frames import ChannelVerdict
from shardwise.comm.messages import Collecting, Inbound, MessageFilling, Outbound, Summing, as_bytes
from shardwise.comm.nccl import NcclChannel
from shardwise.comm.rendezvous import meet
from shardwise.comm.switchboard import Switchboard
from shardwise.errors import in_words
from shardwise.launchers import place_of


def processes(
    *, timeout_seconds: float = 60.0, shared_memory: bool = True, device: torch.device | None = None
) -> Channel:
    """The channel of all processes that were started together.

    They meet through the default process group of torch.distributed, or, when there is none, through the environment
    that `torchrun`, `shardwise train --nproc`, `srun` or `mpirun` set. On CPU only the group's store is used: the ranks
    connect to each other directly, through shared memory where they are on one host and both allow it, through TCP
    otherwise. With a CUDA device, tensors travel over NCCL.

    `device`: where the tensors live; default the CUDA device of this rank when the group has NCCL, else the CPU.
    Raises `PeerError` when a rank does not appear, is lost, or makes no progress for `timeout_seconds`.
    """
    meeting = meet(timeout_seconds=timeout_seconds, device=device)
    if meeting.size == 1:
        return alone(meeting.device)
    board = Switchboard(meeting.rank, connect(meeting, shared_memory=shared_memory), timeout_seconds=timeout_seconds)
    _drop_in_children(board)
    _speak_at_the_end(board)
    channel = ProcessChannel(board, tuple(range(meeting.size)), owns_board=True)
    return channel if meeting.device.type == "cpu" else NcclChannel(channel, meeting.device)


def default_channel() -> Channel:
    """The initialised process group, else the processes that a launcher announces, else a world of one.

    Launchers are torchrun, srun and mpirun. Raises PlanError where one announces several processes, but not enough for
    them to meet.
    """
    initialised = dist.is_available() and dist.is_initialized()
    return processes() if initialised or place_of(os.environ) is not None else alone()


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


def _drop_in_children(board: Switchboard) -> None:
    """Close in a forked child, such as a data loader's worker, what it has inherited.

    Peers learn of the death of this rank by the end of its connections. A child would keep them open.
    """
    # Weak, since what is registered with the interpreter stays registered: it would keep every board alive.
    reference = weakref.ref(board)

    def drop() -> None:
        if (inherited := reference()) is not None:
            inherited.drop()

    os.register_at_fork(after_in_child=drop)


def _speak_at_the_end(board: Switchboard) -> None:
    """A program that ends without `close` tells its peers why: they would only see that it is gone.

    What `sys.exit` was called with is known in processes of `multiprocessing` alone.
    """
    reference = weakref.ref(board)

    def speak() -> None:
        if (left := reference()) is not None:
            error = sys.exception() or getattr(sys, "last_value", None)
            what = "has ended its program (its last line, or sys.exit) without closing its channel"
            left.leave(f"rank {left.rank} {f'stopped: {in_words(error)}' if error else what}")

    # Not `atexit`, which processes of multiprocessing leave out. Where the process is killed nothing runs, and the
    # peers see the connection end.
    Finalize(None, speak, exitpriority=0)


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
        self._board = board
        self._owns_board = owns_board
        self.members = members
        self._peers = [member for member in members if member != board.rank]
        self._collectives = _lane(members, "collectives")
        self._messages = _lane(members, "messages")
        self._channels: dict[tuple[int, ...], ProcessChannel] = {members: self}

    def over(self, ranks: Sequence[int]) -> Channel:
        """See `Channel.over`."""
        return self.subset(ranks)

    def subset(self, ranks: Sequence[int]) -> "ProcessChannel":
        """`over`, by its own type."""
        members = tuple(self.members[rank] for rank in member_ranks(self, ranks))
        # Two channels over the same members would be one all the same: the board counts messages by lane, and a lane is
        # a digest of the members.
        if members not in self._channels:
            channel = ProcessChannel(self._board, members)
            channel._channels = self._channels
            self._channels[members] = channel
        return self._channels[members]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`: memory that ranks on this host read where it is."""
        if num_bytes == 0 or not self._board.shares_memory_with(self._peers):
            return torch.zeros(num_bytes, dtype=torch.uint8)
        return self._board.lend(num_bytes)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`."""
        # All take the same way: a rank that returned None alone would leave the others in the next exchange.
        reaches_all = num_bytes > 0 and self._board.shares_memory_with_all(self._peers)
        purpose = f"{num_bytes} bytes of shared memory"
        if not all(self.exchange(b"+" if reaches_all else b"", purpose=f"who has {purpose}")):
            return None
        own = self._board.lend(num_bytes)
        with self._board.lock:
            place = self._board.tell_place(own, self._peers)
        # The frame with the descriptor goes before the message that names the place, on the same connection: the memory
        # is mapped when the message has come.
        places = self.exchange(place, purpose=f"places of {purpose}")
        shared = [
            own if member == self._board.rank else self._board.memory_of(member, there, num_bytes)
            for member, there in zip(self.members, places, strict=True)
        ]
        # Nobody gives its memory back before all see it. Else a RELEASE could come right after the SEGMENT, before a
        # slow rank has looked the memory up. A view of it, once made, keeps it mapped.
        self.exchange(b"", purpose=f"sight of {purpose}")
        return shared

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """See `Channel.exchange`."""
        signature = Signature(operation="exchange", purpose=purpose)
        with self._board.lock:
            self._board.check(signature)
            given = (
                torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
            )
            intake = Collecting([self._expected(rank, signature) for rank in self._peers])
            self._board.start(signature, self._to_peers(given, signature), intake).wait()
        values: list[bytes] = [bytes(intake.values[rank]) if rank in intake.values else value for rank in self.members]
        return values

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.all_gather`."""
        signature = all_gather_signature(self, output, input, purpose=purpose, counts=counts)
        with self._board.lock:
            self._board.check(signature)
            parts = torch.split(output.detach(), list(signature.counts))
            places = [
                (self._expected(member, signature), as_bytes(part))
                for member, part in zip(self.members, parts, strict=True)
                if member != self._board.rank
            ]
            # Usually the input is its own part of the output, as in a bucket of parameters.
            own = parts[self.rank]
            if own.data_ptr() != input.data_ptr():
                own.copy_(input.detach())
            return self._board.start(signature, self._to_peers(as_bytes(input), signature), MessageFilling(places))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.reduce_scatter`."""
        signature = reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts)
        with self._board.lock:
            self._board.check(signature)
            parts = torch.split(input.detach(), list(signature.counts))
            outbounds: list[Outbound] = []
            # Every peer gets another part, so that no slot serves two readers: all messages share the slots of the
            # pool. Each rank begins with its right neighbour, so that no rank is everybody's first.
            for step in range(1, self.size):
                destination = (self.rank + step) % self.size
                outbounds += self._board.send(
                    as_bytes(parts[destination]),
                    [self.members[destination]],
                    self._collectives,
                    signature,
                    window_share=self.size - 1,
                )
            terms: list[Inbound | torch.Tensor] = [
                parts[self.rank] if member == self._board.rank else self._expected(member, signature)
                for member in self.members
            ]
            return self._board.start(signature, outbounds, Summing(output.detach(), terms, input.dtype))

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """See `Channel.send`. The message is buffered: it needs nothing more from this rank."""
        signature = message_signature(self, "send", tensor, destination, purpose=purpose)
        with self._board.lock:
            self._board.check(signature)
            peer = self.members[destination]
            outbounds = self._board.send(as_bytes(tensor), [peer], self._messages, signature, buffered=True)
            return self._board.start(signature, outbounds, None)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """See `Channel.receive`."""
        signature = message_signature(self, "receive", tensor, source, purpose=purpose)
        with self._board.lock:
            self._board.check(signature)
            inbound = self._board.expect(self.members[source], self._messages, signature)
            return self._board.start(signature, [], MessageFilling([(inbound, as_bytes(tensor))]))

    def abort(self, reason: str) -> None:
        """See `Channel.abort`."""
        rank = self._board.rank
        self._board.fail(ChannelVerdict(fact=f"rank {rank} stopped: {reason}", culprit=rank))

    def close(self) -> None:
        """See `Channel.close`. The connections belong to the first channel; those made by `over` hold nothing."""
        if self._owns_board:
            self._board.close()

    def compare(self, signature: Signature) -> Work:
        """Begin to compare the signature of a collective that travels on another way."""
        # A message without bytes: its header has the digest, and that is all that is compared.
        with self._board.lock:
            self._board.check(signature)
            intake = Collecting([self._expected(rank, signature) for rank in self._peers])
            return self._board.start(signature, self._to_peers(torch.empty(0), signature), intake)

    def compare_message(self, signature: Signature, peer: int) -> Work:
        """Begin to compare the signature of a `send` or `receive` that travels on another way."""
        with self._board.lock:
            self._board.check(signature)
            member = self.members[peer]
            if signature.operation == "send":
                nothing = self._board.send(torch.empty(0), [member], self._messages, signature, buffered=True)
                return self._board.start(signature, nothing, None)
            return self._board.start(signature, [], Collecting([self._board.expect(member, self._messages, signature)]))

    def _expected(self, member: int, signature: Signature) -> Inbound:
        return self._board.expect(member, self._collectives, signature)

    def _to_peers(self, source: torch.Tensor, signature: Signature) -> list[Outbound]:
        return self._board.send(source, self._peers, self._collectives, signature) if self._peers else []
