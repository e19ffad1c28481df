"""`shardwise ckpt average A B C --out OUT [--factors 1,2,1] [--accumulate float32] [--to hf] ...`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click

from shardwise.cli.ckpt import byte_progress
from shardwise.cli.exit_verdicts import Renamed, errors_in_words
from shardwise.errors import plural

if TYPE_CHECKING:
    from shardwise.checkpoint import AverageReport


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> list[float] | None:
    """`1,2,0.5` as numbers."""
    if text is None:
        return None
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers, such as 1,2,0.5", context, option) from None


@click.command("average")
@click.argument("sources", metavar="A B ...", nargs=-1, required=True)
@click.option("--out", "destination", metavar="OUT", required=True, help="Where the average is written.")
@click.option(
    "--factors",
    "--weights",
    "weights",
    cls=Renamed,
    metavar="W,W,...",
    callback=_numbers,
    help="A number for each checkpoint (default: 1 each).",
)
@click.option(
    "--accumulate",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help="Add in this dtype, and round once to that of the tensor.",
)
@click.option(
    "--to",
    type=click.Choice(["whole", "hf"]),
    default="whole",
    show_default=True,
    help="whole: a save of shardwise in the folder OUT. hf: a new folder OUT of Hugging Face files.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "float64"]),
    help="With --to hf: write floats in this dtype, averaged of masters where there are some.",
)
@click.option("--optimizer", is_flag=True, help="Average the state of optimizers too; their settings are those of A.")
@click.option(
    "--from-first",
    metavar="NAME",
    multiple=True,
    help="A tensor of integers (or a glob of such) that may differ and is taken from A. May be given several times.",
)
@click.option("--config", metavar="FILE_OR_DIR", help="A config.json, or a folder with one, instead of that of A.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def average(
    sources: tuple[str, ...],
    destination: str,
    weights: Sequence[float] | None,
    accumulate: Literal["float64", "float32"],
    to: Literal["whole", "hf"],
    dtype: str | None,
    optimizer: bool,
    from_first: tuple[str, ...],
    config: str | None,
    debug: bool,
) -> None:
    """Write the weighted mean of the checkpoints A, B, ... to OUT.

    Each is a checkpoint of any format that `ckpt ls` lists; of a folder of saves the newest counts. Names, shapes and
    dtypes have to be the same. Integers and truth values have to be equal, unless --from-first names them.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with errors_in_words(debug=debug):
        from shardwise import checkpoint

        with byte_progress("averaging") as progress:
            report = checkpoint.average(
                sources,
                destination,
                weights=weights,
                accumulate=accumulate,
                to=to,
                dtype=dtype,
                optimizer=optimizer,
                from_first=from_first,
                config=config,
                progress=progress,
            )
        click.echo(_closing(report))


def _closing(report: "AverageReport") -> str:
    from shardwise.checkpoint.contents import printable
    from shardwise.runs.quantities import size

    lines = [f"average of {len(report.sources)} checkpoints -> {report.destination}"]
    lines += [f"  {weight:g} x {source}" for weight, source in zip(report.weights, report.sources, strict=True)]
    if report.left_out:
        lines.append(f"{plural(len(report.left_out), 'tensor')} of optimizers left out (--optimizer averages them too)")
    if report.from_first:
        lines.append(f"different, and taken from the first: {', '.join(map(printable, report.from_first))}")
    if report.files:
        lines.append(f"with {', '.join(report.files)}")
    if report.missing:
        lines.append(f"without {', '.join(report.missing)}, which from_pretrained needs: give it with --config")
    how = "verified" if report.verified else "not all verified (only saves of ours are, as they are read)"
    lines.append(
        f"{plural(report.num_tensors, 'tensor')}, {size(report.num_bytes)}: {report.num_averaged} averaged in "
        f"{report.accumulate}, {report.num_equal} equal in all; {how}"
    )
    lines += [f"note: {printable(each)}" for each in report.notes]
    return "\n".join(lines)
