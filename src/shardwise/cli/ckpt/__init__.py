"""`shardwise ckpt`: look after checkpoints. Each command is a module of this folder."""

import click

from shardwise.cli.ckpt.convert import convert
from shardwise.cli.ckpt.diff import diff
from shardwise.cli.ckpt.ls import ls
from shardwise.cli.ckpt.verify import verify


@click.group()
def ckpt() -> None:
    """Look into checkpoints, of this program and others."""


ckpt.add_command(convert)
ckpt.add_command(diff)
ckpt.add_command(ls)
ckpt.add_command(verify)
