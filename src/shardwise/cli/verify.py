"""`shardwise verify CONFIG --against LAYOUT [--steps N] [--simulate | --nproc N] [--set a.b=v]`."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.exit_verdicts import FAILED, errors_in_words, launched, place_here, set_threads
from shardwise.errors import in_words

if TYPE_CHECKING:
    from shardwise.train import RunConfig
    from shardwise.verification.program import Program
    from shardwise.verification.report import VerificationReport

_SIMULATED_TIMEOUT_SECONDS = 600.0


@click.command("verify")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--against",
    "layout",
    required=True,
    metavar="LAYOUT",
    help="A mesh, such as pp=2,tp=2, and settings of sharding, pipeline and tensor, such as sharding.stage=3.",
)
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Updates to compare.")
@click.option("--simulate", is_flag=True, help="Ranks as threads of this process; the default.")
@click.option("--nproc", type=click.IntRange(min=1), help="Real ranks: start this many processes.")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Change a setting; repeatable.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("--verdicts", type=click.Path(path_type=Path), hidden=True, help="Where ranks leave their verdicts.")
@click.option("--notes", type=click.Path(path_type=Path), hidden=True, help="Folder of the results of ranks.")
def verify(
    config: Path,
    layout: str,
    steps: int,
    simulate: bool,
    nproc: int | None,
    overrides: tuple[str, ...],
    debug: bool,
    verdicts: Path | None,
    notes: Path | None,
) -> None:
    """Train as CONFIG describes under LAYOUT, and compare every update with what one process makes of it.

    Losses, outputs of modules, gradients and updated parameters are compared against a stated error model. The last
    line says "equal" or "rounding"; or else the first tensor that diverges is named. Under torchrun, its processes are
    the ranks, and they leave what they compute in a new folder "verification-..." of the run's output folder.

    Exit codes: 0 equal or rounding, 1 diverged, inconclusive or failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    # Two blocks: until it is known whether this is a rank, there is no number to say in an error.
    with errors_in_words(debug=debug):
        place = None if simulate else place_here(nproc)
        if simulate:
            set_threads()
    is_rank = place is not None
    rank, size = place or (None, nproc)
    with errors_in_words(debug=debug, rank=rank, verdicts=verdicts):
        if simulate and nproc is not None:
            raise click.UsageError("--simulate and --nproc exclude each other: ranks are simulated or real")
        run_config = _checked(config, layout, overrides, size)
        if nproc is not None:
            sys.exit(_launch(config, layout, steps, nproc, overrides, debug))
        is_wrong = _be_rank(run_config, steps, notes) if is_rank else _simulate(run_config, steps)
    sys.exit(FAILED if is_wrong else 0)


def _checked(path: Path, layout: str, overrides: tuple[str, ...], num_processes: int | None) -> "RunConfig":
    """The configuration under the layout, with everything imported that it names."""
    from shardwise.cli.layout_words import layout_overrides
    from shardwise.train import check_references, device_of, read_config

    mesh, everything = layout_overrides(path, layout, overrides)
    config = read_config(path, overrides=everything, num_processes=num_processes or mesh.size)
    sys.path.append(str(config.folder))  # files beside the configuration may import each other
    check_references(config)
    if num_processes is not None:
        device_of(config)  # simulated ranks are on the CPU, whatever it says
    return config


def _simulate(config: "RunConfig", steps: int) -> bool:
    from shardwise.verification.verifier import verify_simulated

    # Threads take turns on the cores: a rank may wait for as long as all the others compute.
    timeout_seconds = max(_SIMULATED_TIMEOUT_SECONDS, config.train.timeout_seconds)
    program = _program(config, steps)
    title = _title(config, program, "simulated")
    return _print_report(verify_simulated(program, title=title, timeout_seconds=timeout_seconds))


def _be_rank(config: "RunConfig", steps: int, notes: Path | None) -> bool:
    """Be one rank; the first one goes on alone when the run under the layout is done."""
    # The layout runs first and whole: the comparison then repeats each of its updates from the state that it had.
    from shardwise.comm import processes
    from shardwise.comm.agreement import understood
    from shardwise.train import device_of
    from shardwise.verification.layout_run import run_layout
    from shardwise.verification.verifier import compare_with_one_process

    channel = processes(
        timeout_seconds=config.train.timeout_seconds,
        device=device_of(config),
        interface=config.train.interface,
        ports=config.train.ports,
    )
    try:
        # Rank 0 makes the folder and the others learn its name: two names would be two folders on a shared disk.
        made = _made_folder(config.output) if notes is None and channel.rank == 0 else ""
        purpose = "a fresh folder for the verification"
        (name,) = understood(channel.exchange(made.encode(), purpose=purpose)[:1], bytes.decode, purpose=purpose)
        folder = notes if notes is not None else config.output / name
        program = _program(config, steps)
        program.check()
        run_layout(program, channel, folder)
    except BaseException as error:
        channel.abort(in_words(error))
        raise
    rank, device = channel.rank, channel.device
    # Closed before the comparison, which takes as long as the run: ranks that wait would run into their deadline.
    channel.close()
    if rank > 0:
        return False
    try:
        return _print_report(compare_with_one_process(program, folder, device, title=_title(config, program, "real")))
    finally:
        if notes is None:
            shutil.rmtree(folder, ignore_errors=True)


def _made_folder(output: Path) -> str:
    """The name of a new folder: it can be removed at the end, for it holds nothing of the user's."""
    output.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="verification-", dir=output)).name


def _program(config: "RunConfig", steps: int) -> "Program":
    from shardwise.train.verified_program import configured

    return configured(config, steps=steps)


def _title(config: "RunConfig", program: "Program", kind: str) -> str:
    mesh = config.plan.mesh
    return (
        f"{config.name}: {mesh} on {mesh.size} {kind} rank{'s' if mesh.size > 1 else ''} against one process, "
        f"{len(program.batches)} updates of {program.num_microbatches} microbatches"
    )


def _print_report(report: "VerificationReport") -> bool:
    click.echo(report.text())
    return report.verdict not in ("equal", "rounding")


def _launch(path: Path, layout: str, steps: int, num_processes: int, overrides: tuple[str, ...], debug: bool) -> int:
    """Start the ranks, with a folder for what they compute."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as notes:
        arguments = ["verify", str(path), "--against", layout, "--steps", str(steps), "--notes", notes]
        return launched(arguments, num_processes=num_processes, overrides=overrides, debug=debug)
