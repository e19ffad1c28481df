"""A `shardwise` as a user starts it, and what it leaves."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from rich.console import Console

from shardwise.cli import main


def in_this_process(*arguments: str) -> Result:
    before = list(sys.path)
    try:
        return CliRunner().invoke(main, arguments)
    finally:
        sys.path[:] = before


def simulated(config: Path, *overrides: str, num_processes: int, resume: str | None = None) -> str:
    """What so many processes of `shardwise train` would do, on simulated ranks in this one, and what they would print.

    A process takes seconds to import torch before it does anything: only what a process alone can show needs one.
    """
    from shardwise.comm import simulate  # the command line alone loads no torch
    from shardwise.train import read_config
    from shardwise.train.rank import run

    read = read_config(config, overrides=overrides, num_processes=num_processes)
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    simulate(num_processes, lambda channel: run(read, channel, console, resume=resume))
    return printed.getvalue()


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A `shardwise` in a process group of its own, of which nothing is left afterwards."""
    command = [sys.executable, "-m", "shardwise.cli", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def done(*arguments: str) -> "subprocess.CompletedProcess[str]":
    with started(list(arguments)) as process:
        out, err = process.communicate(timeout=90)
        assert not members_of_group(process.pid), "processes were left running"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def members_of_group(group: int) -> list[int]:
    """The processes of a process group that still run (zombies do not)."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                members.append(int(status.parent.name))
    return members


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)]
