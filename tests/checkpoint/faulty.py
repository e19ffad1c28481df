"""Store doubles: they count the operations of a store, and let one of them fail or be the last of a process.

Operations: "names", "open", "read_into", "begin" (entering the context of `write`), "write", "end" (leaving it without
an error), "create", "delete". They are counted from 1 over all threads.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeVar

from shardwise.checkpoint.stores import Reader, Store, Writer

T = TypeVar("T")
Mode = Literal["before", "after", "half"]


class Died(BaseException):
    """Stands for the death of the process: nothing in it may do anything to the store any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    kind: str
    name: str
    num_bytes: int = 0


class Watched:
    """A store whose operations all pass through `perform`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        """Do `act`, or not; `half` does the first half of it, where halves exist."""
        raise NotImplementedError

    @property
    def dead(self) -> bool:
        return False

    @property
    def location(self) -> str:
        return self._store.location

    @property
    def parallel_reads(self) -> int:
        return self._store.parallel_reads

    def names(self, folder: str = "") -> Iterator[str]:
        return self.perform(Operation(kind="names", name=folder), lambda: iter(list(self._store.names(folder))))

    def open(self, name: str) -> Reader:
        reader = self.perform(Operation(kind="open", name=name), lambda: self._store.open(name))
        return _WatchedReader(self, name, reader)

    def write(self, name: str, *, num_bytes: int) -> AbstractContextManager[Writer]:
        return _WatchedWriter(self, name, self._store.write(name, num_bytes=num_bytes))

    def create(self, name: str, data: bytes) -> None:
        operation = Operation(kind="create", name=name, num_bytes=len(data))
        self.perform(operation, lambda: self._store.create(name, data))

    def delete(self, name: str) -> None:
        self.perform(Operation(kind="delete", name=name), lambda: self._store.delete(name))


class _WatchedReader:
    def __init__(self, watched: Watched, name: str, reader: Reader) -> None:
        self._watched = watched
        self._name = name
        self._reader = reader

    @property
    def size(self) -> int:
        return self._reader.size

    def read_into(self, buffer: memoryview, start: int) -> None:
        operation = Operation(kind="read_into", name=self._name, num_bytes=buffer.nbytes)
        self._watched.perform(operation, lambda: self._reader.read_into(buffer, start))

    def close(self) -> None:
        self._reader.close()


class _WatchedWriter:
    def __init__(self, watched: Watched, name: str, context: AbstractContextManager[Writer]) -> None:
        self._watched = watched
        self._name = name
        self._context = context
        self._open = False

    def __enter__(self) -> "_WatchedWriter":
        def begin() -> None:
            self._writer = self._context.__enter__()
            self._open = True

        try:
            self._watched.perform(Operation(kind="begin", name=self._name), begin)
        except BaseException as error:
            self._leave(error)  # dead after it began: nobody else will give the descriptor back
            raise
        return self

    def write(self, data: memoryview) -> None:
        def half() -> None:
            self._writer.write(data.cast("B")[: data.nbytes // 2] if data.nbytes else data)

        operation = Operation(kind="write", name=self._name, num_bytes=data.nbytes)
        self._watched.perform(operation, lambda: self._writer.write(data), half)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave(error)
            return

        def end() -> None:
            self._open = False
            self._context.__exit__(None, None, None)

        try:
            self._watched.perform(Operation(kind="end", name=self._name), end)
        except BaseException as stop:
            self._leave(stop)
            raise

    def _leave(self, error: BaseException) -> None:
        if self._open:
            self._open = False
            if self._watched.dead and not isinstance(error, Died):
                error = Died("the process died while another of its threads had this file open")
            self._context.__exit__(type(error), error, error.__traceback__)


class Counting(Watched):
    """Counts operations and their bytes by kind, those that fail included."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self.operations: list[Operation] = []
        """All of them, in the order in which they began."""

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        with self._lock:
            self.operations.append(operation)
        return act()

    @property
    def num_operations(self) -> Counter[str]:
        """By kind."""
        return Counter(operation.kind for operation in self.operations)

    @property
    def num_bytes(self) -> Counter[str]:
        """Asked for or given, by kind ("read_into", "write", "create")."""
        total: Counter[str] = Counter()
        for operation in self.operations:
            total[operation.kind] += operation.num_bytes
        return total


class DyingAt(Watched):
    """The process dies at the n-th operation: that and every later one raise `Died`.

    `mode`: "before" the operation is done, "after" it, or, of a write of data, "half" way (other operations: before).
    """

    def __init__(self, store: Store, n: int, *, mode: Mode = "before") -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._left = n
        self._mode = mode
        self._dead = False

    @property
    def dead(self) -> bool:
        """Whether the n-th operation has come."""
        return self._dead

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        with self._lock:
            if self._dead:
                raise Died(f"dead before {operation.kind} {operation.name}")
            self._left -= 1
            if self._left > 0:
                last = False
            else:
                last = self._dead = True
        if not last:
            return act()
        if self._mode == "after":
            act()
        elif self._mode == "half" and half is not None:
            half()
        self.die(operation)
        raise Died(f"died {self._mode} {operation.kind} {operation.name}")

    def die(self, operation: Operation) -> None:
        """What kills; `Died` is raised after it."""


class _ReallyDyingAt(DyingAt):
    def die(self, operation: Operation) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def really_dying(store: Store, n: int, *, mode: Mode = "before") -> Store:
    """`DyingAt`, but the process is killed by SIGKILL."""
    return _ReallyDyingAt(store, n, mode=mode)


class FailingAt(Watched):
    """The n-th operation raises `error` instead of being done; others work. for_ever: from it on nothing is written."""

    def __init__(self, store: Store, n: int, error: OSError, *, for_ever: bool = False) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._left = n
        self._error = error
        self._for_ever = for_ever

    @property
    def failed(self) -> bool:
        """Whether the n-th operation has come."""
        return self._left <= 0

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        with self._lock:
            self._left -= 1
            fails = self._left == 0
            if self._for_ever:
                fails = self._left <= 0 and operation.kind in WRITING
        if fails:
            raise self._error
        return act()


WRITING = ("begin", "write", "end", "create")


class Hooked(Watched):
    """Calls a function before each operation, which may wait, or raise, and one after it."""

    def __init__(
        self,
        store: Store,
        before: Callable[[Operation], object] = lambda operation: None,
        after: Callable[[Operation], object] = lambda operation: None,
    ) -> None:
        super().__init__(store)
        self._before = before
        self._after = after

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        self._before(operation)
        result = act()
        self._after(operation)
        return result


class Gate:
    """Operations of these kinds wait while it is closed. It is open at first: savers look at the storage when made."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self._open = threading.Event()
        self._open.set()
        self.open, self.close = self._open.set, self._open.clear

    def __call__(self, operation: Operation) -> None:
        if operation.kind in self._kinds:
            assert self._open.wait(60)


def raising(number: int, *kinds: str) -> Callable[[Operation], None]:
    """Operations of these kinds fail with this errno."""

    def fail(operation: Operation) -> None:
        if operation.kind in kinds:
            raise OSError(number, os.strerror(number))

    return fail
