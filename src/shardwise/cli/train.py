"""`shardwise train CONFIG.toml [--nproc N] [--set a.b=v]... [--resume auto|PATH]`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.exit_verdicts import errors_in_words, launched, place_here
from shardwise.errors import in_words
from shardwise.train.stop_signals import Stopped, StopSignals

if TYPE_CHECKING:
    from shardwise.train import RunConfig


@click.command("train")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Start this many processes; leave out under torchrun, srun, mpirun."
)
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Change a setting; repeatable.")
@click.option(
    "--resume",
    metavar="auto|PATH",
    help="Go on from the newest save of this run, if there is one (auto), or from a folder or address of saves.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("--verdicts", type=click.Path(path_type=Path), hidden=True, help="Where ranks leave their verdicts.")
def train(
    config: Path,
    nproc: int | None,
    overrides: tuple[str, ...],
    resume: str | None,
    debug: bool,
    verdicts: Path | None,
) -> None:
    """Train the model that CONFIG describes.

    SIGTERM and SIGUSR1 end the run after the update under way, which is saved; a second one ends it at once.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C, 143 by SIGTERM, 138 by SIGUSR1.
    """
    # Signals are caught before anything else: one that comes while torch is imported ends the run in words too.
    with errors_in_words(debug=debug), StopSignals() as signals:
        place = place_here(nproc)
        rank, size = place or (None, nproc or 1)
        with errors_in_words(debug=debug, rank=rank, verdicts=verdicts):
            run_config = _checked(config, overrides, size)
            # Checked here as well, though ranks check again: N processes would say it N times, seconds later.
            if nproc is not None and nproc > 1:
                arguments = ["train", str(config), *(["--resume", resume] if resume is not None else [])]
                sys.exit(launched(arguments, num_processes=nproc, overrides=overrides, debug=debug))
            _run(run_config, resume, signals, is_rank=place is not None)


def _checked(path: Path, overrides: Sequence[str], num_processes: int) -> "RunConfig":
    """The configuration, with everything imported that it names: what is wrong with it is known before ranks meet."""
    from shardwise.train import check_references, read_config

    config = read_config(path, overrides=overrides, num_processes=num_processes)
    sys.path.append(str(config.folder))  # files beside the configuration may import each other
    check_references(config)
    return config


def _run(config: "RunConfig", resume: str | None, signals: StopSignals, *, is_rank: bool) -> None:
    """Be one rank, or the only one."""
    import torch
    from rich.console import Console

    from shardwise.comm import alone, processes
    from shardwise.train import run

    if is_rank:
        channel = processes(timeout_seconds=config.train.timeout_seconds)
    else:
        channel = alone("cuda" if torch.cuda.is_available() else "cpu")
    try:
        run(config, channel, Console(), resume=resume, signals=signals)
    except BaseException as error:
        # A stop that all ranks agreed on needs no abort: an abort would turn the peers' clean ends into PeerErrors.
        if not (isinstance(error, Stopped) and error.is_agreed):
            channel.abort(str(error) if isinstance(error, Stopped) else in_words(error))
            raise
        channel.close()
        raise
    channel.close()
