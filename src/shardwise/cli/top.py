"""`shardwise top RUN... [--once] [--interval S]`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.exit_verdicts import errors_in_words

if TYPE_CHECKING:
    from rich.console import Console


@click.command("top")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print one table and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def top(runs: Sequence[Path], once: bool, interval: float, debug: bool) -> None:
    """Show what each rank of a run does with its time, while it runs.

    RUN is the folder of a run of shardwise train, such as runs/demo, or the output_dir of a Trainer. A terminal shows a
    table that is drawn anew; a file gets a line for each look that finds something new. The command ends when all runs
    have ended.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with errors_in_words(debug=debug):
        from rich.console import Console

        console = Console()
        if once:
            for text in _tables(runs, None)[0]:
                click.echo(text)
        elif console.is_interactive:
            _redraw(runs, console, interval)
        else:
            _follow(runs, interval)


def _tables(runs: Sequence[Path], most_lines: int | None) -> tuple[list[str], bool]:
    """The tables of all runs, and whether all of them have ended."""
    from shardwise.runs.rank_table import heading, table
    from shardwise.runs.run_folder import view

    views = [view(run) for run in runs]
    # Heading, titles of columns, two lines below and an empty one.
    most_rows = None if most_lines is None else max(1, most_lines // len(views) - 5)
    lines: list[str] = []
    for each in views:
        lines += [*([""] if lines else []), heading(each), *table(each, most_rows=most_rows)]
    return lines, all(each.ended is not None for each in views)


def _redraw(runs: Sequence[Path], console: "Console", interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            lines, is_over = _tables(runs, console.height)
            # Cut, not broken: rows of a table stay rows.
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            if is_over:
                return
            time.sleep(interval)


def _follow(runs: Sequence[Path], interval: float) -> None:
    from shardwise.runs.rank_table import line
    from shardwise.runs.run_folder import view

    shown: dict[Path, object] = {}
    while True:
        views = [view(run) for run in runs]
        for each in views:
            news = (each.lines[-1].get("step") if each.lines else None, each.ended)
            if shown.get(each.folder) != news:
                shown[each.folder] = news
                click.echo(line(each))
        if all(each.ended is not None for each in views):
            return
        time.sleep(interval)
