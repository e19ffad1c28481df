"""When units are gathered, waited for and freed, and how often."""

import pytest

from shardwise.plan.residency import BACKWARD, FORWARD, Order, Residency, count_gathers


def passed(residency: Residency, num_units: int) -> list[Order]:
    """What one forward and backward over units one after the other ask for."""
    orders: list[Order] = []
    residency.release()
    for unit in range(num_units):
        orders += residency.begin(FORWARD, unit)
        residency.end(unit)
    for unit in reversed(range(num_units)):
        orders += residency.begin(BACKWARD, unit)
        residency.end(unit)
        orders += residency.reduce(unit)
    return orders


def test_a_unit_stays_until_another_one_needs_room() -> None:
    forward = ["gather 0", "wait 0", "free 0", "gather 1", "wait 1", "free 1", "gather 2", "wait 2"]
    backward = ["free 2", "gather 1", "wait 1", "free 1", "gather 0", "wait 0"]
    found = [f"{what} {unit}" for what, unit in passed(Residency(keeps=False, ahead=False), 3)]
    assert found == forward + backward


def test_the_next_unit_of_the_last_pass_is_gathered_ahead() -> None:
    residency = Residency(keeps=False, ahead=True)
    passed(residency, 4)
    first, second = ["gather 0", "wait 0", "gather 1"], ["wait 1", "free 0", "gather 2"]
    forward = [*first, *second, "wait 2", "free 1", "gather 3", "wait 3"]
    backward = ["free 3", "gather 1", "free 2", "gather 0", "wait 1", "wait 0"]
    assert [f"{what} {unit}" for what, unit in passed(residency, 4)] == forward + backward


def test_what_is_held_stays_also_in_the_next_pass_that_trains() -> None:
    residency = Residency(keeps=False, ahead=False)
    residency.hold()
    kept = [(what, unit) for unit in range(3) for what in ("gather", "wait")]
    residency.begin_training()
    assert passed(residency, 3) == kept
    residency.begin_training()
    assert passed(residency, 3) != kept


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_units_one_after_the_other_are_gathered_as_the_formula_says(n: int, k: int) -> None:
    units, actions = {0: range(n)}, [("F", 0), ("B", 0)] * k
    found = count_gathers(units, actions, keeps=False, ahead=False)
    assert sum(found.values()) == 2 * n * k - k - (k - 1)
    assert set(count_gathers(units, actions, keeps=True, ahead=False).values()) == {1}
    ahead = count_gathers(units, actions, keeps=False, ahead=True)
    assert sum(ahead.values()) == 2 * n * k - 2 * k - 2 * (k - 1)


def test_stages_of_one_rank_take_turns() -> None:
    actions = [("F", 0), ("F", 2), ("B", 2), ("B", 0)]
    assert count_gathers({0: [0], 2: [5]}, actions, keeps=False, ahead=False) == {0: 2, 5: 1}
