"""Store doubles: they count the operations of a store, and let one of them fail or be the last of a process.

Operations: "names", "open", "read_into", "begin" (entering the context of `write`), "write", "end" (leaving it without
an error), "create", "delete". They are counted from 1 over all threads.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from shardwise.checkpoint.stores import Reader, Store, Writer

T = TypeVar("T")
Mode = Literal["before", "after", "half"]
WRITING = ("begin", "write", "end", "create")


class Died(BaseException):
    """Stands for the death of the process: nothing in it may do anything to the store any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    kind: str
    name: str
    num_bytes: int = 0


class Hooked:
    """A store that calls a function before each operation, which may wait, or raise, and one after it."""

    dead = False

    def __init__(
        self,
        store: Store,
        before: Callable[[Operation], object] = lambda operation: None,
        after: Callable[[Operation], object] = lambda operation: None,
    ) -> None:
        self._store = store
        self._before = before
        self._after = after
        self._lock = threading.Lock()

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        """All operations pass through it: `half` does the first half of `act`, where halves exist."""
        self._before(operation)
        result = act()
        self._after(operation)
        return result

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
        return _HookedReader(self, name, reader)

    @contextmanager
    def write(self, name: str, *, num_bytes: int) -> Iterator[Writer]:
        context = self._store.write(name, num_bytes=num_bytes)
        entered: list[Writer] = []

        def end() -> None:
            entered.clear()
            context.__exit__(None, None, None)

        try:
            self.perform(Operation(kind="begin", name=name), lambda: entered.append(context.__enter__()))
            yield _HookedWriter(self, name, entered[0])
            self.perform(Operation(kind="end", name=name), end)
        except BaseException as error:
            if entered:  # also if it died after it began: nobody else will give the descriptor back
                stop = error
                if self.dead and not isinstance(error, Died):
                    stop = Died("the process died while another of its threads had this file open")
                context.__exit__(type(stop), stop, stop.__traceback__)
            raise

    def create(self, name: str, data: bytes) -> None:
        operation = Operation(kind="create", name=name, num_bytes=len(data))
        self.perform(operation, lambda: self._store.create(name, data))

    def delete(self, name: str) -> None:
        self.perform(Operation(kind="delete", name=name), lambda: self._store.delete(name))


class _HookedReader:
    def __init__(self, hooked: Hooked, name: str, reader: Reader) -> None:
        self._hooked = hooked
        self._name = name
        self._reader = reader
        self.size = reader.size
        self.close = reader.close

    def read_into(self, buffer: memoryview, start: int) -> None:
        operation = Operation(kind="read_into", name=self._name, num_bytes=buffer.nbytes)
        self._hooked.perform(operation, lambda: self._reader.read_into(buffer, start))


class _HookedWriter:
    def __init__(self, hooked: Hooked, name: str, writer: Writer) -> None:
        self._hooked = hooked
        self._name = name
        self._writer = writer

    def write(self, data: memoryview) -> None:
        def half() -> None:
            self._writer.write(data.cast("B")[: data.nbytes // 2] if data.nbytes else data)

        operation = Operation(kind="write", name=self._name, num_bytes=data.nbytes)
        self._hooked.perform(operation, lambda: self._writer.write(data), half)


class Counting(Hooked):
    """Counts operations, those that fail included."""

    def __init__(self, store: Store) -> None:
        self.operations: list[Operation] = []
        """All of them, in the order in which they began."""
        super().__init__(store, before=self.operations.append)

    @property
    def num_operations(self) -> Counter[str]:
        """By kind."""
        return Counter(operation.kind for operation in self.operations)


class DyingAt(Hooked):
    """The process dies at the n-th operation: that and every later one raise `Died`.

    `mode`: "before" the operation is done, "after" it, or, of a write of data, "half" way (other operations: before).
    """

    def __init__(self, store: Store, n: int, *, mode: Mode = "before") -> None:
        super().__init__(store)
        self._left = n
        self._mode = mode

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        with self._lock:
            if self.dead:
                raise Died(f"dead before {operation.kind} {operation.name}")
            self._left -= 1
            self.dead = last = self._left <= 0
        if not last:
            return act()
        if self._mode == "after":
            act()
        elif self._mode == "half" and half is not None:
            half()
        self.die()
        raise Died(f"died {self._mode} {operation.kind} {operation.name}")

    def die(self) -> None:
        """What kills; `Died` is raised after it."""


class _ReallyDyingAt(DyingAt):
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def really_dying(store: Store, n: int, *, mode: Mode = "before") -> Store:
    """`DyingAt`, but the process is killed by SIGKILL."""
    return _ReallyDyingAt(store, n, mode=mode)


class FailingAt(Hooked):
    """The n-th operation raises `error` instead of being done; others work. for_ever: from it on nothing is written."""

    def __init__(self, store: Store, n: int, error: OSError, *, for_ever: bool = False) -> None:
        super().__init__(store, before=self._fail)
        self._left = n
        self._error = error
        self._for_ever = for_ever

    @property
    def failed(self) -> bool:
        """Whether the n-th operation has come."""
        return self._left <= 0

    def _fail(self, operation: Operation) -> None:
        with self._lock:
            self._left -= 1
            fails = self.failed and operation.kind in WRITING if self._for_ever else self._left == 0
        if fails:
            raise self._error


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
