"""`shardwise ckpt verify PATH`: every byte of a save against its checksum."""

import sys

import click

from shardwise.cli.ckpt.progress import byte_progress
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

        with byte_progress("verifying") as show:
            total = checkpoint.open(path, step=step).contents.num_bytes
            verified = 0

            def advance(num_bytes: int) -> None:
                nonlocal verified
                verified += num_bytes
                show(verified, total)

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
