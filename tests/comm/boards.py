"""Process channels whose ranks are threads of this process: every byte goes through sockets and slots all the same."""

import socket
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from shardwise.comm.links import PeerLink
from shardwise.comm.processes import ProcessChannel
from shardwise.comm.switchboard import Switchboard

T = TypeVar("T")


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def boards(size: int, *, remote: Collection[int] = (), timeout_seconds: float = 20.0) -> list[Switchboard]:
    """Connected switchboards; ranks in `remote` share no memory with the others."""
    links: list[dict[int, PeerLink]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            local = not {low, high} & set(remote)
            ends = socket.socketpair() if local else _tcp_pair()
            links[low][high] = PeerLink(ends[0], rank=high, local=local)
            links[high][low] = PeerLink(ends[1], rank=low, local=local)
    return [Switchboard(rank, links[rank], timeout_seconds=timeout_seconds) for rank in range(size)]


def on_threads(
    size: int, body: Callable[[ProcessChannel], T], *, remote: Collection[int] = (), timeout_seconds: float = 20.0
) -> list[T]:
    """Run `body` on every rank; the results in rank order, or the first rank's error."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    channels = [
        ProcessChannel(board, tuple(range(size)), owns_board=True)
        for board in boards(size, remote=remote, timeout_seconds=timeout_seconds)
    ]

    def live(channel: ProcessChannel) -> None:
        try:
            results[channel.rank] = body(channel)
        except BaseException as error:
            errors[channel.rank] = error
            channel.abort(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=live, args=(channel,), daemon=True) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    for channel in channels:
        channel.close()
    for rank in sorted(errors):
        raise errors[rank]
    return [results[rank] for rank in range(size)]
