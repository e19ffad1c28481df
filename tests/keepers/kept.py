"""Keepers as a test sees them that does not own them."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from shardwise.keepers.keeper_host import KeeperAddress, asked, socket_name


class Kept:
    """The keepers of some hosts, as a program that does not own them sees them."""

    def __init__(self, path: str, hosts: Sequence[str]) -> None:
        self._names = [socket_name(path, host) for host in hosts]

    @property
    def processes(self) -> list[int]:
        found = []
        for name in self._names:
            with contextlib.suppress(OSError), KeeperAddress(name=name).connect(5.0) as connection:
                found.append(asked(connection, do="held")["process"])
        return found

    def kill(self) -> None:
        """Lose the memory of these hosts."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def have_ended(self) -> bool:
        """True, or the test's time is over."""
        while self.processes:
            time.sleep(0.01)
        return True
