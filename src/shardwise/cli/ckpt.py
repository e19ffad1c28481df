"""`shardwise ckpt`: list, compare and verify checkpoints."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.exit_verdicts import FAILED, INTERRUPTED, ExitVerdict, errors_in_words, print_verdict
from shardwise.errors import CheckpointError, plural

if TYPE_CHECKING:
    from shardwise.checkpoint import Contents, StoredPiece, VerifyReport
    from shardwise.checkpoint.manifest import Head
    from shardwise.checkpoint.saves import Listing


@click.group()
def ckpt() -> None:
    """Look into checkpoints, of this program and others."""


@ckpt.command("ls")
@click.argument("path")
@click.option("--step", type=int, help="Show the tensors of the save of this step instead of the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with everything.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def ls(path: str, step: int | None, as_json: bool, debug: bool) -> None:
    """List the saves at PATH, and the tensors of the newest.

    PATH is a folder or an address: of saves, of one save, of safetensors files, of torch.distributed.checkpoint, of
    DeepSpeed, of Megatron, or of a model that torch.save wrote. It may be one safetensors file, or one file of
    torch.save (.pt, .pth, .ckpt, .bin), or one GGUF file.
    """
    with errors_in_words(debug=debug):
        from shardwise import checkpoint
        from shardwise.checkpoint.saves import list_saves, read_head
        from shardwise.checkpoint.stores import OneFile

        store = checkpoint.store_of(path)
        try:
            listing = list_saves(store)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be listed: {error.strerror or error}") from error
        heads: dict[int, Head | CheckpointError] = {}
        for number in () if isinstance(store, OneFile) else listing.committed:  # a manifest alone is no save
            try:
                heads[number] = read_head(store, number)
            except CheckpointError as error:
                # A saver that keeps the newest only may have pruned it since the listing: that is no damage.
                if number in list_saves(store).committed:  # else it was removed meanwhile
                    heads[number] = error
        if heads and not as_json:
            _print_saves(path, listing, heads)
        contents = checkpoint.open(path, step=step).contents
        if as_json:
            click.echo(json.dumps(_as_json(path, listing, heads, contents), indent=1))
        else:
            _print_tensors(contents)


def _print_saves(path: str, listing: "Listing", heads: "dict[int, Head | CheckpointError]") -> None:
    from shardwise.checkpoint.contents import printable
    from shardwise.runs.quantities import size

    click.echo(f"{path}: {plural(len(heads), 'save')}{listing.torn_note()}{listing.renamed_note()}")
    rows = []
    for number, head in heads.items():
        if isinstance(head, Exception):
            rows.append([str(number), "", "damaged", "", "", "", "", ""])
            continue
        rows.append(
            [
                str(number or "-"),
                "-" if head.step is None else str(head.step),
                printable(head.written_at.removesuffix("+00:00").replace("T", " ")),
                size(head.num_bytes),
                str(head.num_tensors),
                printable(head.layout),
                head.file_layout,
                str(head.world_size),
            ]
        )
    header = ["save", "step", "written (UTC)", "size", "tensors", "layout", "files", "ranks"]
    print_table(header, rows, numbers=frozenset({"save", "step", "size", "tensors", "ranks"}))
    for head in heads.values():
        if isinstance(head, Exception):
            click.echo(str(head))


def _print_tensors(contents: "Contents") -> None:
    from shardwise.checkpoint.contents import printable
    from shardwise.runs.quantities import size

    when = "" if contents.step is None else f", step {contents.step}"
    kind = "" if contents.format == "shardwise" else f", {contents.format}"
    click.echo(
        f"\n{contents.location}{kind}{when}: {plural(len(contents.tensors), 'tensor')}, {size(contents.num_bytes)} in "
        f"{plural(len(contents.file_sizes), 'file')}"
    )
    rows = [
        [
            printable(tensor.name),
            tensor.dtype,
            str(list(tensor.shape)),
            str(len(tensor.pieces)),
            size(tensor.num_bytes),
            str(len({piece.file for piece in tensor.pieces})),
        ]
        for tensor in contents.tensors.values()
    ]
    header = ["name", "dtype", "shape", "pieces", "bytes", "files"]
    print_table(header, rows, numbers=frozenset({"pieces", "bytes", "files"}))
    for alias, name in contents.aliases.items():
        click.echo(f"{printable(alias)} is {printable(name)}")
    for note in contents.notes:
        click.echo(printable(note))


def _as_json(
    path: str, listing: "Listing", heads: "dict[int, Head | CheckpointError]", contents: "Contents"
) -> dict[str, Any]:
    saves: list[dict[str, Any]] = []
    for number, head in heads.items():
        folder = f"save-{number:08d}" if number else "."
        if isinstance(head, Exception):
            saves.append({"save": folder, "damaged": str(head)})
            continue
        saves.append(
            {
                "save": folder,
                "step": head.step,
                "written_at": head.written_at,
                "bytes": head.num_bytes,
                "tensors": head.num_tensors,
                "layout": head.layout,
                "file_layout": head.file_layout,
                "ranks": head.world_size,
            }
        )
    return {
        "path": path,
        "format": contents.format,
        "saves": saves,
        "torn": [{"save": f"save-{number:08d}", "files": len(listing.files[number])} for number in listing.torn],
        "shown": {
            "location": contents.location,
            "step": contents.step,
            "bytes": contents.num_bytes,
            "files": dict(contents.file_sizes),
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": tensor.num_bytes,
                    "pieces": [_piece_as_json(piece) for piece in tensor.pieces],
                }
                for tensor in contents.tensors.values()
            ],
            "aliases": dict(contents.aliases),
            "extra": dict(contents.extra),
            "notes": list(contents.notes),
        },
    }


def _piece_as_json(stored: "StoredPiece") -> dict[str, Any]:
    run = stored.piece.run
    return {
        "file": stored.file,
        "start": stored.start,
        "bytes": stored.num_bytes,
        "offset": list(stored.piece.offset),
        "shape": list(stored.piece.shape),
        "run": None if run is None else [run.start, run.stop],
    }


DIFFERENT, TROUBLE = 1, 2
"""As diff(1) has them."""


@ckpt.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--step-a", type=int, help="Compare the save of this step in A (default: the newest).")
@click.option("--step-b", type=int, help="The same for B.")
@click.option("--model-only", is_flag=True, help="Leave out the state of optimizers, and extra.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def diff(a: str, b: str, step_a: int | None, step_b: int | None, model_only: bool, as_json: bool, debug: bool) -> None:
    """Compare the checkpoints A and B tensor by tensor, whatever their formats and layouts.

    Each is a checkpoint of shardwise, a folder of Hugging Face files, a safetensors file, a file of torch.save or GGUF,
    or a folder of torch.distributed.checkpoint, DeepSpeed or Megatron. Elements are equal when all their bits are;
    where dtypes differ, values are compared. Pieces of two saves of ours with equal checksums are not read: `verify`
    tells whether the files are sound.

    Exit codes, as diff(1) has them: 0 the same, 1 different, 2 trouble, 130 stopped by Ctrl-C.
    """
    try:
        from shardwise import checkpoint

        with byte_progress("comparing") as progress:
            found = checkpoint.diff(a, b, step_a=step_a, step_b=step_b, model_only=model_only, progress=progress)
        click.echo(json.dumps(found.to_json(), indent=1) if as_json else str(found))
    except KeyboardInterrupt:
        click.echo("stopped by Ctrl-C", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        print_verdict(ExitVerdict.of(error, rank=None, debug=debug))
        sys.exit(TROUBLE)  # not 1, which says that both were read and differ: scripts tell these apart
    if not found.equal:
        sys.exit(DIFFERENT)


@ckpt.command("verify")
@click.argument("path")
@click.option("--step", type=int, help="Verify the save of this step instead of the newest.")
@click.option("--all", "verifies_all", is_flag=True, help="Verify all saves at PATH.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def verify(path: str, step: int | None, verifies_all: bool, debug: bool) -> None:
    """Read every byte of the newest save at PATH, or of all, and compare it with its checksum.

    Archives of torch.save have checksums too. Of files that have none all bytes of tensors are read, and the answer
    says that no one can tell whether they are as they were written.

    Exit codes: 0 nothing is wrong with what was read, 1 something is, or it cannot be read, 2 wrong usage.
    """
    if verifies_all and step is not None:
        raise click.UsageError("--all verifies the saves of all steps; leave out --step")
    with errors_in_words(debug=debug):
        from shardwise import checkpoint

        with byte_progress("verifying") as show:
            # Known from metadata, so that the bar has an end. Damaged metadata makes it short: it grows as bytes come.
            total = _total_bytes(path, step, verifies_all=verifies_all)
            verified = 0

            def advance(num_bytes: int) -> None:
                nonlocal verified
                verified += num_bytes
                show(verified, max(verified, total))

            if verifies_all:
                reports = checkpoint.verify_all(path, progress=advance)
            else:
                reports = [checkpoint.verify(path, step=step, progress=advance)]
        for note in (note for report in reports for note in report.notes):
            click.echo(f"note: {note}", err=True)
        for report in reports:
            _print_report(report)
        if not all(report.good for report in reports):
            sys.exit(FAILED)
        # Said last and on stderr: who pipes the verdict into a script gets the verdict only.
        if step is None and not verifies_all and (others := _num_others(path)):
            click.echo(f"note: {plural(others, 'other save')} at {path} not read; --all reads them too", err=True)


def _print_report(report: "VerifyReport") -> None:
    from shardwise.errors import few_of
    from shardwise.runs.quantities import size

    if report.good:
        held = f"{plural(report.num_tensors, 'tensor')}, {size(report.verified_bytes + report.unverified_bytes)} in "
        held += plural(report.num_files, "file")
        if not report.unverified_bytes:
            click.echo(f"{report.location} is as it was written: {held}")
            return
        compared = f"{size(report.verified_bytes)} are as they were written. " if report.verified_bytes else ""
        click.echo(
            f"{report.location} is complete: {held}. {compared}{size(report.unverified_bytes)} have no checksums "
            f"({few_of(list(report.unverified_files), quotes=False)}): no one can tell whether they are as they were "
            "written. `shardwise ckpt convert` gives them checksums from then on"
        )
        return
    click.echo(
        f"Error: {report.location} is not as it was written: {plural(len(report.findings), 'finding')}:\n"
        + "\n".join(f"  - {finding}" for finding in report.findings),
        err=True,
    )


def _total_bytes(path: str, step: int | None, *, verifies_all: bool) -> int:
    """Bytes that will be read, as far as it is known."""
    from shardwise import checkpoint
    from shardwise.checkpoint.saves import list_saves, read_head, select
    from shardwise.errors import CheckpointError

    total = 0
    # What is wrong is said by who verifies.
    with contextlib.suppress(OSError, CheckpointError):
        store = checkpoint.store_of(path)
        for number in list_saves(store).committed if verifies_all else [select(store, step=step)]:
            with contextlib.suppress(CheckpointError):
                total += read_head(store, number).num_bytes
    return total


def _num_others(path: str) -> int:
    """Other saves than the verified one."""
    from shardwise import checkpoint
    from shardwise.checkpoint.saves import list_saves

    with contextlib.suppress(OSError):
        return max(0, len(list_saves(checkpoint.store_of(path)).committed) - 1)
    return 0


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: frozenset[str]) -> None:
    """Print rows below a header; the columns in `numbers` end alike, the others begin alike."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        ).rstrip()

    click.secho(line(header), bold=True)
    for row in rows:
        click.echo(line(row))


@contextlib.contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes the bytes that are done and the bytes in all.

    The bar is on stderr, and goes at the end. Where stderr is no terminal, nothing is shown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
