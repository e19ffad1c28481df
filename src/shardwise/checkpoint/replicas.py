"""Replicas: saves of a run in the memory of its hosts, from which it goes on when a host or a rank is lost.

    host A   ranks 0 1 --> keeper A: files of 0 1, and of 2 3        host B is lost: keeper A has all files.
    host B   ranks 2 3 --> keeper B: files of 2 3, and of 0 1        The run starts again on A and a new host C,
                                                                     and C's ranks read from keeper A

A lost peer ends all ranks, and the launcher starts them again. So what is to survive is held by another process on
each host, its keeper. A replica is a save like any other whose store is the keepers' memory: it is written from a
snapshot while training goes on, is committed as a whole, and loads into any layout. Its time line::

    call of save      0           n                        2n
    memory            copy 0      0 is whole, copy n ..    n is whole, 0 is removed, copy 2n ..

At every instant one replica is whole, and there are two at most. A keeper holds twice the files of the ranks of its
host, and twice those of the host before it.
"""

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from shardwise.checkpoint.background import AsyncSaver
from shardwise.checkpoint.keeper_store import KeeperStore
from shardwise.checkpoint.manifest import Head
from shardwise.checkpoint.saves import clean_up, folder_of, list_saves, prune, read_head, remove_save, storing
from shardwise.checkpoint.snapshots import SnapshotCounters
from shardwise.checkpoint.states import Positioned, State
from shardwise.checkpoint.stores import Address, Store, refusals, store_of
from shardwise.comm import Channel, default_channel
from shardwise.comm.agreement import a_list, aborting, agreed, json_as, understood
from shardwise.comm.handshake import key_of, secret_of_the_run
from shardwise.comm.own_host import OwnHost
from shardwise.errors import CheckpointError
from shardwise.keepers.keeper_host import KeeperAddress, OwnKeeper, socket_name

_SECONDS_TO_FINISH = 5.0
"""After an error in the program a copy under way may take so long: the host that it goes to may be the lost one."""
_KEEPER = "the keeper of replicas on this host"


