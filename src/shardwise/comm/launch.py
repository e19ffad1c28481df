"""Starts one process per rank on this host, watches them, and ends them together.

The launcher is one loop over a queue of events: ends of ranks, and signals to the launcher. Rank 2 of 4 fails::

    ranks 0 1 2 3 run                    wait for the first failure, without a deadline
    rank 2 ends with 1                   the others have `grace_seconds` to find out and say so
    ranks 0 and 1 end with PEER_FAILED   they only followed: the launcher looks for another culprit
    rank 3 hangs                         SIGTERM, 5 seconds, SIGKILL
    "rank 2 failed with exit code 1", its last lines, and exit code 1
"""

import collections
import contextlib
import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TypeAlias

from shardwise.launchers import ONE_REQUEST_SECONDS, thread_settings

PEER_FAILED = 3
"""Exit code of a rank that ended only because another one did; the launcher then looks for that other one."""

_INTERRUPTED = 128 + signal.SIGINT
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_KEPT_LINES = 200
SECONDS_TO_TERMINATE = 5.0
_SECRET_BYTES = 32


# In a process of its own, which becomes the rank: Python must not run between fork and exec, where a lock that another
# thread holds is never released. The second line finds a launcher that has died before.
_DIE_WITH_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that the kernel kills with the launcher, however that ends: PR_SET_PDEATHSIG with SIGKILL (Linux)."""


def _dying_with_launcher(command: Sequence[str]) -> list[str]:
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_LAUNCHER, str(os.getpid()), *command]


class _RankProcess:
    """One process. All but rank 0 speak into a pipe, and their last lines are kept."""

    def __init__(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        # Rank 0 has the terminal: what all ranks print alike is then there once, and in its own order.
        self.rank = rank
        self.lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        # A process group of its own: Ctrl-C reaches the launcher alone, which passes it on exactly once.
        self._process = subprocess.Popen(
            _dying_with_launcher(command),
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.STDOUT,
            process_group=0,
            text=True,
            errors="replace",
        )
        # Read all the time: a rank that prints into a full pipe would stop there.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as lines:
                self.lines.extend(lines)

    def report_end(self, events: "Events") -> None:
        """Put the rank and its return code into the queue once it has ended."""

        def wait() -> None:
            code = self._process.wait()
            # A descendant may hold the pipe open for longer; the rank's own words are there by then.
            self._reader.join(timeout=1.0)
            events.put((self, code))

        threading.Thread(target=wait, daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        self._process.send_signal(number)


Events: TypeAlias = "queue.SimpleQueue[tuple[_RankProcess, int] | int]"
"""Ranks that have ended with their return codes, and numbers of signals; a handler of signals may put them there."""


def launch(module: str | None, arguments: Sequence[str], *, num_processes: int, grace_seconds: float = 10.0) -> int:
    """Run `python -m module arguments` (`python arguments` without a module) as ranks 0 to `num_processes` - 1 here.

    Rank 0 has the terminal. What the others print is shown only if they fail first. When a rank fails, the others have
    `grace_seconds` to report themselves; then they are terminated. Ctrl-C goes once to each rank; they have as long.
    SIGTERM and SIGUSR1 go to each rank too, which may take its time to save; a second one terminates them.

    Returns the exit code: 0, or that of the first rank to fail (1 if a signal other than SIGTERM killed it). It is 130
    after Ctrl-C, and 128 + the number of a signal that stopped all.
    """
    events: Events = queue.SimpleQueue()
    with _reserved_port() as port, _stop_signals(events):
        command = [sys.executable, *(["-m", module] if module is not None else []), *arguments]
        ranks: list[_RankProcess] = []
        codes: dict[int, int] = {}
        stop = 0
        secret = secrets.token_hex(_SECRET_BYTES)
        try:
            for rank in range(num_processes):
                ranks.append(_RankProcess(rank, command, _environment(rank, num_processes, port, secret)))
                ranks[-1].report_end(events)
            stop = _collect(events, codes, num_processes, until_failure=True)
            # A run that is asked to stop may finish its update and save it: that takes as long as it takes.
            if stop:
                _pass_on(_passed_on(stop), ranks, events, codes, patience_seconds=math.inf)
            elif len(codes) < num_processes:
                stop = _collect(events, codes, num_processes, patience_seconds=grace_seconds)
        except KeyboardInterrupt:
            _pass_on(signal.SIGINT, ranks, events, codes, patience_seconds=grace_seconds)
            return _INTERRUPTED
        finally:
            # The codes up to here are the ranks' own words. Those of ranks that are ended now say only that they were.
            own_codes = dict(codes)
            _pass_on(signal.SIGTERM, ranks, events, codes, patience_seconds=SECONDS_TO_TERMINATE)
            _pass_on(signal.SIGKILL, ranks, events, codes, patience_seconds=SECONDS_TO_TERMINATE)
        # The exit code of a rank that failed while it saved comes before the signal that asked it to stop.
        as_asked = (0, PEER_FAILED, -_passed_on(stop), 128 + _passed_on(stop))
        if stop and all(code in as_asked for code in own_codes.values()):
            return 128 + stop
        return _verdict(ranks, own_codes)


def _passed_on(number: int) -> int:
    """What ranks are sent for a signal to us: a lost terminal is ours, and they would only die of it."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _collect(
    events: Events,
    codes: dict[int, int],
    num_processes: int,
    *,
    until_failure: bool = False,
    patience_seconds: float = math.inf,
) -> int:
    """Note the ends of ranks until all have ended, one has failed, or patience is over.

    Returns the number of a signal that asks to stop, as soon as one comes; else 0.
    """
    deadline = time.monotonic() + patience_seconds
    while len(codes) < num_processes and not (until_failure and any(codes.values())):
        left_seconds = deadline - time.monotonic()
        try:
            # In short waits: a signal that the kernel gives to another thread does not wake this one, which handles it.
            event = events.get(timeout=max(0.0, min(left_seconds, 1.0)))
        except queue.Empty:
            if left_seconds <= 1.0:
                return 0
            continue
        if isinstance(event, int):
            return event
        rank, code = event
        codes[rank.rank] = code
    return 0


