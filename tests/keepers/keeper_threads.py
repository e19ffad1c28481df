"""Keepers as threads of this process, which start in no time and end as the process would."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise.keepers import keeper, keeper_host
from shardwise.keepers.keeper import KeeperProcess
from shardwise.keepers.keeper_host import socket_name


class KeeperThreads:
    """Stands for `keeper_host._start`, which starts a process."""

    def __init__(self) -> None:
        self.threads: dict[str, threading.Thread] = {}

    def __call__(self, name: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
        listener.listen(socket.SOMAXCONN)
        self.threads[name] = threading.Thread(target=_run, args=(listener,), daemon=True)
        self.threads[name].start()

    def end(self, name: str) -> bool:
        """Whether it ends, as it should, soon."""
        self.threads[name].join(60.0)
        return not self.threads[name].is_alive()


def _run(listener: socket.socket) -> None:
    with listener:
        KeeperProcess(listener).run()


def own_name(host: str) -> str:
    """The name of a keeper that this process alone uses."""
    return socket_name(f"tests {os.getpid()}", host)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> KeeperThreads:
    """All keepers are threads: the start of a process takes seconds, and no user sees how a keeper is started."""
    found = KeeperThreads()
    monkeypatch.setattr(keeper_host, "_start", found)
    return found


@contextmanager
def impatient() -> Iterator[None]:
    """Nobody waits for another program, or for a first owner, as long as users would: half a minute, and two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper_host, "_BUSY_SECONDS", 0.05)
        patch.setattr(keeper, "_FIRST_OWNER_SECONDS", 0.01)
        yield
