"""`shardwise ckpt convert SRC DST [--to pieces|whole|hf] [--step N]`."""

import time
from typing import TYPE_CHECKING, Literal

import click

from shardwise.cli.ckpt.progress import byte_progress
from shardwise.cli.ckpt.table import plural
from shardwise.cli.verdicts import told

if TYPE_CHECKING:
    from shardwise.checkpoint import ConvertReport


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
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def convert(source: str, destination: str, to: Literal["pieces", "whole", "hf"], step: int | None, debug: bool) -> None:
    """Write the checkpoint SRC to DST in another form.

    SRC is a checkpoint of shardwise, a folder of Hugging Face files, a safetensors file, or a folder of
    torch.distributed.checkpoint. No model is needed, nothing is renamed, and memory stays bounded. DST is there as a
    whole or not at all.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with told(debug=debug):
        from shardwise import checkpoint

        begun = time.perf_counter()
        with byte_progress("converting") as progress:
            report = checkpoint.convert(source, destination, to=to, step=step, progress=progress)
        click.echo(_closing(report, time.perf_counter() - begun))


def _closing(report: "ConvertReport", seconds: float) -> str:
    from shardwise.checkpoint.names import printable
    from shardwise.train.progress import size

    lines = [f"{report.source} ({report.source_format}) -> {report.destination}"]
    if report.left_out:
        masters = f", of them {plural(report.num_masters, 'master')}" if report.num_masters else ""
        lines.append(f"{plural(len(report.left_out), 'tensor')} of optimizers left out{masters}")
    if report.aliases:
        shown = [f"{printable(alias)} = {printable(name)}" for alias, name in list(report.aliases.items())[:3]]
        more = f" and {len(report.aliases) - 3:,} more" if len(report.aliases) > 3 else ""
        lines.append(f"tied tensors written once: {', '.join(shown)}{more}")
    how = "verified" if report.verified else f"unverified ({report.source_format} has no checksums)"
    speed = f"{size(int(report.num_bytes / max(seconds, 1e-3)))}/s"
    lines.append(
        f"{plural(report.num_tensors, 'tensor')}, {size(report.num_bytes)}, {how}, in {seconds:.1f} s ({speed})"
    )
    return "\n".join(lines)
