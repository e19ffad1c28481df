"""Samples that are held out, and those that are trained on, are all samples once."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import DataError
from shardwise.train.held_out_split import HeldOutSamples, TrainingSamples
from tests.properties import tried


@given(size=st.integers(1, 200), fraction=st.floats(0.01, 0.9))
@tried(60)
def test_each_sample_is_held_out_or_trained_on_and_never_both(size: int, fraction: float) -> None:
    try:
        held_out_samples, training = HeldOutSamples([*range(size)], fraction), TrainingSamples([*range(size)], fraction)
    except DataError:
        assert not 0 < int(size * fraction) < size
        return
    held_out, trained = ([side[at] for at in range(len(side))] for side in (held_out_samples, training))
    assert len(held_out) == int(size * fraction)
    assert sorted([*held_out, *trained]) == [*range(size)]
    assert trained == sorted(trained)
    assert training.__getitems__([0]) == trained[:1]
