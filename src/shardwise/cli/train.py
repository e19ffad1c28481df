"""`shardwise train CONFIG.toml [--nproc N] [--set a.b=v]... [--resume auto|PATH]`."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.exit_verdicts import errors_in_words, launched, place_here, set_threads
from shardwise.cli.next_commands import next_commands
from shardwise.errors import in_words
from shardwise.runs.stop_signals import Stopped, StopSignals

if TYPE_CHECKING:
    from shardwise.train import RunConfig


@click.command("train")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Start this many processes; leave out under torchrun, srun, mpirun."
)
@click.option("--device", metavar="auto|cpu|NAME", help="Where ranks compute: short for --set train.device=NAME.")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Change a setting; repeatable.")
@click.option(
    "--resume",
    metavar="auto|PATH",
    help="Continue from this run's newest save, if there is one (auto), or from a folder or address of saves.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("--verdicts", type=click.Path(path_type=Path), hidden=True, help="Where ranks leave their verdicts.")
def train(
    config: Path,
    nproc: int | None,
    device: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    debug: bool,
    verdicts: Path | None,
) -> None:
    """Train the model that CONFIG describes.

    CONFIG is a TOML file, or demo: that configuration comes with the package.

    SIGTERM and SIGUSR1 end the run after the update under way, which is saved. A second one ends it at once.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C, 143 by SIGTERM, 138 by SIGUSR1.
    """
    # Signals are caught before anything else: one that comes while torch is imported ends the run in words too.
    with errors_in_words(debug=debug), StopSignals() as signals:
        if device is not None:  # a setting like any other from here on, in the commands of ranks too
            overrides += (f"train.device={device}",)
        place = place_here(nproc)
        if place is None and nproc in (None, 1):
            set_threads()
        rank, size = place or (None, nproc or 1)
        with errors_in_words(debug=debug, rank=rank, verdicts=verdicts):
            run_config = _checked(config, overrides, size)
            # Checked here as well, though ranks check again: N processes would say it N times, seconds later.
            with _way_to_go_on(run_config):
                if nproc is not None and nproc > 1:
                    click.echo(f"{run_config.name}: {nproc} processes start")
                    arguments = ["train", str(config), *(["--resume", resume] if resume is not None else [])]
                    sys.exit(launched(arguments, num_processes=nproc, overrides=overrides, debug=debug))
                _run(run_config, resume, signals, is_rank=place is not None)
            if not rank:
                _print_next(config, run_config, overrides)


def _checked(path: Path, overrides: Sequence[str], num_processes: int) -> "RunConfig":
    """The configuration, with everything imported that it names: what is wrong with it is known before ranks meet."""
    from shardwise.train import check_references, read_config

    config = read_config(path, overrides=overrides, num_processes=num_processes)
    sys.path.append(str(config.folder))  # files beside the configuration may import each other
    check_references(config)

    from shardwise.train import device_of  # imports torch: a wrong setting is said sooner

    device_of(config)
    return config


@contextlib.contextmanager
def _way_to_go_on(config: "RunConfig") -> Iterator[None]:
    """Let the message of a Ctrl-C say what is kept."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if config.checkpoint.every is not None:
            interrupt.add_note(f"--resume auto continues from the newest save in {config.saves}, if there is one")
        raise


def _print_next(config: Path, run_config: "RunConfig", overrides: Sequence[str]) -> None:
    if commands := next_commands(run_config, str(config), overrides):
        click.echo("what to do next:")
    for command in commands:
        click.echo(f"  {command.purpose}:\n    {command.line}")


def _run(config: "RunConfig", resume: str | None, signals: StopSignals, *, is_rank: bool) -> None:
    """Be one rank, or the only one."""
    from rich.console import Console

    from shardwise.comm import alone, processes
    from shardwise.comm.device.kinds import only_device
    from shardwise.comm.hosts import hosts_of, naming_hosts
    from shardwise.comm.process.handshake import without_a_secret
    from shardwise.train import device_of, run

    device = device_of(config)
    if is_rank:
        channel = processes(
            timeout_seconds=config.train.timeout_seconds,
            device=device,
            interface=config.train.interface,
            ports=config.train.ports,
        )
    else:
        channel = alone(only_device(device))
    console = Console()
    try:
        with naming_hosts(channel):
            for line in without_a_secret(hosts_of(channel), os.environ) if channel.rank == 0 else []:
                console.print(line, markup=False, highlight=False)
            run(config, channel, console, resume=resume, signals=signals)
    except BaseException as error:
        # A stop that all ranks agreed on needs no abort: an abort would turn the peers' clean ends into PeerErrors.
        if not (isinstance(error, Stopped) and error.is_agreed):
            channel.abort(str(error) if isinstance(error, Stopped) else in_words(error))
            raise
        channel.close()
        raise
    channel.close()
