"""Saving in the background: training waits for one copy in CPU memory, and on a device for none.

[1] describe   as in `saving`, on the caller's thread, because it talks to the other ranks
[2] snapshot   what this rank writes is copied into memory that all saves use, one after the other (`snapshots`)
[3] write      a thread writes the file, and leaves a report in the store: threads never use the channel
[4] commit     rank 0's thread creates the manifest when all reports are there, and removes older saves

    rank 0   train   [1] [2]   train ...............   wait   verdict by all
               thread       [3] . looks for reports . [4]
    rank 1   train   [1] [2]   train ...............   wait   verdict by all
               thread       [3] 5e1f09ab-rank00001.report.json

The channel belongs to training: two threads of one rank that both talked to their peers would mix up their messages.
"""

import atexit
import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from shardwise.checkpoint.arrangement import FileLayout
from shardwise.checkpoint.commit import SaveReport, Written, check_shared_storage, commit, discard
from shardwise.checkpoint.full_tensors import stream_whole
from shardwise.checkpoint.safetensors_files import FileFilling
from shardwise.checkpoint.saves import storing
from shardwise.checkpoint.saving import Arguments, Prepared, Retention, SaveMemory, prepare
from shardwise.checkpoint.snapshots import Snapshot, SnapshotCounters
from shardwise.checkpoint.state_pieces import Held
from shardwise.checkpoint.states import SomeData, State, wrong_rewrite
from shardwise.checkpoint.stores import Address, delete_all, read_whole
from shardwise.comm import Channel, default_channel
from shardwise.comm.agreement import aborting, agreed
from shardwise.comm.given_channel import channel_of
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.rewrite import Rewrite

_POLL_SECONDS, _MOST_POLL_SECONDS = 0.02, 0.5
"""Between two listings, which are requests on object stores: first, and at most."""

_MEETING_SECONDS = 1.0
"""Ranks that wait for a save tell each other so often that they do."""

_ENDED, _FAILED = b"ended", b"failed"


