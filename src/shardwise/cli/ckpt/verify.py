"""`shardwise ckpt verify PATH`: every byte of a save against its checksum."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from shardwise.cli.ckpt.table import plural
from shardwise.cli.verdicts import FAILED, told


@click.command("verify")
@click.argument("path")
@click.option("--step", type=int, help="Verify the save of this step instead of the newest.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def verify(path: str, step: int | None, debug: bool) -> None:
    """Read every byte of the newest save at PATH and compare it with its checksum.

    Exit codes: 0 the save is as it was written, 1 it is not, or cannot be read.
    """
    with told(debug=debug):
        from shardwise import checkpoint
        from shardwise.train.progress import size

        with _progress(path, step) as advance:
            report = checkpoint.verify(path, step=step, progress=advance)
        for note in report.notes:
            click.echo(f"note: {note}", err=True)
        if not report.good:
            click.echo(
                f"Error: {report.location} is not as it was written: {plural(len(report.findings), 'finding')}:\n"
                + "\n".join(f"  - {finding}" for finding in report.findings),
                err=True,
            )
            sys.exit(FAILED)
        click.echo(
            f"{report.location} is as it was written: {plural(report.num_tensors, 'tensor')}, "
            f"{size(report.verified_bytes)} in {plural(report.num_files, 'file')}"
        )


@contextmanager
def _progress(path: str, step: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, which goes when all is read; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from shardwise import checkpoint

    columns = (BarColumn(24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=checkpoint.open(path, step=step).contents.num_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
