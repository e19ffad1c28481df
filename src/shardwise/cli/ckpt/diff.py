"""`shardwise ckpt diff A B [--step-a N] [--step-b N] [--model-only] [--json]`."""

import json
import sys

import click

from shardwise.cli.ckpt.progress_bar import byte_progress
from shardwise.cli.exit_verdicts import INTERRUPTED, ExitVerdict, tell

SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""As diff(1) has them."""


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--step-a", type=int, help="Compare the save of this step in A (default: the newest).")
@click.option("--step-b", type=int, help="The same for B.")
@click.option("--model-only", is_flag=True, help="Leave out the state of optimizers, and extra.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def diff(a: str, b: str, step_a: int | None, step_b: int | None, model_only: bool, as_json: bool, debug: bool) -> None:
    """Compare the checkpoints A and B tensor by tensor, whatever their formats and layouts.

    Each is a checkpoint of shardwise, a folder of Hugging Face files, a safetensors file, or a folder of
    torch.distributed.checkpoint. Elements are equal when all their bits are; where dtypes differ, values are compared.
    Pieces of two saves of ours with equal checksums are not read: `verify` tells whether the files are sound.

    Exit codes, as diff(1) has them: 0 the same, 1 different, 2 trouble, 130 stopped by Ctrl-C.
    """
    from shardwise import checkpoint

    try:
        with byte_progress("comparing") as progress:
            found = checkpoint.diff(a, b, step_a=step_a, step_b=step_b, model_only=model_only, progress=progress)
        click.echo(json.dumps(found.to_json(), indent=1) if as_json else str(found))
    except KeyboardInterrupt:
        click.echo("stopped by Ctrl-C", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        tell(ExitVerdict.of(error, rank=None, debug=debug))
        sys.exit(TROUBLE)
    sys.exit(SAME if found.equal else DIFFERENT)
