"""A `shardwise` as a user starts it, and what it leaves.

in_this_process    the command, called                     what it says and computes
simulated          its ranks, as threads                   what ranks compute
started, done      processes forked from one interpreter   launchers, ranks, signals, exit codes
"""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from rich.console import Console

from shardwise.cli import main
from tests.forks.programs import members_of_session, started


def in_this_process(*arguments: str) -> Result:
    before = list(sys.path)
    try:
        return CliRunner().invoke(main, arguments)
    finally:
        sys.path[:] = before


def simulated(config: Path, *overrides: str, num_processes: int, resume: str | None = None) -> str:
    """What so many processes of `shardwise train` would do, on simulated ranks in this one, and what they would print.

    Only what a process alone can show needs one.
    """
    from shardwise.comm import simulate  # the command line alone loads no torch
    from shardwise.train import rank, read_config

    read = read_config(config, overrides=overrides, num_processes=num_processes)
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    simulate(num_processes, lambda channel: rank.run(read, channel, console, resume=resume))
    return printed.getvalue()


def done(*arguments: str) -> "subprocess.CompletedProcess[str]":
    with started(arguments) as command:
        out, err = command.communicate(timeout=90)
        assert not members_of_session(command.pid), "processes were left running"
        return subprocess.CompletedProcess(arguments, command.wait(timeout=0), out, err)


def on_a_terminal(*arguments: str, output_too: bool) -> tuple[int, str, str]:
    """Exit code, output, and what a terminal gets: its errors, and its output too if that is asked for."""
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "100"}
    output = theirs if output_too else None
    with started(arguments, environment=environment, output=output, errors=theirs) as command:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux says that nobody holds the other end
            while chunk := os.read(ours, 65536):
                shown += chunk
        os.close(ours)
        out, _ = command.communicate(timeout=60)
        return command.wait(timeout=0), out, shown.decode()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)]
