"""`shardwise ckpt convert SRC DST [--to FORMAT] [--rewrite FILE] [--inverse] [--dtype DTYPE] ...`."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import click

from shardwise.cli.ckpt import byte_progress
from shardwise.cli.exit_verdicts import Renamed, errors_in_words
from shardwise.errors import plural

if TYPE_CHECKING:
    from shardwise.checkpoint import ConvertReport
    from shardwise.checkpoint.conversion import ConvertTarget, Weights
    from shardwise.rewrite import Rewrite


def rewrite_parameters(context: click.Context, option: click.Parameter, words: tuple[str, ...]) -> dict[str, int | str]:
    """`num_heads=32` as a name and its value."""
    found: dict[str, int | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise click.BadParameter(f"{word!r} is not of the form name=value", context, option)
        found[name] = int(value) if value.isdecimal() else value
    return found


class Target(click.Choice):  # type: ignore[type-arg]  # click 8.1 knows no parameters
    """What can be written. Formats of other packages are looked for where it is none of those that come along."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name of the target. Raises BadParameter."""
        if value not in self.choices:
            from shardwise.checkpoint.formats.registry import folder_planners

            others = [each for each in folder_planners() if each not in self.choices]
            return str(click.Choice([*self.choices, *others]).convert(value, param, ctx))
        return str(super().convert(value, param, ctx))


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--to",
    type=Target(["pieces", "whole", "hf", "dcp", "torchtitan", "deepspeed-universal", "megatron"]),
    default="whole",
    show_default=True,
    help="pieces, whole: a save of shardwise in the folder DST. hf: a new folder DST of Hugging Face files. With the "
    "state of the optimizer, a new folder DST for torch.distributed.checkpoint (dcp), torchtitan, DeepSpeed "
    "(deepspeed-universal) or Megatron.",
)
@click.option("--step", type=int, help="Read the save of this step (default: the newest).")
@click.option(
    "--rewrite",
    metavar="FILE",
    help="Rename, join, split, transpose or cast tensors as this file says. Also the name of a rewrite that comes with "
    "shardwise.",
)
@click.option("--inverse", is_flag=True, help="Undo the rewrite; without --rewrite, the one by which SRC was made.")
@click.option("--lossy", is_flag=True, help="With --inverse: also undo rewrites that rounded or copied values.")
@click.option(
    "--parameter",
    "--set",
    "parameters",
    cls=Renamed,
    metavar="NAME=VALUE",
    multiple=True,
    callback=rewrite_parameters,
    help="A parameter of the rewrite; the others come from config.json. May be given several times.",
)
@click.option(
    "--like",
    metavar="ORIGINAL",
    help="With --to hf: write in the form of this checkpoint: its names, shapes, dtypes, files, configuration and "
    "tokenizer. Without --rewrite, the rewrite that SRC has on record leads back there; with --rewrite X --inverse, "
    "that of X. --certify compares the written files with it.",
)
@click.option(
    "--config",
    metavar="FILE_OR_DIR",
    help="A config.json, or a folder with one and a tokenizer, for DST instead of those of SRC.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "float64"]),
    help="With --to hf and other formats: write the model's floats in this dtype, out of masters where SRC has them. "
    "By default they are written as stored; for other programs that train, the masters are.",
)
@click.option(
    "--weights",
    type=click.Choice(["current", "average"]),
    default="current",
    show_default=True,
    help="average: the model with the averages that a run kept of its weights ([average]), without the state of the "
    "optimizer.",
)
@click.option(
    "--dequantise",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Multiply float8 weights by the scales of their blocks, into this dtype, before anything else is done.",
)
@click.option("--dry-run", is_flag=True, help="Read metadata only, show which outputs SRC would give, write nothing.")
@click.option(
    "--certify", is_flag=True, help="Read DST again, back through the inverse, and write round-trip.json there."
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def convert(
    source: str,
    destination: str,
    to: "ConvertTarget",
    step: int | None,
    rewrite: str | None,
    inverse: bool,
    lossy: bool,
    parameters: dict[str, int | str],
    like: str | None,
    config: str | None,
    dtype: str | None,
    weights: "Weights",
    dequantise: str | None,
    dry_run: bool,
    certify: bool,
    debug: bool,
) -> None:
    """Write the checkpoint SRC to DST in another form.

    SRC is a checkpoint of shardwise, a folder of Hugging Face files, a safetensors file, a file of torch.save or GGUF,
    or a folder of torch.distributed.checkpoint, DeepSpeed or Megatron. No model is needed, and memory stays bounded.
    DST is there as a whole or not at all.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    is_back = inverse or (like is not None and rewrite is None)
    wrong = {
        "--parameter is of a rewrite; name one with --rewrite": parameters and rewrite is None,
        "--lossy is for the way back; give --inverse or --like": lossy and not is_back,
        "--dtype is for --to hf; a save has masters and working copies both": dtype is not None
        and to in ("pieces", "whole"),
        "--like leads back, or is the form of --to hf; give --inverse, --to hf or --certify": like is not None
        and to != "hf"
        and not (is_back or certify),
        "--dequantise is for the way there; leave out --inverse": dequantise is not None and is_back,
        "--dry-run shows the effect of a rewrite; name one with --rewrite": dry_run
        and rewrite is None
        and not (is_back or dequantise),
    }
    # Before anything is read: an option that would do nothing is a misunderstanding, which costs more when found late.
    for words in (words for words, is_so in wrong.items() if is_so):
        raise click.UsageError(words)
    with errors_in_words(debug=debug), _pointing_back(is_blind=inverse and like is None):
        from shardwise import checkpoint

        way: Literal["refuse", "allow"] = "allow" if lossy else "refuse"
        if rewrite is None and like is not None:
            used = checkpoint.way_back(source, like, step=step, lossy=way)
        else:
            used = _rewrite(source, step, rewrite, parameters) if inverse or rewrite is not None else None
            if inverse and used is not None:
                used = used.inverse(lossy=way) if like is None else checkpoint.inverse_like(used, like, lossy=way)
        if dequantise is not None:
            first = checkpoint.dequantising(source, dequantise, step=step)
            used = first if used is None else first >> used
        form = like if to == "hf" else None
        if dry_run and used is not None:
            table = checkpoint.preview(
                source,
                destination,
                rewrite=used,
                to=to,
                config=config,
                dtype=dtype,
                like=form,
                weights=weights,
                step=step,
            )
            click.echo(table)
        if dry_run:
            click.echo("nothing was written")
            return
        # Only a certificate reads the values of the original, which costs a read of SRC.
        begun = time.perf_counter()
        with byte_progress("converting") as progress:
            report = checkpoint.convert(
                source,
                destination,
                to=to,
                rewrite=used,
                config=config,
                dtype=dtype,
                like=form,
                weights=weights,
                step=step,
                certify=certify,
                original=like if certify else None,
                progress=progress,
            )
        click.echo(_closing(report, time.perf_counter() - begun))


@contextlib.contextmanager
def _pointing_back(*, is_blind: bool) -> Iterator[None]:
    """Say of a way back that is not found what may find it."""
    from shardwise.errors import RewriteError

    try:
        yield
    except RewriteError as error:
        # Without the original, degrees and shapes are guessed from SRC. With it the same way back may be found.
        if is_blind:
            error.add_note(
                "If the way back needs the original names and shapes: --rewrite NAME --inverse --like ORIGINAL"
            )
        raise


def _rewrite(source: str, step: int | None, name: str | None, parameters: dict[str, int | str]) -> "Rewrite":
    """The rewrite that was asked for by name, else the one by which the source was made."""
    from shardwise import checkpoint
    from shardwise.rewrite import find_rewrite

    if name is None:
        return checkpoint.recorded_rewrite(source, step=step)
    return _with_parameters(find_rewrite(name), name, parameters)


def _with_parameters(rewrite: "Rewrite", name: str, parameters: dict[str, int | str]) -> "Rewrite":
    """The rewrite with these parameters; it has to know all of them."""
    from shardwise.errors import RewriteError

    if not parameters:
        return rewrite
    needed = sorted(rewrite.parameters_needed)
    for each in parameters:
        if each not in needed:
            near = get_close_matches(each, needed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            has = f"its parameters are {', '.join(needed)}" if needed else "it has no parameters"
            raise click.UsageError(f"--parameter {each}: the rewrite {name} has no parameter {each}; {has}{hint}")
    try:
        return rewrite.with_parameters(parameters)
    except RewriteError as error:
        raise RewriteError(*error.problems, about=name) from None


def _closing(report: "ConvertReport", seconds: float) -> str:
    from shardwise.checkpoint.contents import printable
    from shardwise.runs.quantities import size

    lines = [f"{report.source} ({report.source_format}) -> {report.destination}"]
    if report.left_out:
        masters = f", of them {plural(report.num_masters, 'master')}" if report.num_masters else ""
        lines.append(f"{plural(len(report.left_out), 'tensor')} of optimizers left out{masters}")
    if report.from_masters:
        lines.append(f"{plural(len(report.from_masters), 'tensor')} out of masters, in the place of working copies")
    if report.cast:
        lines.append(f"{plural(len(report.cast), 'tensor')} cast to the wanted dtype: {_some(report.cast)}")
    if report.uncast:
        lines.append(
            f"{plural(len(report.uncast), 'float')} in modules with packed codes not cast: {_some(report.uncast)}. "
            "A --rewrite with dtype= casts them"
        )
    if report.dropped:
        lines.append(f"dropped by the rewrite: {_some(report.dropped)}")
    if report.aliases:
        lines.append(
            f"tied tensors written once: {_some([f'{one} = {other}' for one, other in report.aliases.items()])}"
        )
    if report.files:
        lines.append(f"with {', '.join(report.files)}")
    if report.missing:
        lines.append(
            f"without {', '.join(report.missing)}, which SRC does not have and from_pretrained needs: give it with "
            "--config FILE_OR_DIR"
        )
    how = "verified" if report.verified else "unverified (only saves of shardwise are compared as they are read)"
    speed = f"{size(int(report.num_bytes / max(seconds, 1e-3)))}/s"
    lines.append(
        f"{plural(report.num_tensors, 'tensor')}, {size(report.num_bytes)}, {how}, in {seconds:.1f} s ({speed})"
    )
    if report.certificate is not None:
        lines.append(str(report.certificate))
    lines += [f"note: {printable(each)}" for each in report.notes]
    return "\n".join(lines)


def _some(names: Sequence[str]) -> str:
    """The first of names, and how many more there are."""
    from shardwise.checkpoint.contents import printable

    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(map(printable, names[:3])) + more
