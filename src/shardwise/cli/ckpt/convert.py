"""`shardwise ckpt convert SRC DST [--to pieces|whole|hf] [--rewrite FILE] [--inverse] [--dry-run] [--certify]`."""

import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

import click

from shardwise.cli.ckpt.progress import byte_progress
from shardwise.cli.ckpt.table import plural
from shardwise.cli.verdicts import told

if TYPE_CHECKING:
    from shardwise.checkpoint import ConvertReport
    from shardwise.rewrite import Rewrite


def _parameters(context: click.Context, option: click.Parameter, words: tuple[str, ...]) -> dict[str, int | str]:
    """`num_heads=32` as a name and its value."""
    found: dict[str, int | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise click.BadParameter(f"{word!r} is not of the form name=value", context, option)
        found[name] = int(value) if value.isdecimal() else value
    return found


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--to",
    type=click.Choice(["pieces", "whole", "hf"]),
    default="whole",
    show_default=True,
    help="pieces, whole: a save of shardwise in the folder DST. hf: a new folder DST of Hugging Face files.",
)
@click.option("--step", type=int, help="Read the save of this step (default: the newest).")
@click.option(
    "--rewrite",
    metavar="FILE",
    help="Rename, join, split, transpose or cast tensors as this file says. Also the name of a rewrite that comes with "
    "shardwise.",
)
@click.option("--inverse", is_flag=True, help="Undo the rewrite; without --rewrite, the one by which SRC was made.")
@click.option(
    "--set",
    "parameters",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parameters,
    help="A parameter of the rewrite; the others come from the config.json of SRC. May be given several times.",
)
@click.option("--dry-run", is_flag=True, help="Read metadata only, show what would become of what, write nothing.")
@click.option(
    "--certify", is_flag=True, help="Read DST again, back through the inverse, and write round-trip.json there."
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def convert(
    source: str,
    destination: str,
    to: Literal["pieces", "whole", "hf"],
    step: int | None,
    rewrite: str | None,
    inverse: bool,
    parameters: dict[str, int | str],
    dry_run: bool,
    certify: bool,
    debug: bool,
) -> None:
    """Write the checkpoint SRC to DST in another form.

    SRC is a checkpoint of shardwise, a folder of Hugging Face files, a safetensors file, or a folder of
    torch.distributed.checkpoint. No model is needed, and memory stays bounded. DST is there as a whole or not at all.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    if parameters and rewrite is None:
        raise click.UsageError("--set gives a parameter to a rewrite; name one with --rewrite")
    if dry_run and rewrite is None and not inverse:
        raise click.UsageError("--dry-run shows what a rewrite does; name one with --rewrite")
    with told(debug=debug):
        from shardwise import checkpoint

        used = _rewrite(source, step, rewrite, inverse, parameters)
        if dry_run:
            assert used is not None, "so it was asked for"
            click.echo(checkpoint.preview(source, destination, rewrite=used, to=to, step=step))
            click.echo("nothing was written")
            return
        begun = time.perf_counter()
        with byte_progress("converting") as progress:
            report = checkpoint.convert(
                source, destination, to=to, rewrite=used, step=step, certify=certify, progress=progress
            )
        click.echo(_closing(report, time.perf_counter() - begun))


def _rewrite(
    source: str, step: int | None, name: str | None, inverse: bool, parameters: dict[str, int | str]
) -> "Rewrite | None":
    """The rewrite that was asked for."""
    from shardwise import checkpoint
    from shardwise.rewrite.shipped import find_rewrite

    if name is not None:
        found = _with_parameters(find_rewrite(name), name, parameters)
    elif inverse:
        found = checkpoint.recorded_rewrite(source, step=step)
    else:
        return None
    return found.inverse() if inverse else found


def _with_parameters(rewrite: "Rewrite", name: str, parameters: dict[str, int | str]) -> "Rewrite":
    """The rewrite with what `--set` gives, all of which it has to know."""
    from shardwise.errors import RewriteError

    if not parameters:
        return rewrite
    needed = sorted(rewrite.parameters_needed)
    for each in parameters:
        if each not in needed:
            near = get_close_matches(each, needed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            has = f"its parameters are {', '.join(needed)}" if needed else "it has no parameters"
            raise click.UsageError(f"--set {each}: the rewrite {name} has no parameter {each}; {has}{hint}")
    try:
        return rewrite.with_parameters(parameters)
    except RewriteError as error:
        raise RewriteError(*error.problems, about=name) from None


def _closing(report: "ConvertReport", seconds: float) -> str:
    from shardwise.train.progress import size

    lines = [f"{report.source} ({report.source_format}) -> {report.destination}"]
    if report.left_out:
        masters = f", of them {plural(report.num_masters, 'master')}" if report.num_masters else ""
        lines.append(f"{plural(len(report.left_out), 'tensor')} of optimizers left out{masters}")
    if report.dropped:
        lines.append(f"dropped by the rewrite: {_some(report.dropped)}")
    if report.aliases:
        lines.append(
            f"tied tensors written once: {_some([f'{one} = {other}' for one, other in report.aliases.items()])}"
        )
    if report.files:
        lines.append(f"with {', '.join(report.files)}")
    how = "verified" if report.verified else f"unverified ({report.source_format} has no checksums)"
    speed = f"{size(int(report.num_bytes / max(seconds, 1e-3)))}/s"
    lines.append(
        f"{plural(report.num_tensors, 'tensor')}, {size(report.num_bytes)}, {how}, in {seconds:.1f} s ({speed})"
    )
    if report.certificate is not None:
        lines.append(str(report.certificate))
    return "\n".join(lines)


def _some(names: Sequence[str]) -> str:
    """The first of names, and how many more there are."""
    from shardwise.checkpoint.names import printable

    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(map(printable, names[:3])) + more
