"""The contract of `Channel`: `CASES`, which hold for every implementation and every number of ranks.

A case is called on all ranks with their channels and asserts what its rank sees; `case.name` is unique. Every rank can
compute every rank's inputs, so it knows the expected result alone. After a case that `poisons`, the channel is of no
use and the next case needs a fresh one.
"""

from shardwise.comm import Channel
from tests.contracts import channel_collective_cases, channel_fault_cases, channel_message_cases
from tests.contracts.channel_oracles import Case

CASES: list[Case] = [
    value
    for module in (channel_collective_cases, channel_message_cases, channel_fault_cases)
    for value in vars(module).values()
    if isinstance(value, Case)
]


def run_case(channel: Channel, name: str) -> None:
    """The case of this name, in a process of its own."""
    next(case for case in CASES if case.name == name)(channel)


def run_all(channel: Channel) -> None:
    """Those after which the channel goes on, one after the other: a case finds what the last one has left."""
    for case in CASES:
        if not case.poisons:
            case(channel)
