"""Sample order: a pure function of (seed, sample), the same under every layout."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.train.corpus import SampleOrder
from tests.properties import tried


@tried(60)
@given(
    seed=st.integers(0, 2**63 - 1), num_windows=st.integers(1, 70), window=st.integers(2, 9), extra=st.integers(0, 8)
)
def test_every_epoch_visits_each_window_once_and_no_token_twice(
    seed: int, num_windows: int, window: int, extra: int
) -> None:
    num_tokens = num_windows * window + min(extra, window - 1)
    order = SampleOrder(seed=seed, num_tokens=num_tokens, window=window)
    assert order.num_windows == num_windows
    for epoch in range(3):
        starts = order.starts(np.arange(epoch * num_windows, (epoch + 1) * num_windows))
        read = [(int(start) + offset) % num_tokens for start in starts for offset in range(window)]
        assert len(read) == len(set(read)) == num_windows * window


def test_a_sample_does_not_depend_on_what_is_asked_with_it() -> None:
    order = SampleOrder(seed=7, num_tokens=1000, window=8)
    together = order.starts(np.arange(400))
    one_by_one = [int(order.starts(np.array([sample]))[0]) for sample in range(400)]
    assert together.tolist() == one_by_one


def test_seeds_and_epochs_give_different_orders_that_look_random() -> None:
    num_windows, window = 500, 4
    orders = {
        (seed, epoch): tuple(
            SampleOrder(seed=seed, num_tokens=num_windows * window, window=window)
            .starts(np.arange(epoch * num_windows, (epoch + 1) * num_windows))
            .tolist()
        )
        for seed in (0, 1, 2)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == len(orders)
    for order in orders.values():
        steps = np.diff(np.array(order)) % (num_windows * window)
        # Neighbours stay neighbours about once in a permutation of any length.
        assert (steps == window).sum() <= 8
        correlation = np.corrcoef(np.arange(num_windows), np.array(order))[0, 1]
        assert abs(correlation) < 0.2


def test_the_order_of_a_seed_is_the_same_in_every_version() -> None:
    order = SampleOrder(seed=3, num_tokens=170, window=10)
    assert order.starts(np.arange(6)).tolist() == [17, 127, 47, 37, 97, 107]
    assert order.starts(np.array([10**9])).tolist() == [27]
