"""The benchmark of activations compares like with like, and sees peaks."""

import pytest
import torch

from benchmarks.activations import SIDES, Size, measure, peak_bytes, ratio, text

TINY = Size(blocks=4, width=32, rows=4, length=32)


def test_all_sides_end_with_the_same_bits_and_are_listed() -> None:
    outcomes = measure(TINY, 1)
    page = text(outcomes, TINY, 1)
    assert all(f"| {name} " in page for name in SIDES)
    assert f"measured {ratio(outcomes, 'engine, checkpoint'):.3f}" in page
    # Both save the inputs of blocks only; the plain loop takes memory for gradients in each update, too.
    kept = [outcomes[name].peak_bytes for name in ("engine", "engine, checkpoint")]
    assert kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize("num_bytes", [4000, 400_000])
def test_a_peak_is_that_of_what_is_allocated(num_bytes: int) -> None:
    assert peak_bytes(lambda: torch.zeros(num_bytes // 4).sum()) == pytest.approx(num_bytes, abs=100)
