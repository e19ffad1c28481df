"""`shardwise ckpt ls PATH`: which saves are there, and what the newest holds."""

import json
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.ckpt.table import plural, print_table
from shardwise.cli.exit_verdicts import told
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.checkpoint import Contents, StoredPiece
    from shardwise.checkpoint.manifest import Head
    from shardwise.checkpoint.saves import Listing


@click.command("ls")
@click.argument("path")
@click.option("--step", type=int, help="Show the tensors of the save of this step instead of the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with everything.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def ls(path: str, step: int | None, as_json: bool, debug: bool) -> None:
    """List the saves at PATH, and the tensors of the newest.

    PATH is a folder or an address: of saves, of one save, of safetensors files, or of torch.distributed.checkpoint.
    """
    with told(debug=debug):
        from shardwise import checkpoint
        from shardwise.checkpoint.addresses import OneFile
        from shardwise.checkpoint.saves import list_saves, read_head

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
    from shardwise.checkpoint.stored_names import printable
    from shardwise.train.observers import size

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
    from shardwise.checkpoint.stored_names import printable
    from shardwise.train.observers import size

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
