"""The arithmetic of verification: bounds, closeness of tensors."""

import math

import pytest
import torch

import shardwise as sw
from shardwise.verification.error_model import ELEMENT_FACTOR, ErrorModel, by_element, by_size
from shardwise.verification.run_recording import SAMPLED_ELEMENTS, places
from tests.verification.verified import plan


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_what_a_plan_has_in_common_with_one_process() -> None:
    assert ErrorModel.of(plan(dp_shard=4)).same_forward
    stages = ErrorModel.of(plan(pp=2))
    assert (stages.same_forward, stages.same_up_to_order, stages.wire_roundoff) == (False, True, 0)
    assert not ErrorModel.of(plan(tp=2)).same_up_to_order
    model = ErrorModel.of(plan(dp_shard=2, precision=sw.Precision(compute="bfloat16", reduce="bfloat16")))
    assert model.of_sum(4) == 12 * 2**-24 + 2**-8


def test_sums_in_any_order_are_within_the_bound_of_sums_and_a_factor_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(16, 4096, generator=generator)
    exact, sizes = terms.double().sum(0), terms.double().abs().sum(0)
    allowed = ErrorModel.of(plan(16)).of_sum(16) * sizes
    for order in (torch.arange(16), torch.randperm(16, generator=generator)):
        added = torch.zeros(4096)
        for at in order:
            added += terms[at]
        assert 0 < by_element(exact, added.double(), allowed).ratio < 1
    found = by_element(exact, exact * 1.00001, allowed)
    assert found.ratio > 1
    assert found.theirs == exact[found.at].item() * 1.00001


def test_sizes_are_compared_as_a_whole_and_element_by_element() -> None:
    ours = torch.ones(10_000, dtype=torch.float64)
    assert by_size(ours, ours + 0.9e-3, 1e-3).ratio == pytest.approx(0.9)
    theirs = ours.clone()
    theirs[77] += 3 * ELEMENT_FACTOR * 1e-3  # a hundredth of that in the root mean square
    found = by_size(ours, theirs, 1e-3)
    assert found.at == 77
    assert found.ratio == pytest.approx(1.5)
    assert by_size(ours * 1e-9, ours * 2e-9, 1e-3).ratio > 1
    assert by_size(ours * 1e-9, ours * 2e-9, 1e-3, least_size=1e-3).ratio < 1
    assert by_size(wide(1e200, 1e200), wide(1e200, 2e200), 1e-6).ratio > 1  # whose squares are infinite
    assert (by_size(wide(0, 0), wide(0, 0), 0.0).ratio, by_size(wide(), wide(), 0.0).ratio) == (0, 0)


@pytest.mark.parametrize("one", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("other", [0.0, math.inf, -math.inf, math.nan])
def test_a_bound_that_is_not_finite_allows_nothing_and_hides_nothing(one: float, other: float) -> None:
    is_same = one == other or (math.isnan(one) and math.isnan(other))
    found = by_element(wide(one, 1), wide(other, 1), wide(abs(one), 0.5))
    assert (found.ratio, found.is_far) == ((0, False) if is_same else (math.inf, True))
    hidden = by_element(wide(one, 1), wide(one, 2), wide(abs(one), 0.5))
    assert (hidden.at, hidden.ratio, hidden.is_far) == (1, 2, True)
    assert by_element(wide(1, 1), wide(1, 1 + 1e-9), wide(abs(one), abs(one))).is_far
    assert by_size(wide(1), wide(1.5), 1.0, least_size=abs(one)).is_far == math.isinf(one)
    assert by_element(wide(one, 1), wide(other, 1), wide(9, 9)).ratio == (0 if is_same else math.inf)
    assert by_size(wide(one, 1), wide(other, 1), 1.0).ratio == (0 if is_same else math.inf)


def test_samples_are_spread_and_depend_on_the_number_of_elements_alone() -> None:
    assert torch.equal(places(SAMPLED_ELEMENTS), torch.arange(SAMPLED_ELEMENTS))
    kept = places(1 << 20)
    assert torch.equal(kept, places(1 << 20))
    assert SAMPLED_ELEMENTS * 0.98 < len(kept) <= SAMPLED_ELEMENTS
    columns = torch.bincount(kept % 1024, minlength=1024)
    assert (columns > 0).float().mean() > 0.9  # not one column of a matrix