def _pass_on(
    number: int,
    ranks: Sequence[_RankProcess],
    events: Events,
    codes: dict[int, int],
    *,
    patience_seconds: float,
) -> None:
    """Send a signal to the ranks that are left and wait for their end. A second signal to us ends the wait."""
    left = [rank for rank in ranks if rank.rank not in codes]
    for rank in left:
        rank.signal(number)
    if left:
        with contextlib.suppress(KeyboardInterrupt):
            _collect(events, codes, len(ranks), patience_seconds=patience_seconds)


def _verdict(ranks: Sequence[_RankProcess], codes: dict[int, int]) -> int:
    """The exit code of the whole, with a word on stderr about the rank that caused a failure."""
    failures = [rank for rank, code in codes.items() if code]  # in the order in which they ended
    if not failures:
        return 0
    # A signal before an exit code, and both before ranks that ended because of a peer; of equals the first.
    culprit = min(failures, key=lambda rank: (codes[rank] == PEER_FAILED, codes[rank] > 0))
    code = codes[culprit]
    if code < 0:
        print(f"rank {culprit} was killed by {signal.Signals(-code).name}", file=sys.stderr)
    elif code - 128 in _STOP_SIGNALS:
        if code != codes.get(0):
            print(f"rank {culprit} was stopped by {signal.Signals(code - 128).name}", file=sys.stderr)
        return code
    elif culprit and code != codes.get(0):
        print(f"rank {culprit} failed with exit code {code}", file=sys.stderr)
    # Wrong usage is found by all ranks alike, and rank 0 has said it.
    if culprit and not (code == codes.get(0) == 2):
        for line in ranks[culprit].lines:
            print(f"[rank {culprit}] {line.rstrip()}", file=sys.stderr)
    if code == -signal.SIGTERM:  # as a rank that has not come to handle it yet ends
        return 128 + signal.SIGTERM
    return 1 if code < 0 or code == PEER_FAILED else code


def _environment(rank: int, num_processes: int, port: int, secret: str) -> dict[str, str]:
    # Other users of this host can reach the store, but cannot read the environment of our processes.
    has_secret = not os.environ.keys().isdisjoint(("SHARDWISE_SECRET", "SHARDWISE_SECRET_FILE"))
    return {
        # By default each process would take all cores, and n of them would keep each other from working.
        **thread_settings(num_processes),
        **({} if has_secret else {"SHARDWISE_SECRET": secret}),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port for rank 0 to listen on: bound here, so that no other program gets it, but not listening, so that rank 0
    may.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


@contextlib.contextmanager
def _stop_signals(events: Events) -> Iterator[None]:
    """Turn signals that ask to stop into events, so that no rank outlives the launcher.

    A signal that is ignored (`nohup` ignores SIGHUP) stays ignored.
    """

    came_s = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal came_s
        if time.monotonic() - came_s > ONE_REQUEST_SECONDS:  # else ranks that save would be terminated
            came_s = time.monotonic()
            events.put(number)

    # Python sets handlers of signals in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
