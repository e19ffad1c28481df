"""Functions called in processes, each with a connection to the test that called it."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

from tests.forks.programs import ROOT, Program, kill_all

Start = Literal["fork", "anew"]
"""Forked with everything imported, or interpreters that start anew: accelerators do not survive a fork."""

_CALLED = "from tests.forks.calls import called; called()"


class Call:
    """A process that calls `function(connection, *arguments)`. Pickle takes the names and values.

    The connection is its standard input; it prints where the tests print.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, start: Start = "fork") -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._process: Program | subprocess.Popen[bytes]
        if start == "fork":
            self._process = Program(["-c", _CALLED], input=theirs.fileno(), output=1, errors=2)
        else:
            command = [sys.executable, "-c", _CALLED]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), cwd=ROOT, start_new_session=True)
        theirs.close()
        self.pid = self._process.pid
        with contextlib.suppress(BrokenPipeError):  # whoever receives finds that out
            # Tensors go from process to process with this key.
            self.connection.send_bytes(bytes(multiprocessing.current_process().authkey))
            self.connection.send((function, arguments))

    def wait(self, timeout: float) -> int:
        """Its exit code, negative for a signal."""
        return self._process.wait(timeout=timeout)

    def end(self, *, patience_seconds: float) -> None:
        """Close the connection, let the process leave, or kill it with what it has started."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(patience_seconds)
        kill_all(self.pid)
        self.wait(60)
        if isinstance(self._process, Program):
            self._process.close()


def exit_code_of(function: Callable[..., Any], *arguments: Any) -> int:
    """Of a forked process that has called the function."""
    call = Call(function, *arguments)
    try:
        return call.wait(90)
    finally:
        call.end(patience_seconds=0.0)


def called() -> None:
    """What such a process does."""
    connection = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    multiprocessing.current_process().authkey = connection.recv_bytes()
    function, arguments = connection.recv()
    function(connection, *arguments)
