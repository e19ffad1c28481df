"""The command line: words in, calls to the rooms out."""

import click

from shardwise import __version__
from shardwise.cli.average import average
from shardwise.cli.ckpt import ckpt
from shardwise.cli.convert import convert
from shardwise.cli.doctor import doctor
from shardwise.cli.draw import draw
from shardwise.cli.plan import plan
from shardwise.cli.schedule import schedule
from shardwise.cli.top import top
from shardwise.cli.train import train
from shardwise.cli.verify import verify


@click.group()
@click.version_option(__version__, prog_name="shardwise")
def main() -> None:
    """Write the single-process program once; run it under any layout; get the same numbers."""


main.add_command(train)
main.add_command(verify)
ckpt.add_command(convert)
ckpt.add_command(average)
main.add_command(ckpt)
main.add_command(plan)
main.add_command(schedule)
main.add_command(draw)
main.add_command(doctor)
main.add_command(top)
