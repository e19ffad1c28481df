"""`shardwise draw SOURCE [--out FILE.svg] [--rewrite FILE] [--tensor NAME]...`."""

from pathlib import Path

import click

from shardwise.cli.convert import rewrite_parameters
from shardwise.cli.exit_verdicts import errors_in_words
from shardwise.errors import ConfigError


@click.command("draw")
@click.argument("source")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The picture [default: the name of SOURCE, with .svg].",
)
@click.option("--rewrite", metavar="FILE", help="Of a checkpoint: draw where this rewrite takes elements from.")
@click.option(
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    callback=rewrite_parameters,
    help="A parameter of the rewrite.",
)
@click.option("--tensor", "names", multiple=True, metavar="NAME", help="Draw this tensor; repeatable.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Processes, as for train; none are started [default: the ranks of the mesh].",
)
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Change a setting; repeatable.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def draw(
    source: str,
    out: Path | None,
    rewrite: str | None,
    parameters: dict[str, int | str],
    names: tuple[str, ...],
    nproc: int | None,
    overrides: tuple[str, ...],
    debug: bool,
) -> None:
    """Draw SOURCE as an SVG picture.

    SOURCE is a plan or a configuration (TOML): what each rank holds, one update, the buckets. Or it is a checkpoint:
    which file has which elements, or where a rewrite takes them from.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with errors_in_words(debug=debug):
        from shardwise.pictures.drawing import draw as svg_of

        svg = svg_of(
            source, rewrite=rewrite, parameters=parameters, names=names, num_processes=nproc, overrides=overrides
        )
        # The suffix of TOML goes; other dots are part of a name: llama-3.1-8b.
        target = out or Path(f"{Path(source).resolve().name.removesuffix('.toml')}.svg")
        picture = svg.encode()  # before the file is opened, which empties it
        try:
            target.write_bytes(picture)
        except OSError as error:
            raise ConfigError(f"--out: {target} cannot be written: {error.strerror}") from error
        click.echo(f"drawn in {target}")
