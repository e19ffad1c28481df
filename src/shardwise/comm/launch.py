"""Starts one process per rank on this host, watches them, and ends them together."""

import collections
import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

PEER_FAILED = 3
"""Exit code of a rank that ended only because another one did; the launcher then looks for that other one."""

_INTERRUPTED = 128 + signal.SIGINT
_KEPT_LINES = 200
_SECONDS_TO_TERMINATE = 5.0


class _Stopped(BaseException):
    """SIGTERM or SIGHUP came to the launcher."""

    def __init__(self, number: int) -> None:
        self.number = number


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_launcher() -> None:
    """In the child, before it becomes a rank: a launcher that is killed outright leaves no ranks behind (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Rank:
    """One process. All but rank 0 speak into a pipe, of which the last lines are kept."""

    def __init__(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.rank = rank
        self.lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        # A process group of its own: Ctrl-C reaches the launcher alone, which passes it on exactly once.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.STDOUT,
            process_group=0,
            preexec_fn=_die_with_launcher,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as lines:
                self.lines.extend(lines)

    def report_end(self, ended: "queue.Queue[tuple[_Rank, int]]") -> None:
        """Put the rank and its return code into the queue once it has ended."""

        def wait() -> None:
            code = self._process.wait()
            # A descendant may hold the pipe open for longer; the rank's own words are there by then.
            self._reader.join(timeout=1.0)
            ended.put((self, code))

        threading.Thread(target=wait, daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        self._process.send_signal(number)


def launch(module: str | None, arguments: Sequence[str], *, num_processes: int, grace_seconds: float = 10.0) -> int:
    """Run `python -m module arguments` (`python arguments` without a module) as ranks 0 to `num_processes` - 1 here.

    Rank 0 has the terminal. What the others print is shown only if they fail first. When a rank fails, the others have
    `grace_seconds` to report themselves; then they are terminated. Ctrl-C goes once to each rank; they have as long.

    Returns the exit code: 0, or that of the first rank to fail (1 if a signal killed it), or 130 after Ctrl-C.
    """
    with _reserved_port() as port, _stop_signals():
        command = [sys.executable, *(["-m", module] if module is not None else []), *arguments]
        ended: queue.Queue[tuple[_Rank, int]] = queue.Queue()
        ranks: list[_Rank] = []
        codes: dict[int, int] = {}
        try:
            for rank in range(num_processes):
                ranks.append(_Rank(rank, command, _environment(rank, num_processes, port)))
                ranks[-1].report_end(ended)
            _collect(ended, codes, num_processes, patience_seconds=None)
            if len(codes) < num_processes:
                _collect(ended, codes, num_processes, patience_seconds=grace_seconds)
        except KeyboardInterrupt:
            _pass_on(signal.SIGINT, ranks, ended, codes, patience_seconds=grace_seconds)
            return _INTERRUPTED
        except _Stopped as stopped:
            return 128 + stopped.number
        finally:
            own_codes = dict(codes)
            _pass_on(signal.SIGTERM, ranks, ended, codes, patience_seconds=_SECONDS_TO_TERMINATE)
            _pass_on(signal.SIGKILL, ranks, ended, codes, patience_seconds=_SECONDS_TO_TERMINATE)
        return _verdict(ranks, own_codes)


def _collect(
    ended: "queue.Queue[tuple[_Rank, int]]",
    codes: dict[int, int],
    num_processes: int,
    *,
    patience_seconds: float | None,
) -> None:
    """Note the ends of ranks until all have ended or, without patience, one has failed, or patience is over."""
    deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
    while len(codes) < num_processes and (deadline is not None or not any(codes.values())):
        try:
            rank, code = ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        codes[rank.rank] = code


def _pass_on(
    number: int,
    ranks: Sequence[_Rank],
    ended: "queue.Queue[tuple[_Rank, int]]",
    codes: dict[int, int],
    *,
    patience_seconds: float,
) -> None:
    """Send a signal to the ranks that are left and wait for their end; a second Ctrl-C ends the wait."""
    left = [rank for rank in ranks if rank.rank not in codes]
    for rank in left:
        rank.signal(number)
    if left:
        with contextlib.suppress(KeyboardInterrupt):
            _collect(ended, codes, len(ranks), patience_seconds=patience_seconds)


def _verdict(ranks: Sequence[_Rank], codes: dict[int, int]) -> int:
    """The exit code of the whole, with a word on stderr about the rank that caused a failure."""
    failures = [rank for rank, code in codes.items() if code]  # in the order in which they ended
    if not failures:
        return 0
    culprit = min(failures, key=lambda rank: (codes[rank] == PEER_FAILED, codes[rank] > 0))
    code = codes[culprit]
    if code < 0:
        print(f"rank {culprit} was killed by {signal.Signals(-code).name}", file=sys.stderr)
    elif culprit and code != codes.get(0):
        print(f"rank {culprit} failed with exit code {code}", file=sys.stderr)
    # Wrong usage is found by all ranks alike, and rank 0 has said it.
    if culprit and not (code == codes.get(0) == 2):
        for line in ranks[culprit].lines:
            print(f"[rank {culprit}] {line.rstrip()}", file=sys.stderr)
    return 1 if code < 0 or code == PEER_FAILED else code


def _environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = str(max(1, cores // num_processes))
    return {
        "OMP_NUM_THREADS": threads,
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
    """A port for rank 0 to listen on: bound here, so that nobody is given it, but not listening, so that rank 0 may."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that no rank outlives the launcher."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
