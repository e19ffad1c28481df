"""The sum of what many ranks give is that of `math.fsum` to the bit, in any order."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.engine.step.exchange import exact_sum
from tests.properties import tried

alike = st.floats(-1.0, 1.0)
unlike = st.floats(allow_nan=False, allow_infinity=False, max_value=1e304, min_value=-1e304)


@tried(20)
@given(st.lists(alike | unlike, min_size=1, max_size=12), st.integers(1, 400))
def test_a_sum_is_rounded_once(values: list[float], times: int) -> None:
    many = [each * (1 + at % 7) for at in range(times) for each in values if abs(each) < 1e300] + values
    assert exact_sum(many) == math.fsum(many) == exact_sum(many[::-1])


def test_sums_that_cancel_keep_what_is_left() -> None:
    large = [1e300, -1e300, 1e16, -1e16, 1.0, 5e-324] * 100
    assert exact_sum(large) == math.fsum(large) == 100.0
    assert exact_sum([5e-324] * 4096) == 4096 * 5e-324
    assert exact_sum([0.0] * 4096) == exact_sum([]) == 0.0


@pytest.mark.parametrize("values", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [1.7e308, 1.7e308]])
def test_a_sum_that_is_not_finite_is_nan(values: list[float]) -> None:
    assert math.isnan(exact_sum(values))
    assert math.isnan(exact_sum([1.0] * 1000 + values))
