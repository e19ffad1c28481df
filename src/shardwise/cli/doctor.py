"""`shardwise doctor [FOLDER]`: what will and will not work on this host."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from shardwise.cli.exit_verdicts import errors_in_words

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "wrong": ("WRONG", "red")}


@click.command("doctor")
@click.argument("folder", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--no-trial", is_flag=True, help="Start no processes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per finding.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def doctor(folder: Path | None, no_trial: bool, as_json: bool, debug: bool) -> None:
    """Say what works on this host: versions, devices, memory, sockets, saves in FOLDER, two ranks that try.

    Exit codes: 0 nothing is wrong, 1 something is, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with errors_in_words(debug=debug):
        from shardwise.comm.host_checks import examine

        num_wrong = 0
        for finding in examine(os.environ, folder=folder, trial=not no_trial):
            num_wrong += finding.verdict == "wrong"
            if as_json:
                click.echo(json.dumps(asdict(finding)))
                continue
            mark, colour = _MARKS[finding.verdict]
            click.echo(f"{click.style(f'{mark:>5}', fg=colour)}  {finding.subject:<14} {finding.text}")
        sys.exit(1 if num_wrong else 0)
