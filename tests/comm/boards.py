"""Process channels whose ranks are threads of this process: every byte goes through sockets and slots all the same."""

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar
from unittest.mock import patch

import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.comm.process import connections
from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.frames import FORMAT, FrameKind
from shardwise.comm.process.gloo_pairs import GlooPairs
from shardwise.comm.process.link import PeerLink
from shardwise.comm.process.relay import Relay
from shardwise.comm.process.rendezvous import Rendezvous

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""For what must come, however busy the machine is."""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_no_thread_has(*names: str) -> None:
    until(lambda: not any(thread.name in names for thread in threading.enumerate()))


def shared_descriptors() -> list[str]:
    """The descriptors of this process that keep shared memory alive."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if "memfd:shardwise" in link]


Sent = Counter[tuple[int, int]]
"""Chunks of messages by sender and receiver."""


def in_threads(bodies: Sequence[Callable[[], T]]) -> list[T]:
    """What each returns, called in a thread of its own."""
    results: dict[int, T] = {}

    def live(number: int) -> None:
        results[number] = bodies[number]()

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    return [results[number] for number in range(len(bodies))]


def meeting(rank: int, size: int, store: Store, *, patience_seconds: float = 60.0) -> Rendezvous:
    """Where ranks of this process find each other."""
    return Rendezvous(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        store=PrefixStore("meeting", store),
        store_host=None,
        patience_seconds=patience_seconds,
    )


def count_chunks(channel: ProcessChannel) -> Sent:
    """From now on, what a rank sends to each other one."""
    sent: Sent = Counter()

    def counting(peer: int, put: Callable[..., None]) -> Callable[..., None]:
        def counted(*content: bytes, **how: object) -> None:
            if FORMAT.unpack_from(content[0])[0] == FrameKind.CHUNK:
                sent[channel.rank, peer] += 1
            put(*content, **how)

        return counted

    for link in channel.board.links.values():
        link.put = counting(link.rank, link.put)  # type: ignore[method-assign]
    return sent


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection, as between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def boards(
    size: int, *, remote: Collection[int] = (), timeout_seconds: float = 20.0, hosts: Sequence[str] = ()
) -> list[Switchboard]:
    """Connected switchboards; ranks in `remote` share no memory with the others. hosts: by rank."""
    links: list[dict[int, PeerLink]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            local = not {low, high} & set(remote)
            ends = socket.socketpair() if local else tcp_pair()
            links[low][high] = PeerLink(ends[0], rank=high, local=local)
            links[high][low] = PeerLink(ends[1], rank=low, local=local)
    first = min(set(range(size)) - set(remote), default=0)
    kernels = [rank if rank in remote else first for rank in range(size)]
    store = HashStore()
    return [
        Switchboard(
            rank,
            links[rank],
            timeout_seconds=timeout_seconds,
            kernels=kernels,
            hosts=hosts,
            pairs=GlooPairs(rank, store, timeout_seconds=timeout_seconds) if remote else None,
        )
        for rank in range(size)
    ]


def relayed_boards(size: int, *, ranks_of_a_host: int, timeout_seconds: float = 20.0) -> list[Switchboard]:
    """Switchboards as processes have them: with a relay each, and links that are made when they are first used."""
    store = HashStore()
    here = threading.local()
    made: dict[int, Switchboard] = {}

    def start(rank: int) -> None:
        here.kernel = f"host {rank // ranks_of_a_host}"
        connected = connections.connect(meeting(rank, size, store), shared_memory=True)
        made[rank] = Switchboard(
            rank,
            {},
            timeout_seconds=timeout_seconds,
            kernels=connected.kernels,
            relay=Relay(rank, connected, timeout_seconds=timeout_seconds),
            pairs=GlooPairs(rank, store, timeout_seconds=timeout_seconds),
        )

    with patch.object(connections, "host_identity", lambda: here.kernel):
        in_threads([partial(start, rank) for rank in range(size)])
    return [made[rank] for rank in range(size)]


def on_threads(
    size: int,
    body: Callable[[ProcessChannel], T],
    *,
    remote: Collection[int] = (),
    timeout_seconds: float = 20.0,
    hosts: Sequence[str] = (),
    among: Sequence[Switchboard] | None = None,
) -> list[T]:
    """Run `body` on every rank; the results in rank order, or the first rank's error. among: boards that are there."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    if among is None:
        among = boards(size, remote=remote, timeout_seconds=timeout_seconds, hosts=hosts)
    channels = [ProcessChannel(board, tuple(range(size)), owns_board=True) for board in among]

    def live(channel: ProcessChannel) -> None:
        try:
            results[channel.rank] = body(channel)
        except BaseException as error:
            errors[channel.rank] = error
            channel.abort(f"{type(error).__name__}: {error}")

    in_threads([partial(live, channel) for channel in channels])
    for channel in channels:
        channel.close()
    for rank in sorted(errors):
        raise errors[rank]
    return [results[rank] for rank in range(size)]