class Replicas:
    """Copies of a run in the memory of its hosts: each rank's part is on its own host and on a buddy host.

    path: of the run's saves, as for `save`. It names the run, and needs not exist. every: calls of `save` from one copy
    to the next. channel: the ranks of the run; default: see `default_channel`. keep_seconds: how long a host keeps its
    memory when ranks were lost and none came back. timeout_seconds: how long a host may be silent in a copy.
    interface, ports: where keepers listen to other hosts, as for `processes`; with one host they do not.

    Opening it is a collective call. It starts a small process on each host, the keeper, which ends with the run: at
    once when all ranks leave the context without an error, or by Ctrl-C. Ranks that are started again with the same
    path find it. Use it as a context, and by one thread. Raises CheckpointError on all ranks alike.

    >>> with Replicas("runs/demo/checkpoints", every=10) as replicas:      # doctest: +SKIP
    ...     if (newest := replicas.newest()) is not None:
    ...         load(newest, engine)
    ...     replicas.save(engine, extra={"step": 10})
    """

    def __init__(
        self,
        path: Address,
        *,
        every: int,
        channel: Channel | None = None,
        keep_seconds: float = 600.0,
        timeout_seconds: float = 60.0,
        interface: str | None = None,
        ports: str | None = None,
    ) -> None:
        self._path = path
        self._every = every
        self._num_calls = 0
        self._blocked_seconds = 0.0
        self._own_channel = default_channel() if channel is None else None
        opened = channel if channel is not None else self._own_channel
        assert opened is not None
        self._channel: Channel = opened
        self._keeper: OwnKeeper | None = None
        self._opened: KeeperStore | None = None
        try:
            with aborting(self._channel, "the opening of replicas"):
                self._open(keep_seconds, timeout_seconds, interface, ports)
        except BaseException:
            # No rank trains on these: what an earlier program has left waits for the next start.
            if self._opened is not None:
                self._opened.close()
            if self._keeper is not None:
                self._keeper.close()
            if self._own_channel is not None:
                self._own_channel.close()
            raise

    def _open(self, keep_seconds: float, timeout_seconds: float, interface: str | None, ports: str | None) -> None:
        channel = self._channel
        with agreed(channel, purpose="hosts of replicas") as agreement:
            if type(self._every) is not int or self._every < 1:
                raise CheckpointError(f"every is {self._every!r}; give a whole number from 1 on")
            if sys.platform != "linux":
                raise CheckpointError("replicas need Linux: a keeper is found by the name of an abstract socket")
            # The words of rank 0 count: a relative path may lead elsewhere on another host.
            place = store_of(self._path).location
            # Programs are in the order of their starts, as the clocks of hosts have it.
            started = f"{time.time_ns():020d} {secrets.token_hex(16)}"
            agreement.value = json.dumps([_host().pack(), place, started]).encode()
        facts = understood(agreement.values, _host_in, purpose="hosts of replicas")
        _, self._place, session = facts[0]
        every_host = [host for host, _, _ in facts]
        hosts = list(dict.fromkeys(each.kernel for each in every_host))
        kernel = every_host[channel.rank].kernel
        own, self._num_hosts = hosts.index(kernel), len(hosts)
        leads = [each.kernel for each in every_host].index(kernel) == channel.rank
        name = socket_name(self._place, kernel)
        # One rank of each host starts the keeper. The others wait until it has, for they would start more.
        with agreed(channel, purpose="keepers of replicas") as agreement, refusals(_KEEPER):
            # What was sent is not the key: who only reads along lacks the secret of the run, if there is one.
            key = key_of(session.encode(), secret_of_the_run(os.environ))
            if leads:
                self._keeper = OwnKeeper(name, session, key=key, starts=True, patience_seconds=keep_seconds)
                there = KeeperAddress()
                if self._num_hosts > 1:
                    there = self._keeper.listen(*every_host[channel.rank].listens_at(every_host, interface, ports))
                agreement.value = json.dumps([there.addresses, there.port, self._keeper.before]).encode()
        said = understood(agreement.values, _keeper_in, purpose="keepers of replicas")
        remote = [each for each in said if each is not None]
        newest = max(before for _, _, before in remote)
        with agreed(channel, purpose="owners of replicas"), refusals(_KEEPER):
            if leads:
                # It was away while the run went on elsewhere: what it has may be older than what others have.
                if self._owned.before != newest:
                    self._owned.clear()
            else:
                self._keeper = OwnKeeper(name, session, key=key, starts=False, patience_seconds=keep_seconds)
        keepers = [KeeperAddress(addresses=each, port=port, key=key) for each, port, _ in remote]
        keepers[own] = self._owned.here  # on its own host a keeper needs no TCP
        self._opened = KeeperStore(f"the replicas of {self._place}", keepers, own, timeout_seconds=timeout_seconds)
        with agreed(channel, purpose="replicas that are there") as agreement:
            if channel.rank == 0:
                agreement.value = str(self._tidy(keep_newest=True)).encode()
        (self._found,) = understood(agreement.values[:1], int, purpose="replicas that are there")
        self._saver = AsyncSaver(self._store, channel=channel, timeout_seconds=timeout_seconds)

    @property
    def words(self) -> str:
        """Where replicas are, and which loss they survive, in one line."""
        if self._num_hosts == 1:
            return "replicas: in memory of this host, the only one; they survive the loss of ranks, and not of the host"
        return f"replicas: in memory of {self._num_hosts} hosts, each rank's on two; they survive the loss of one host"

    @property
    def counters(self) -> SnapshotCounters:
        """Bytes that were copied so far on this rank, as of `AsyncSaver`."""
        return self._saver.counters

    @property
    def blocked_seconds(self) -> float:
        """How long calls of `save` took, all together."""
        return self._blocked_seconds

    @property
    def held_bytes(self) -> tuple[int, int]:
        """What the keeper of this host holds, and the most that it held, in bytes."""
        held = self._owned.held()
        return held["bytes"], held["peak_bytes"]

    @property
    def is_due(self) -> bool:
        """Whether the next call of `save` makes a copy; the same on all ranks."""
        return self._num_calls % self._every == 0

    def save(
        self,
        state: State,
        *,
        extra: Mapping[str, object] | None = None,
        step: int | None = None,
        data: Positioned | None = None,
    ) -> bool:
        """At the first call and each `every`th after it, begin a copy of `state`; returns whether it did.

        Arguments are as for `save`; the state may change as soon as this returns. All ranks call it together. Raises
        CheckpointError when the copy before failed, or this one cannot be begun; the last whole replica stays.
        """
        is_due = self.is_due
        self._num_calls += 1
        if not is_due:
            return False
        began = time.perf_counter()
        try:
            self.wait()
            # The copy before is whole, on two hosts: only now the one that it replaces goes.
            with agreed(self._channel, purpose="verdict on removing old replicas"):
                if self._channel.rank == 0:
                    prune(self._store, keep=1)
            self._saver.save(state, extra=extra, step=step, data=data)
        finally:
            self._blocked_seconds += time.perf_counter() - began
        return True

    def wait(self) -> None:
        """Wait for the copy under way: it is whole then. All ranks call this together; it raises what went wrong."""
        self._saver.wait()

    def newest(self) -> Address | None:
        """What the run goes on from: the newest whole replica, or the newest save in `path` where that is newer.

        Give it to `load`. None where there is neither. All ranks call this together, before the first `save`. By their
        steps the newer one is found, or by their times where one has no step.
        """
        with agreed(self._channel, purpose="newest of replicas and saves", only=0) as agreement:
            if self._channel.rank == 0:
                replica = self._found and read_head(self._store, self._found)
                saved = _newest_save(store_of(self._path))
                wins = not replica or (saved is not None and _is_newer(saved[1], replica))
                number = saved[0] if wins and saved is not None else self._found
                agreement.value = json.dumps([bool(wins), number if saved is not None or not wins else 0]).encode()
        form = json_as(tuple[bool, int])
        ((is_saved, number),) = understood(agreement.values[:1], form, purpose="newest of replicas and saves")
        if not is_saved:
            return self._store.within(folder_of(number).rstrip("/"))
        if not number:
            return None
        if isinstance(self._path, str | os.PathLike):
            return f"{os.fspath(self._path).rstrip('/')}/{folder_of(number).rstrip('/')}"
        return self._path

    def forget(self) -> None:
        """Remove all replicas: what comes is another run. All ranks call this together, before the first `save`."""
        with agreed(self._channel, purpose="verdict on removing all replicas", only=0):
            if self._channel.rank == 0:
                self._tidy(keep_newest=False)
        self._found = 0

    def close(self) -> None:
        """Wait for the copy under way, and end the keepers: the run has ended well."""
        try:
            self._saver.close()
        finally:
            self._owned.end()
            self._store.close()
            if self._own_channel is not None:
                self._own_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # A host that is gone answers nothing; without this the end would wait for it.
        timer = threading.Timer(_SECONDS_TO_FINISH, self._store.cut)
        timer.daemon = True
        timer.start()
        try:
            self._saver.__exit__(kind, error, traceback)
        finally:
            timer.cancel()
            # Who stops a run by hand will hardly start it again in the next minutes, and wants the memory back.
            if isinstance(error, KeyboardInterrupt):
                self._owned.end(stops=True)
            else:
                self._owned.close()
            self._store.close()
            if self._own_channel is not None:
                self._own_channel.close()

    @property
    def _store(self) -> KeeperStore:
        assert self._opened is not None
        return self._opened

    @property
    def _owned(self) -> OwnKeeper:
        assert self._keeper is not None
        return self._keeper

    def _tidy(self, *, keep_newest: bool) -> int:
        """Remove all but the newest whole replica; its number, or 0.

        What a lost host had cannot come back: a replica with missing files would keep its memory and never load.
        """
        with storing(self._store, "", "tidied"):
            listing = list_saves(self._store)
            whole = [number for number in listing.committed if keep_newest and self._is_whole(number)]
            newest = max(whole, default=0)
            for number in listing.committed:
                if number != newest:
                    remove_save(self._store, listing, number)
            clean_up(self._store, list_saves(self._store), listing.next_number)
        return newest

    def _is_whole(self, number: int) -> bool:
        try:
            return list_saves(self._store).is_complete(number, read_head(self._store, number))
        except CheckpointError:
            return False


def _host_in(answer: bytes) -> tuple[OwnHost, str, str]:
    """The host of a rank, the place of its saves, and the start of its program."""
    host, place, started = a_list(answer)
    return OwnHost.unpack(host), str(place), str(started)


def _keeper_in(answer: bytes) -> tuple[tuple[str, ...], int, str] | None:
    """Where the keeper of a host is reached, and what it has; None from a rank that leads no host."""
    if not answer:
        return None
    addresses, port, before = a_list(answer)
    if type(port) is not int:
        raise TypeError("no port")
    return tuple(map(str, addresses)), port, str(before)


def _host() -> OwnHost:
    with refusals("the system does not say which host this is"):
        return OwnHost.here()


def _newest_save(store: Store) -> tuple[int, Head] | None:
    """The newest committed save whose manifest can be read."""
    try:
        numbers = list_saves(store).committed
    except OSError:  # such as a file in its place: the first save will say so
        return None
    for number in reversed(numbers):
        with contextlib.suppress(CheckpointError):
            return number, read_head(store, number)
    return None


def _is_newer(saved: Head, replica: Any) -> bool:
    if saved.step is None or replica.step is None:
        return bool(saved.written_at > replica.written_at)
    return bool(saved.step > replica.step)
