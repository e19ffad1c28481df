"""Peak memory and bytes read, of this process, from what Linux counts.

Memory is what only this process can give back: `RssAnon` and `RssShmem` of /proc/self/status, sampled by a thread every
half millisecond. It sees Python's objects, tensors, and the channel's shared buffers, whoever allocated them, and not
the pages of files that are mapped. `malloc_trim` returns what earlier work has left free, so that it cannot hide a
peak. `VmHWM`, which the kernel keeps without sampling and which counts mapped files as well, is written down beside it:
a peak too short for the sampler shows there.
"""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.local import LocalReader, LocalStore

__all__ = ["CountingStore", "Peak", "peak_memory", "read_characters"]

_SAMPLE_SECONDS = 0.0005


@dataclass(slots=True)
class Peak:
    """Bytes above what was there before."""

    sampled: int = 0
    kernel: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Yield a `Peak` that is filled in at the end."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    peak, done = Peak(), threading.Event()
    before, kernel_before = _own_bytes(), _status()["VmRSS"]
    highest = before

    def watch() -> None:
        nonlocal highest
        while not done.wait(_SAMPLE_SECONDS):
            highest = max(highest, _own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak.sampled = max(highest, _own_bytes()) - before
        peak.kernel = _status()["VmHWM"] - kernel_before


def _own_bytes() -> int:
    status = _status()
    return status["RssAnon"] + status["RssShmem"]


def _status() -> dict[str, int]:
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows if row[-1] == "kB"}


def read_characters() -> int:
    """Bytes that this process has asked the kernel for with read calls; reading mapped files is not among them."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


class CountingStore(LocalStore):
    """A local store that counts what is read."""

    __slots__ = ("_lock", "read_bytes")

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self.read_bytes = 0

    def open(self, name: str) -> LocalReader:
        """See `Store.open`."""
        return _CountingReader(self, f"{self.location}/{name}")

    def add(self, num_bytes: int) -> None:
        """Count these."""
        with self._lock:
            self.read_bytes += num_bytes


class _CountingReader(LocalReader):
    __slots__ = ("_store",)

    def __init__(self, store: CountingStore, path: str) -> None:
        super().__init__(path)
        self._store = store

    def read_into(self, buffer: memoryview, start: int) -> None:
        self._store.add(buffer.nbytes)
        super().read_into(buffer, start)

    @contextmanager
    def mapped(self, start: int, num_bytes: int) -> Iterator[memoryview | None]:
        """All that is mapped counts as read: the kernel has to have it."""
        with super().mapped(start, num_bytes) as memory:
            self._store.add(0 if memory is None else num_bytes)
            yield memory
