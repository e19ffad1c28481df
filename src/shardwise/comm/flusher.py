"""Writes what a call had to leave behind because a socket was full, while this rank computes."""

import select
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager

from shardwise.comm.links import PeerLink

_LOOK_UP_SECONDS = 0.5


class Flusher:
    """One thread, started when first needed, that empties the queues of the links between the calls.

    Without it a peer would wait for a message, or for a slot, until this rank makes its next call. It only writes: what
    comes in is for the calls. It takes `lock`, which calls hold, whenever it touches a link.
    """

    def __init__(self, lock: AbstractContextManager[bool], links: Collection[PeerLink]) -> None:
        self._lock = lock
        self._links = links
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def wake(self) -> None:
        """There are queues to empty. The caller holds the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardwise flusher", daemon=True)
            self._thread.start()
        self._work.set()

    def stop(self) -> None:
        """End the thread soon. The caller holds the lock."""
        self._stopped = True
        self._work.set()

    def _run(self) -> None:
        while True:
            self._work.wait()
            with self._lock:
                if self._stopped:
                    return
                poll = select.poll()
                self._work.clear()
                for link in self._links:
                    link.flush()
                    if link.wants_to_write:
                        poll.register(link.fileno(), select.POLLOUT)
                        self._work.set()
            if self._work.is_set():
                # A link that is closed meanwhile ends the poll as well.
                poll.poll(_LOOK_UP_SECONDS * 1000)
