"""When units are gathered, waited for and freed, and how often."""

import pytest

from shardwise.plan.residency import BACKWARD, FORWARD, Order, Residency, Use, count_gathers, one_by_one


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
    found = count_gathers({0: one_by_one(n)}, [("F", 0), ("B", 0)] * k, keeps=False)
    assert sum(found.values()) == 2 * n * k - k - (k - 1)
    assert set(count_gathers({0: one_by_one(n)}, [("F", 0), ("B", 0)] * k, keeps=True).values()) == {1}
    ahead = count_gathers({0: one_by_one(n)}, [("F", 0), ("B", 0)] * k, keeps=False, ahead=True)
    assert sum(ahead.values()) == 2 * n * k - 2 * k - 2 * (k - 1)


def test_what_lies_around_others_stays_and_what_has_no_backward_is_gathered_once() -> None:
    nested = [Use(9, True), *one_by_one(3), Use(9, False)]
    found = count_gathers({0: nested}, [("F", 0), ("B", 0)], keeps=False)
    assert found == {9: 1, 0: 2, 1: 2, 2: 1}
    assert count_gathers({0: nested}, [("F", 0), ("B", 0)], keeps=False, backward={2, 9}) == {9: 1, 0: 1, 1: 1, 2: 1}


def test_stages_of_one_rank_take_turns() -> None:
    forward = {0: one_by_one(1), 2: [Use(5, True), Use(5, False)]}
    actions = [("F", 0), ("F", 2), ("B", 2), ("B", 0)]
    assert count_gathers(forward, actions, keeps=False) == {0: 2, 5: 1}
