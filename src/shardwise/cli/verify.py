"""`shardwise verify CONFIG|PROGRAM --against LAYOUT [--steps N] [--simulate | --nproc N] [--set a.b=v]`."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.exit_verdicts import FAILED, errors_in_words, launched, place_here, set_threads
from shardwise.errors import in_words

if TYPE_CHECKING:
    import torch

    from shardwise.space import Mesh
    from shardwise.verification.program import Subject
    from shardwise.verification.report import VerificationReport

_SIMULATED_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is verified, and how its ranks meet."""

    name: str
    mesh: "Mesh"
    subject: "Callable[[], Subject]"
    """Reads data, and so is not called where others are started."""
    device: "torch.device | None"
    timeout_seconds: float
    output: Path
    """Where ranks that know no other folder make one for what they compute."""
    links: dict[str, Any]
    """The interface and ports of ranks, where a configuration says."""

    def title(self, kind: str) -> str:
        """The layout in words."""
        return f"{self.name}: {self.mesh} on {self.mesh.size} {kind} rank{'s' if self.mesh.size > 1 else ''}"


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

    CONFIG is a TOML file, or a program of yours: package.module:function or file.py:function. The function gets a
    parallelize that has the plan already, and trains.

    Losses, outputs of modules, gradients and updated parameters are compared against a stated error model. The last
    line says "equal" or "rounding"; or else the first tensor that diverges is named. Under torchrun, its processes are
    the ranks, and they leave what they compute in a new folder "verification-..." of the run's output folder.

    Exit codes: 0 equal or rounding, 1 diverged, inconclusive or failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    # Two blocks: until it is known whether this is a rank, there is no number to say in an error.
    with errors_in_words(debug=debug):
        place = None if simulate else place_here(nproc)
        if place is None and nproc is None:
            set_threads()
    is_rank = place is not None
    rank, size = place or (None, nproc)
    with errors_in_words(debug=debug, rank=rank, verdicts=verdicts):
        if simulate and nproc is not None:
            raise click.UsageError("--simulate and --nproc exclude each other: ranks are simulated or real")
        asked = _asked(config, layout, overrides, size, steps)
        if nproc is not None:
            sys.exit(_launch(config, layout, steps, nproc, overrides, debug))
        is_wrong = _be_rank(asked, notes) if is_rank else _simulate(asked)
    sys.exit(FAILED if is_wrong else 0)


def _asked(path: Path, layout: str, overrides: tuple[str, ...], num_processes: int | None, steps: int) -> _Asked:
    """What CONFIG names under the layout, with everything imported that it names."""
    # A path may have a colon too, and a program has nothing else to be told by.
    if ":" in path.name and not path.exists():
        return _of_program(str(path), layout, overrides, num_processes, steps)
    from shardwise.cli.layout_words import layout_overrides
    from shardwise.train import check_references, read_config

    mesh, everything = layout_overrides(path, layout, overrides)
    config = read_config(path, overrides=everything, num_processes=num_processes or mesh.size)
    sys.path.append(str(config.folder))  # files beside the configuration may import each other
    check_references(config)

    from shardwise.train import device_of  # imports torch: a wrong setting is said sooner

    # Simulated ranks are on the CPU, whatever it says.
    device = None if num_processes is None else device_of(config)

    def subject() -> "Subject":
        from shardwise.train.verified_program import configured

        return configured(config, steps=steps)

    return _Asked(
        name=config.name,
        mesh=config.plan.mesh,
        subject=subject,
        device=device,
        timeout_seconds=config.train.timeout_seconds,
        output=config.output,
        links={"interface": config.train.interface, "ports": config.train.ports},
    )


def _of_program(
    reference: str, layout: str, overrides: tuple[str, ...], num_processes: int | None, steps: int
) -> _Asked:
    from shardwise.cli.layout_words import layout_plan
    from shardwise.train.references import resolve

    plan = layout_plan(layout, overrides)
    if num_processes is not None:
        plan.mesh.check_world(num_processes)
    source, _, name = reference.rpartition(":")
    # What `python file.py` and `python -m package.module` find.
    sys.path.append(str(Path(source).parent.resolve() if source.endswith(".py") else Path.cwd()))
    program = resolve(reference, folder=Path(), key="CONFIG")

    def subject() -> "Subject":
        from shardwise.verification.program import Subject

        return Subject(program=program, plan=plan, num_updates=steps)

    return _Asked(
        name=name,
        mesh=plan.mesh,
        subject=subject,
        device=None,  # the accelerator of the host, if it has one
        timeout_seconds=_SIMULATED_TIMEOUT_SECONDS,
        output=Path(),
        links={},
    )


def _simulate(asked: _Asked) -> bool:
    from shardwise.verification.verifier import verify_simulated

    # Threads take turns on the cores: a rank may wait for as long as all the others compute.
    timeout_seconds = max(_SIMULATED_TIMEOUT_SECONDS, asked.timeout_seconds)
    return _print_report(
        verify_simulated(asked.subject(), title=asked.title("simulated"), timeout_seconds=timeout_seconds)
    )


def _be_rank(asked: _Asked, notes: Path | None) -> bool:
    """Be one rank; the first one goes on alone when the run under the layout is done."""
    # The layout runs first and whole: the comparison then repeats each of its updates from the state that it had.
    from shardwise.comm import processes
    from shardwise.verification.verifier import compare_with_one_process, notes_of_layout

    channel = processes(timeout_seconds=asked.timeout_seconds, device=asked.device, **asked.links)
    try:
        subject = asked.subject()
    except BaseException as error:
        channel.abort(in_words(error))
        raise
    with notes_of_layout(channel, subject, notes or asked.output) as (folder, num_updates):
        # Closed before the comparison, which takes as long as the run: ranks that wait would run into their deadline.
        channel.close()
        return channel.rank == 0 and _print_report(
            compare_with_one_process(subject, folder, channel.device, num_updates, title=asked.title("real"))
        )


def _print_report(report: "VerificationReport") -> bool:
    click.echo(report.text())
    return report.verdict not in ("equal", "rounding")


def _launch(path: Path, layout: str, steps: int, num_processes: int, overrides: tuple[str, ...], debug: bool) -> int:
    """Start the ranks, with a folder for what they compute."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as notes:
        arguments = ["verify", str(path), "--against", layout, "--steps", str(steps), "--notes", notes]
        return launched(arguments, num_processes=num_processes, overrides=overrides, debug=debug)
