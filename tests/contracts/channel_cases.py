"""The suite of channels in `shardwise.testing`, with the errors of shardwise."""

from shardwise import errors
from shardwise.comm import Channel
from shardwise.testing import channels

CASES = channels.cases_of(errors)


def run_case(channel: Channel, name: str) -> None:
    """The case of this name, in a process of its own."""
    channels.run_case(channel, name, errors)
