"""`shardwise ckpt verify PATH [--step N | --all]`: every byte of saves against its checksum."""

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from shardwise.cli.ckpt.progress_bar import byte_progress
from shardwise.cli.ckpt.table import plural
from shardwise.cli.exit_verdicts import FAILED, told

if TYPE_CHECKING:
    from shardwise.checkpoint import VerifyReport


@click.command("verify")
@click.argument("path")
@click.option("--step", type=int, help="Verify the save of this step instead of the newest.")
@click.option("--all", "verifies_all", is_flag=True, help="Verify all saves at PATH.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def verify(path: str, step: int | None, verifies_all: bool, debug: bool) -> None:
    """Read every byte of the newest save at PATH, or of all, and compare it with its checksum.

    Exit codes: 0 what was read is as it was written, 1 it is not, or cannot be read, 2 wrong usage.
    """
    if verifies_all and step is not None:
        raise click.UsageError("--all verifies the saves of all steps; leave out --step")
    with told(debug=debug):
        from shardwise import checkpoint

        with byte_progress("verifying") as show:
            total = _total_bytes(path, step, verifies_all=verifies_all)
            verified = 0

            def advance(num_bytes: int) -> None:
                nonlocal verified
                verified += num_bytes
                show(verified, max(verified, total))

            if verifies_all:
                reports = checkpoint.verify_all(path, progress=advance)
            else:
                reports = [checkpoint.verify(path, step=step, progress=advance)]
        for note in (note for report in reports for note in report.notes):
            click.echo(f"note: {note}", err=True)
        for report in reports:
            _tell(report)
        if not all(report.good for report in reports):
            sys.exit(FAILED)
        if step is None and not verifies_all and (others := _num_others(path)):
            click.echo(f"note: {plural(others, 'other save')} at {path} not read; --all reads them too", err=True)


def _tell(report: "VerifyReport") -> None:
    from shardwise.train.observers import size

    if report.good:
        click.echo(
            f"{report.location} is as it was written: {plural(report.num_tensors, 'tensor')}, "
            f"{size(report.verified_bytes)} in {plural(report.num_files, 'file')}"
        )
        return
    click.echo(
        f"Error: {report.location} is not as it was written: {plural(len(report.findings), 'finding')}:\n"
        + "\n".join(f"  - {finding}" for finding in report.findings),
        err=True,
    )


def _total_bytes(path: str, step: int | None, *, verifies_all: bool) -> int:
    """Bytes that will be read, as far as it is known."""
    from shardwise import checkpoint
    from shardwise.checkpoint.saves import list_saves, read_head
    from shardwise.errors import CheckpointError

    if not verifies_all:
        return checkpoint.open(path, step=step).contents.num_bytes
    total = 0
    with contextlib.suppress(OSError):
        store = checkpoint.store_of(path)
        for number in list_saves(store).committed:
            with contextlib.suppress(CheckpointError):
                total += read_head(store, number).num_bytes
    return total


def _num_others(path: str) -> int:
    """Saves beside the one that was verified."""
    from shardwise import checkpoint
    from shardwise.checkpoint.saves import list_saves

    with contextlib.suppress(OSError):
        return max(0, len(list_saves(checkpoint.store_of(path)).committed) - 1)
    return 0
