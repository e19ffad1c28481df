"""The contract of `Channel` on the implementations that need one process only."""

from collections.abc import Callable

import pytest

from shardwise.comm import Channel, Recorded, alone, simulate
from shardwise.testing.channels import Case, run_all
from tests.contracts.channel_cases import CASES

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def on_recorded(case: Callable[[Channel], None]) -> None:
    """What is around the simulated channel does not see how many there are."""
    simulate(3, lambda channel: case(Recorded(channel)), timeout_seconds=60)


PLACES: dict[str, Callable[[Callable[[Channel], None]], object]] = {
    "alone": lambda case: case(alone()),
    **{
        f"simulated {size}": lambda case, size=size: simulate(size, case, timeout_seconds=60)  # type: ignore[misc]
        for size in (2, 5)
    },
    "recorded": on_recorded,
}


@each_case
@pytest.mark.parametrize("place", PLACES)
def test_channels_in_one_process_fulfil_the_contract(place: str, case: Case) -> None:
    PLACES[place](case)


@each_case
def test_simulated_devices_fulfil_the_contract(fake: str, case: Case) -> None:
    simulate(3, case, timeout_seconds=60, device=fake)


def test_cases_that_do_not_poison_leave_the_channel_fit_for_the_next() -> None:
    simulate(3, run_all, timeout_seconds=60)
