"""The contract of `Channel` on the implementations that need one process only."""

import pytest

from shardwise.comm import Channel, Recorded, alone, simulate
from tests.contracts.channel_cases import CASES
from tests.contracts.channel_oracles import Case

SIZES = (1, 2, 3, 5)
FEW = (1, 2, 3)  # what is around the simulated channel does not see how many there are

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
@pytest.mark.parametrize("size", SIZES)
def test_simulated_ranks_fulfil_the_contract(case: Case, size: int) -> None:
    simulate(size, case, timeout_seconds=30)


@each_case
@pytest.mark.parametrize("size", FEW)
def test_recorded_ranks_fulfil_the_contract(case: Case, size: int) -> None:
    simulate(size, lambda channel: case(Recorded(channel)), timeout_seconds=30)


@each_case
def test_a_world_of_one_fulfils_the_contract(case: Case) -> None:
    case(alone())


@pytest.mark.parametrize("size", FEW)
def test_cases_that_do_not_poison_leave_the_channel_fit_for_the_next(size: int) -> None:
    def run_all(channel: Channel) -> None:
        for case in CASES:
            if not case.poisons:
                case(channel)

    simulate(size, run_all, timeout_seconds=30)


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 30
