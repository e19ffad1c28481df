"""The suite that a channel must pass: `cases_of`, which hold for every implementation and every number of ranks.

    CASES = channels.cases_of(shardwise.errors)

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_my_channel(case: channels.Case) -> None:
        run_on_all_ranks(lambda rank: case(MyChannel(rank)))

A case is called on all ranks with their channels and asserts what its rank sees. Every rank can compute every rank's
inputs, so it knows the expected result alone. After a case that `poisons`, the channel is of no use and the next case
needs a fresh one.
"""

from shardwise.testing.channels import collectives, faults, messages
from shardwise.testing.channels.oracles import Case, Channel, Errors

__all__ = ["Case", "cases_of", "run_all", "run_case"]


def cases_of(errors: Errors) -> list[Case]:
    """All cases. errors: what has `MismatchError` and `PeerError`, which channels raise."""
    found = [each for module in (collectives, messages, faults) for each in vars(module).values()]
    return [Case(each.body, each.poisons, errors) for each in found if isinstance(each, Case)]


def run_case(channel: Channel, name: str, errors: Errors) -> None:
    """The case of this name, in a process of its own."""
    next(case for case in cases_of(errors) if case.name == name)(channel)


def run_all(channel: Channel) -> None:
    """Those after which the channel goes on, one after the other: a case finds what the last one has left."""
    for case in cases_of(None):
        if not case.poisons:
            case(channel)