class AsyncSaver:
    """Saves to one folder while training goes on. One save is under way at a time, and one snapshot in memory.

    path, rewrite, channel: as for `save`. layout: of the files; for "whole" the tensors are brought together before
    `save` returns, and only writing happens in the background.
    timeout_seconds: how long rank 0 waits until it sees what the other ranks have written, once all have ended.
    keep, keep_every: as for `save`; older saves are removed in the background too, when one is committed.

    Opening it with a channel of several ranks is a collective call: rank 0 writes a small file, and all look for it.
    All raise CheckpointError if one does not find it, or the write fails. Without one, the first `save` does.

    `counters` says how many bytes callers of `save` have waited for, and how many devices have copied meanwhile.

    It is used by one thread, and not after a fork. Use it as a context: leaving waits for the save under way, and
    raises what went wrong in it. All ranks raise the errors of a save alike, at the next `save`, `check`, `wait` or
    `close`, which all call together. An error after the last of these calls is printed when the program ends.

    >>> with AsyncSaver("runs/demo/checkpoints") as saver:      # doctest: +SKIP
    ...     saver.save(engine, extra={"step": 10})
    """

    def __init__(
        self,
        path: Address,
        *,
        layout: FileLayout = "pieces",
        rewrite: Rewrite | None = None,
        channel: Channel | None = None,
        timeout_seconds: float = 600.0,
        keep: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        self._retention = Retention(keep, keep_every)
        if problems := wrong_rewrite(rewrite):
            raise CheckpointError(*problems)
        self._path = path
        self._given = channel
        self._own: Channel | None = None
        """The default channel, from the first save on that needs it."""
        self._channel: Channel | None = channel
        """Of the save under way."""
        self._layout = layout
        self._rewrite = rewrite
        self._timeout_seconds = timeout_seconds
        self._snapshot = Snapshot()
        self._memory = SaveMemory()
        self._task: _SaveTask | None = None
        self._checked: Channel | None = None
        """Whose ranks are known to share the storage."""
        if channel is not None:
            self._open(channel)

    @property
    def counters(self) -> SnapshotCounters:
        """Bytes that were copied so far on this rank."""
        return self._snapshot.counters

    def save(
        self,
        state: State,
        *,
        extra: Mapping[str, object] | None = None,
        step: int | None = None,
        data: SomeData | None = None,
    ) -> None:
        """Begin to save `state` as it is now; arguments as for `save`. Waits for the save before it.

        The state may change as soon as this returns. Raises CheckpointError when the save before it failed (this one
        is not begun then), or when this one cannot be begun.
        """
        # There is one snapshot, and the save before still reads it.
        self.wait()
        # An engine brings its channel; it may be another than that of the save before.
        channel = self._channel_for(state)
        if channel is not self._channel:
            # What is remembered was agreed with the ranks of the other channel.
            self._channel, self._memory = channel, SaveMemory()
        self._open(channel)
        with aborting(channel, "the snapshot of a save"):
            arguments = self._retention.counted(Arguments(extra, step, self._layout, self._rewrite, data), state)
            prepared = prepare(channel, self._path, state, arguments, self._memory)
            self._take_snapshot(prepared, channel)
        prepared = replace(prepared, held=Held(tensors={}))  # the snapshot is all that is needed now
        self._task = _SaveTask(prepared, channel, self._snapshot, self._timeout_seconds, self._retention)
        self._task.start()

    def wait(self) -> SaveReport | None:
        """Wait until the save under way is committed; its report, or None when there is none.

        Raises CheckpointError, the same on all ranks, when it failed; older saves are untouched.
        """
        task, self._task = self._task, None
        channel = self._channel
        if task is None or channel is None:
            return None
        # Rank 0's thread waits for the reports of the others, which wait for no rank. Here it learns which ranks have
        # ended without a report (the disk is full) or are lost. Ranks meet again and again, so that none seems stuck.
        try:
            states = [b""]
            pause_seconds = 0.0  # all have begun before any of them waits
            while any(state != _ENDED for state in states):
                task.join(pause_seconds)
                pause_seconds = _MEETING_SECONDS
                state = b"" if task.is_alive() else _ENDED
                # Rank 0 is left out: its failure ends its task, and the others wait for nothing that it does.
                failed = channel.rank > 0 and not task.is_alive() and task.refusal is not None
                states = channel.exchange(_FAILED if failed else state, purpose="a save in the background")
                if all(states[1:]):
                    task.others_have_ended()
                if _FAILED in states:
                    # Without it rank 0 would wait for the report of a rank that will never write one.
                    task.give_up_waiting()
                    states = [_ENDED if each == _FAILED else each for each in states]
        except ShardwiseError:
            task.give_up_waiting()
            raise
        finally:
            # Whatever happened, the buffer of the snapshot is free again from here on, and the next save may fill it.
            task.join()
            task.collect()
        try:
            # A rank that met the cause raises it. Those that only heard of one are asked where no rank has met it.
            with agreed(channel, purpose="verdict on a save in the background") as agreement:
                if task.refusal is not None and not task.is_echo:
                    raise task.refusal
                agreement.value = b"echo" if task.is_echo else b""
            if any(agreement.values):
                with agreed(channel, purpose="echoes of a save in the background"):
                    if task.refusal is not None:
                        raise task.refusal
        except CheckpointError:
            task.discard(channel.rank or None)  # no rank writes any more: rank 0 removes what those left that are lost
            raise
        return task.prepared.report(channel.rank)

    def check(self) -> SaveReport | None:
        """Raise what went wrong in the save under way, if something did by now; its report, if it is committed.

        None where there is no save under way, or it still is: this waits for no disk. One exchange then, so that a loop
        may call it after each step. All ranks call it together.
        """
        task, channel = self._task, self._channel
        if task is None or channel is None:
            return None
        state = b"" if task.is_alive() else (_ENDED if task.refusal is None else _FAILED)
        states = channel.exchange(state, purpose="whether a save in the background has ended")
        return self.wait() if _FAILED in states or all(states) else None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save under way will not be made. No message: other ranks may not know it."""
        task = self._task
        return task is not None and not task.is_alive() and task.refusal is not None

    def close(self) -> None:
        """Wait for the save under way, and give back the snapshot. The saver is of no use afterwards."""
        try:
            self.wait()
        finally:
            self._snapshot.release()
            if self._own is not None:
                self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._task is not None:
            # Ranks may have ended: a save whose reports are all there is committed, others are not waited for.
            self._task.give_up_waiting()
            self._task.join()
            if self._task.refusal is not None:
                error.add_note(f"shardwise: {self._task.complaint}")
            self._task.collect()
            self._task = None

    def _channel_for(self, state: State) -> Channel:
        """The channel given, or that of the state, or the default one."""
        if (known := self._given or channel_of(state)) is not None:
            return known
        if self._own is None:
            self._own = default_channel()
        return self._own

    def _open(self, channel: Channel) -> None:
        """Find out, once, whether the ranks share the storage."""
        if channel is self._checked or channel.size == 1:
            return
        with aborting(channel, "a look at the storage of saves"):
            check_shared_storage(self._path, channel, timeout_seconds=self._timeout_seconds)
        self._checked = channel

    def _take_snapshot(self, prepared: Prepared, channel: Channel) -> None:
        file = prepared.arrangement.file(channel.rank)
        num_bytes = sum(file.sizes)
        # Bringing tensors together is talk between ranks, so the caller's thread does it, in CPU memory.
        if self._layout == "whole":
            self._snapshot.begin(num_bytes, from_device=False)
            stream_whole(channel, prepared.arrangement, prepared.held, self._snapshot)
        else:
            on_device = any(tensor.device.type != "cpu" for tensor in prepared.held.tensors.values())
            self._snapshot.begin(num_bytes, from_device=on_device)
            self._snapshot.take(file.pieces, prepared.held)


class _EchoError(Exception):
    """A save was not made because another rank, which says more, has failed or has ended."""


class _SaveTask(threading.Thread):
    """One save in the background, seen from one rank."""

    def __init__(
        self,
        prepared: Prepared,
        channel: Channel,
        snapshot: Snapshot,
        timeout_seconds: float,
        retention: Retention,
    ) -> None:
        super().__init__(name="shardwise-save")
        self.prepared = prepared
        self._retention = retention
        self._is_committed = False
        self.refusal: ShardwiseError | None = None
        self.is_echo = False
        """Whether it failed because another rank did."""
        self._store = prepared.store
        self._rank = channel.rank
        self._snapshot = snapshot
        self._timeout_seconds = timeout_seconds
        self._given_up = threading.Event()
        self._deadline = math.inf
        """When rank 0 has waited long enough for reports; it is set once no other rank is at work."""
        self._collected = False
        # Not a daemon: the interpreter waits for it at exit, and an error that no call has raised by then is printed.
        atexit.register(self._tell)

    def collect(self) -> None:
        """The caller that started it knows how it ended."""
        self._collected = True
        atexit.unregister(self._tell)

    def _tell(self) -> None:
        if self.refusal is not None and not self._collected:
            print(f"shardwise: {self.complaint}", file=sys.stderr)

    @property
    def complaint(self) -> str:
        """What went wrong. It is printed where no call has raised it."""
        what = "older saves were not removed" if self._is_committed else "a save in the background was not made"
        return f"{what}: {self.refusal}"

    def give_up_waiting(self) -> None:
        """Do not wait for reports that are not there yet."""
        self._given_up.set()

    def others_have_ended(self) -> None:
        """The reports of the other ranks are written: they are there now, or as soon as the storage shows them."""
        self._deadline = min(self._deadline, time.monotonic() + self._timeout_seconds)

    def discard(self, rank: int | None) -> None:
        """Remove what `rank` (None: any rank) has written, unless it was committed."""
        discard(self._store, self.prepared.attempt, rank)

    def run(self) -> None:
        """On the thread: write, and leave a report or commit."""
        try:
            written = self._write()
            self._leave({"checksums": written.pack().hex()})
            # The other ranks are done: their reports are in the store, and what they wait for is the verdict.
            if self._rank == 0:
                self._commit(written)
        except ShardwiseError as error:
            self.refusal = error
        except _EchoError as error:
            self.refusal, self.is_echo = CheckpointError(str(error)), True
        except BaseException as error:  # no caller of a thread would see it
            self.refusal = CheckpointError(f"{type(error).__name__} while saving in the background: {error}")
        if self.refusal is None:
            self.collect()  # there is nothing to tell
        else:
            # The store itself may have failed. Then rank 0 hears of it over the channel, when ranks meet next.
            with contextlib.suppress(CheckpointError):
                self._leave({"failed": str(self.refusal)})
            self.discard(self._rank)

    def _write(self) -> Written:
        """This rank's file, out of the snapshot."""
        # First of all: the next save may use the memory when this one has failed.
        self._snapshot.wait()
        attempt, file = self.prepared.attempt, self.prepared.arrangement.file(self._rank)
        if not file.pieces:
            return Written([], samples=self.prepared.samples())
        name = attempt.folder + attempt.data_file(self._rank)
        with storing(self._store, name, "written"), self._store.write(name, num_bytes=file.num_bytes) as writer:
            filling = FileFilling(file, writer, block_bytes=self.prepared.description.block_bytes)
            # The same bytes in the same order as a save at once: the two write the same files.
            for chunk in self._snapshot.chunks():
                filling.write(chunk)
            filling.flush()
        return Written(filling.checksums, samples=self.prepared.samples())

    def _leave(self, report: Mapping[str, str]) -> None:
        """Tell rank 0, through the store, how it went."""
        if not self._rank:
            return
        name = self.prepared.attempt.folder + self.prepared.attempt.report_file(self._rank)
        with storing(self._store, name, "written"):
            self._store.create(name, json.dumps(report).encode())

    def _commit(self, own: Written) -> None:
        """On rank 0: wait for the others, then make the save visible."""
        arrangement, block_bytes = self.prepared.arrangement, self.prepared.description.block_bytes
        written = [own]
        pause_seconds = _POLL_SECONDS

        def again() -> bool:
            nonlocal pause_seconds
            if not threading.main_thread().is_alive():  # no rank will say when the others have ended
                self.others_have_ended()
            if self._given_up.is_set() or time.monotonic() > self._deadline:
                return False
            self._given_up.wait(pause_seconds)
            pause_seconds = min(_MOST_POLL_SECONDS, 1.2 * pause_seconds)
            return True  # also when given up just now: what is there by then counts

        # A report of failure ends the wait as well: the file of that rank will not come.
        for rank, report in enumerate(self._reports(again), 1):
            if "failed" in report:
                raise _EchoError(f"rank {rank}: {report['failed']}")
            checksums = bytes.fromhex(report["checksums"])
            written.append(Written.unpack(checksums, arrangement.file(rank), block_bytes))
        self.others_have_ended()  # all have reported
        attempt = self.prepared.attempt
        saves = commit(self._store, attempt, arrangement, written, self.prepared.description, again=again)
        self._is_committed = True
        with contextlib.suppress(OSError):  # the next save removes them
            delete_all(self._store, self._awaited())
        # In this thread and not in `wait`: with many ranks it takes a while, and training continues.
        self._retention.apply(self._store, saves)

    def _reports(self, again: Callable[[], bool]) -> list[dict[str, str]]:
        """What the other ranks have left, in rank order."""
        awaited = self._awaited()
        # One listing for all: on an object store a request per rank and pause would be many.
        while missing := set(awaited) - (self._names() if awaited else set()):
            if not again():
                late = f"{self._timeout_seconds:g} s have passed"
                why = "training stopped or a rank failed" if self._given_up.is_set() else late
                # A task that gave up has heard of a cause elsewhere, and the rank
                # that met it reports that one. A deadline is a cause of its own.
                kind = _EchoError if self._given_up.is_set() else CheckpointError
                raise kind(
                    f"{self._store.location}: {why}, and {', '.join(sorted(missing))} is not there. A rank has not "
                    "finished its file, or does not share this storage; nothing was committed"
                )
        return [json.loads(read_whole(self._store, name)) for name in awaited]

    def _awaited(self) -> list[str]:
        """The reports of the other ranks, in rank order."""
        attempt = self.prepared.attempt
        return [attempt.folder + attempt.report_file(rank) for rank in range(1, self.prepared.arrangement.num_ranks)]

    def _names(self) -> set[str]:
        folder = self.prepared.attempt.folder.rstrip("/")
        with storing(self._store, folder, "listed"):
            return set(self._store.names(folder))
