"""`shardwise schedule NAME|FILE [--ranks P] [--microbatches K] [--chunks V] ...`."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.exit_verdicts import errors_in_words

if TYPE_CHECKING:
    from shardwise.plan.schedules import Schedule


@click.command("schedule")
@click.argument("schedule", metavar="NAME|FILE")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks along pp; needed with a NAME.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Microbatches of an update; needed with a NAME.")
@click.option("--chunks", type=click.IntRange(min=1), help="Stages per rank (default: 2 for interleaved, else 1).")
@click.option("--forward-ms", default="1", show_default=True, metavar="T[,T...]", help="For all stages, or for each.")
@click.option("--backward-ms", default="2", show_default=True, metavar="T[,T...]", help="For all stages, or for each.")
@click.option("--transfer-ms", default=0.0, show_default=True, metavar="T", help="From one rank to another.")
@click.option("--transfers", metavar="A>B[,A>B...]", help="Between stages, in program order (default: 0>1,1>2,...).")
@click.option("--orders", is_flag=True, help="Show the order of every rank, as a FILE has it.")
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw it there too, .png or .svg.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def schedule(
    schedule: str,
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None,
    forward_ms: str,
    backward_ms: str,
    transfer_ms: float,
    transfers: str | None,
    orders: bool,
    picture: Path | None,
    debug: bool,
) -> None:
    """Check a schedule of pipeline stages and draw its timeline.

    NAME is fthenb, 1f1b or interleaved; FILE holds a schedule of your own, as --orders shows one. A NAME that would
    deadlock with these transfers is changed as in training, and the drawing says so. A FILE is never changed.

    Exit codes: 0 done, 1 failed, 2 wrong usage or a schedule that cannot be run, 130 stopped by Ctrl-C.
    """
    with errors_in_words(debug=debug):
        from shardwise.plan.schedule_check import adapt, chain, check
        from shardwise.plan.timeline import simulate_schedule
        from shardwise.runs.timeline_text import draw_timeline

        asked = _schedule(schedule, ranks, chunks, microbatches)
        moved = chain(asked.num_stages) if transfers is None else _transfers(transfers)
        # A named schedule is changed as training would change it, a written one never: what cannot run is refused.
        run = adapt(asked, moved)
        timeline = simulate_schedule(
            run,
            moved,
            forward_s=_seconds("--forward-ms", forward_ms, asked.num_stages),
            backward_s=_seconds("--backward-ms", backward_ms, asked.num_stages),
            transfer_s=transfer_ms / 1e3,
        )
        heading, _, lines = run.text().partition("\n")
        click.echo(heading)
        for finding in check(asked, moved):
            click.echo(f"not {asked.name} itself: {finding}")
        click.echo(draw_timeline(timeline, width=shutil.get_terminal_size((100, 24)).columns), nl=False)
        if orders:
            click.echo(f"\n{heading}\n{lines}", nl=False)
        if picture is not None:
            from shardwise.runs.timeline_files import save_picture

            save_picture(timeline, picture, title=heading)
            click.echo(f"drawn in {picture}")


def _schedule(source: str, ranks: int | None, chunks: int | None, microbatches: int | None) -> "Schedule":
    from shardwise.errors import PlanError
    from shardwise.plan.schedules import SCHEDULES, Schedule, make_schedule

    if source not in SCHEDULES and Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8", errors="replace") + "\n"
        own = Schedule.parse(text)
        return make_schedule(
            text,
            num_ranks=ranks or own.num_ranks,
            num_chunks=chunks or own.num_chunks,
            num_microbatches=microbatches or own.num_microbatches,
        )
    if ranks is None or microbatches is None:
        raise PlanError(f"schedule: {source!r} is not a file; with a name, give --ranks and --microbatches too")
    default = 2 if source == "interleaved" else 1
    return make_schedule(source, num_ranks=ranks, num_chunks=chunks or default, num_microbatches=microbatches)


def _seconds(option: str, text: str, num_stages: int) -> list[float]:
    from shardwise.errors import PlanError

    try:
        times = [float(word) / 1e3 for word in text.split(",")]
    except ValueError:
        raise PlanError(f"{option}: {text!r} is neither one time nor a list such as 1,1.5,2") from None
    return times * num_stages if len(times) == 1 else times


def _transfers(text: str) -> list[tuple[int, int]]:
    from shardwise.errors import PlanError

    pairs = [word.split(">") for word in text.split(",") if word.strip()]
    if not all(len(pair) == 2 and all(end.strip().isdecimal() for end in pair) for pair in pairs):
        raise PlanError(f"--transfers: {text!r} is not a list of stages such as 0>1,1>2")
    return [(int(source), int(destination)) for source, destination in pairs]
