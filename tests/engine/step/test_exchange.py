"""What a step makes of what all ranks say, read as arrays, against a loop over the ranks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.engine.forward.passes import Joint
from shardwise.engine.step.exchange import Weighting, sum_of_losses
from shardwise.errors import MismatchError
from tests.properties import tried

weights = st.sampled_from([0.0, 1.0, 0.1, 3.0, 1e-300, 4e15])


even_weights = st.integers(1, 4).flatmap(
    lambda count: st.lists(st.lists(weights, min_size=count, max_size=count), min_size=1, max_size=40)
)


uneven_weights = st.lists(st.lists(weights, max_size=4), min_size=1, max_size=40)


@tried(40)
@given(even_weights | uneven_weights)
def test_weights_of_all_ranks_are_those_of_a_loop_over_them(by_rank: list[list[float]]) -> None:
    weighting = Weighting.of(by_rank)
    of_all = [each for own in by_rank for each in own]
    assert weighting.total == math.fsum(of_all)
    assert weighting.num_microbatches == len(of_all)
    assert weighting.is_same_count == (len({*map(len, by_rank)}) == 1)
    computed = [{at for at, weight in enumerate(own) if weight} for own in by_rank]
    counts = [sum(at in each for each in computed) for at in range(max(map(len, by_rank)))]
    joint = [Joint.ALL if count == len(by_rank) else Joint.SOME if count else Joint.NONE for count in counts]
    assert weighting.joint == joint
    if weighting.total > 0:
        weighting.check()
    for rank, own in enumerate(by_rank):
        assert weighting.of_rank(rank) == own
        if weighting.total > 0:
            alike = len(set(of_all)) == 1
            mean = math.fsum(of_all) / len(of_all)
            assert weighting.factors(rank) == [1.0 if alike else weight / mean for weight in own]
            losses = [0.3 + at + rank for at in range(len(own))]
            share = math.fsum(w * loss for w, loss in zip(own, losses, strict=True) if w) / weighting.total
            padded = np.array([losses + [math.inf] * (weighting.table.shape[1] - len(losses))])
            assert weighting.shares_of_mean(padded, [rank]) == [share]


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("odd", [1, 4])
@pytest.mark.parametrize("values", [(0.1, 0.2, 0.3), (math.nan, 1.0, 2.0), (math.inf, 1.0, 2.0)])
def test_losses_of_ranks_along_tp_count_once_and_are_compared(
    is_exact: bool, odd: int, values: tuple[float, ...]
) -> None:
    alike = np.arange(6).reshape(3, 2)
    shares = [value for value in values for _ in range(2)]
    found = sum_of_losses(shares, alike, is_exact=is_exact)
    assert found == math.fsum(values) if all(map(math.isfinite, values)) else math.isnan(found)
    differs = f"rank {odd // 2 * 2} and rank {odd // 2 * 2 + 1} are peers"
    with pytest.raises(MismatchError, match=differs) as told:
        sum_of_losses([7.5 if at == odd else each for at, each in enumerate(shares)], alike, is_exact=is_exact)
    assert "7.5" in str(told.value)
    if math.isfinite(sum(values)):
        nearly = [each * (1 + 1e-4) if at == odd else each for at, each in enumerate(shares)]
        if is_exact:
            with pytest.raises(MismatchError, match=differs):
                sum_of_losses(nearly, alike, is_exact=True)
        else:
            sum_of_losses(nearly, alike, is_exact=False)
