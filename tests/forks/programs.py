"""Programs asked of the interpreter that forks them, and what of them still runs."""

import atexit
import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tests.forks.interpreter import READY, Order

ROOT = Path(__file__).parents[2]


class Program:
    """A forked program, with as much of `subprocess.Popen` as the tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        input: int | None = None,
        output: int | None = None,
        errors: int | None = None,
    ) -> None:
        """input: a descriptor; None for nothing. output, errors: descriptors that take them; None for a pipe."""
        end, its_end = os.pipe()
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        given = ((input, nothing), (output, its_out), (errors, its_err))
        standard = [own if asked is None else asked for asked, own in given]
        order = Order(arguments=list(arguments), environment={**os.environ, **(environment or {})}, folder=str(folder))
        order.send(_interpreter(), (*standard, its_end))
        for descriptor in (its_end, its_out, its_err, nothing):
            os.close(descriptor)
        self.stdout: TextIO = os.fdopen(out, errors="replace")
        self.stderr: TextIO = os.fdopen(err, errors="replace")
        self._end = os.fdopen(end, "rb", buffering=0)
        self.pid = int(self._end.read(32))
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            self.returncode = int(self._end.read(32))
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of its output and its errors, once it has ended."""
        texts: dict[TextIO, str] = {}
        streams = (self.stdout, self.stderr)
        readers = [threading.Thread(target=lambda each=each: texts.setdefault(each, each.read())) for each in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[self.stdout], texts[self.stderr]

    def close(self) -> None:
        for stream in (self.stdout, self.stderr, self._end):
            stream.close()


runs: list[str] = []
"""The run that this process is a worker of; conftest.py knows."""


@functools.cache
def _interpreter() -> socket.socket:
    """Where to ask for a program; the interpreter starts when the first one is asked for.

    The workers of a run share one, which ends with the last of them.
    """
    # One of Linux's names that are no files: it goes with the process that listens.
    name = f"\0shardwise-tests-{runs[0] if runs else os.getpid()}"
    while True:
        is_first = _start(name)
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(ConnectionError):  # not yet listening, or ending
            ours.connect(name)
            if ours.recv(len(READY)) == READY:
                atexit.register(ours.close)
                return ours
        ours.close()
        assert not is_first, "the interpreter that was started has ended"
        time.sleep(0.01)


def _start(name: str) -> bool:
    """Start an interpreter that listens there; False where another worker was faster."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
        except OSError:
            return False
        listener.listen()
        interpreter = subprocess.Popen(
            [sys.executable, "-m", "tests.forks.interpreter", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
        )
    atexit.register(interpreter.wait)  # once this process, and all others, have closed their connections
    return True


@contextlib.contextmanager
def started(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    output: int | None = None,
    errors: int | None = None,
) -> Iterator[Program]:
    """A program (see `Order`) in a session of its own; all its processes have ended afterwards."""
    program = Program(arguments, environment=environment, folder=folder, output=output, errors=errors)
    try:
        yield program
    finally:
        kill_all(program.pid)
        program.wait(timeout=60)
        program.close()


def kill_all(session: int) -> None:
    """Returns when they are gone, so that nobody writes any more."""
    while members := members_of_session(session):
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.01)


def members_of_session(session: int) -> list[int]:
    """The processes of a session that still run (zombies do not); each rank has a process group of its own."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = status.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                members.append(int(status.parent.name))
    return members
