"""All processes that were started together, as one channel: how a rank makes it, and what peers hear when it ends.

The life of a rank::

    processes()      meets the others (`rendezvous`), connects to a few (`connections`), and makes its board and channel
    the program      calls the channel; a thread says where the rank is while it makes no call for long
    its end          close, an error, the last line, sys.exit: peers are told; killed: they see it
"""

import sys
import weakref
from multiprocessing.util import Finalize, register_after_fork

import torch

from shardwise.comm.channel import Channel, alone
from shardwise.comm.device.channel import DeviceChannel
from shardwise.comm.device.groups import Communicators, maker
from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.connections import connect
from shardwise.comm.process.gloo_pairs import GlooPairs
from shardwise.comm.process.hang_watch import QuietThread
from shardwise.comm.process.relay import Relay
from shardwise.comm.process.rendezvous import meet
from shardwise.errors import in_words

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
            left.leave(f"rank {left.names[left.rank]} {_end_in_words()}")

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
            left.leave(f"rank {left.names[left.rank]} {_end_in_words(sys.exception())}")

    # Not `atexit`, which processes of multiprocessing leave out. Where the process is killed nothing runs, and the
    # peers see the connection end.
    Finalize(None, speak, exitpriority=0)


def _end_in_words(error: BaseException | None = None) -> str:
    """How the program has ended: by this error, or by the one that Python has printed last, or without any."""
    error = error or getattr(sys, "last_value", None)
    return f"stopped: {in_words(error)}" if error else _ENDED
