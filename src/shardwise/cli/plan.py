"""`shardwise plan [FOLDER] --ranks N --memory 80GB ...`: which layout?"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.exit_verdicts import errors_in_words
from shardwise.errors import ConfigError, plural

if TYPE_CHECKING:
    from shardwise.plan.layouts import Job, Layout, ModelSize

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _number(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number with or without a unit: 7e9, 7B, 80GB, 80GiB."""
    if value is None:
        return None
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kmgt]i?)?(b?)", value.strip().lower())
    # A B alone is a billion of parameters; of bytes it says nothing.
    is_billions = found is not None and param.name == "parameters" and found[3] and not found[2]
    try:
        number = 0 if found is None else round(float(found[1]) * (10**9 if is_billions else _UNITS[found[2] or ""]))
    except (ValueError, OverflowError):  # two points, or beyond all floats
        number = 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is not a number of at least 1, such as 7e9, 7B or 80GB", ctx, param)
    return number


@click.command("plan")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--parameters", callback=_number, metavar="N", help="Of the model, in all: 7e9, 7B.")
@click.option("--layers", type=click.IntRange(min=1), help="Its equal blocks.")
@click.option("--hidden", type=click.IntRange(min=1), help="Width of what goes from block to block.")
@click.option("--vocabulary", type=click.IntRange(min=1), help="Words [default: 32000].")
@click.option("--heads", type=click.IntRange(min=1), help="Of the attention: tp divides them.")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Devices in all.")
@click.option("--memory", callback=_number, metavar="BYTES", required=True, help="Of one device: 80GB, 40GiB.")
@click.option("--tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Of one microbatch.")
@click.option("--batch-tokens", callback=_number, metavar="N", help="Of an update [default: 4 microbatches a rank].")
@click.option("--ranks-per-host", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--tflops", type=float, default=400.0, show_default=True, help="That a device reaches.")
@click.option("--host-bandwidth", callback=_number, default="300GB", show_default=True, help="A second, in a host.")
@click.option(
    "--bandwidth", callback=_number, default="25GB", show_default=True, help="A second and rank, between hosts."
)
@click.option("--all", "shows_all", is_flag=True, help="Show every layout.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def plan(
    folder: Path | None,
    parameters: int | None,
    layers: int | None,
    hidden: int | None,
    vocabulary: int | None,
    heads: int | None,
    shows_all: bool,
    debug: bool,
    tflops: float,
    memory: int,
    host_bandwidth: int,
    **sizes: Any,
) -> None:
    """Say which layout fits, what it holds and sends, and which one to take.

    The model is given by its sizes, or by a FOLDER with a config.json. Bytes of parameters are those of a run;
    activations and times are estimates. Neither torch nor a device is needed.

    Exit codes: 0 done, 1 failed or no layout fits, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with errors_in_words(debug=debug):
        from shardwise.plan.layouts import Job, best_of, layouts

        given = {"layers": layers, "hidden": hidden, "vocabulary": vocabulary, "heads": heads}
        size = _size(folder, parameters, {name: value for name, value in given.items() if value is not None})
        job = Job(memory_bytes=memory, flops=tflops * 1e12, host_bandwidth=host_bandwidth, **sizes)
        found = layouts(size, job)
        best = best_of(found, job)
        for line in _lines(size, job, found, best, most=None if shows_all else 8):
            click.echo(line)
    if best is None:
        raise SystemExit(1)


def _size(folder: Path | None, parameters: int | None, given: dict[str, Any]) -> "ModelSize":
    from shardwise.plan.layouts import ModelSize

    if folder is None:
        missing = [f"--{name}" for name in ("layers", "hidden") if name not in given]
        if parameters is None or missing:
            asked = ", ".join([*(["--parameters"] if parameters is None else []), *missing])
            raise ConfigError(f"the model is not known: give {asked}, or a folder with a config.json")
        return ModelSize(parameters=parameters, **given)
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not an object of settings")
    return ModelSize.from_config(config, parameters=parameters, **given)


def _lines(
    size: "ModelSize", job: "Job", found: "list[Layout]", best: "Layout | None", *, most: int | None
) -> list[str]:
    lines = [
        f"{size.parameters / 1e9:.3g} billion parameters in {size.layers} blocks of width {size.hidden}, "
        f"{size.vocabulary} words; AdamW, {job.compute}",
        f"{plural(job.ranks, 'rank')} with {job.memory_bytes / 1e9:.0f} GB, {job.tokens} tokens in a microbatch, "
        f"{job.update_tokens} in an update",
    ]
    fitting = [each for each in found if each.fits(job)]
    others = [each for each in found if not each.fits(job)]
    if fitting:
        shown = fitting[:most]
        if best is not None and best not in shown:
            shown[-1] = best
        lines += ["", *_table(shown, best, fitting[0])]
        if len(shown) < len(fitting):
            lines.append(f"{len(fitting) - len(shown)} more fit: --all shows them")
    if others:
        lines += ["", f"too large for nine tenths of {job.memory_bytes / 1e9:.0f} GB:"]
        lines += [f"  {_name(each)}: {each.total_bytes / 1e9:.0f} GB" for each in others[: most and most // 2]]
        if most and len(others) > most // 2:
            lines.append(f"  and {len(others) - most // 2} larger ones")
    if best is None:
        return [*lines, "", "no layout fits: take more ranks, fewer tokens in a microbatch, or offload (see the guide)"]
    mean = "It is the fastest." if best is fitting[0] else "It is the simplest within a tenth of the fastest."
    return [
        *lines,
        "",
        f"take {_name(best)}. {mean}",
        "",
        *_toml(best),
        "",
        "GB are those of the fullest rank, and of an update. Weights, gradients, masters and what is on its way are "
        "those of a run;",
        "activations, logits and times are estimates, and a time counts all that is sent as if nothing hid it.",
    ]


def _name(layout: "Layout") -> str:
    plan = layout.plan
    again = ", checkpoint" if plan.activations.checkpoint else ""
    return f"{plan.mesh or 'one rank'}, stage {plan.sharding.stage}, k={plan.merge.microbatches}{again}"


def _table(shown: "list[Layout]", best: "Layout | None", fastest: "Layout") -> list[str]:
    heads = ["GB", *fastest.held, "all", "sent", "time", "slower by"]
    rows = [heads]
    for each in shown:
        name = f"{'>' if each is best else ' '} {_name(each)}"
        held = [f"{value / 1e9:.1f}" for value in each.held.values()]
        sent = f"{sum(each.sent.values()) / 1e9:.0f}"
        ratio = each.total_seconds / fastest.total_seconds
        why = "" if each is fastest else each.slower_by(fastest)
        rows.append([name, *held, f"{each.total_bytes / 1e9:.0f}", sent, f"{ratio:.2f}", why])
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    last = len(heads) - 1
    return [
        "  ".join(
            cell.ljust(width) if at in (0, last) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _toml(layout: "Layout") -> list[str]:
    """The settings that are not the defaults."""
    from shardwise.plan.specs import Plan

    usual = set(Plan().text().splitlines())
    return [line for line in layout.plan.text().splitlines() if line not in usual]
