"""Keepers as threads of this process, which start in no time and end as the process would."""

import os
import socket
import threading

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
