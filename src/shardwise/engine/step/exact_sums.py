"""Sums of what all ranks give, rounded once: they depend neither on the order of the ranks nor on their number."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64]
"""In float64."""

_FEW = 128
"""So many are added one after the other in less time than an array takes."""


def exact_sum(values: Sequence[float] | Numbers) -> float:
    """The sum, correctly rounded, as `math.fsum` has it; nan where it is not finite."""
    try:
        total = math.fsum(values if len(values) <= _FEW else _few_with_the_same_sum(np.asarray(values, np.float64)))
    except (OverflowError, ValueError):  # too large on the way, or infinities of both signs
        return math.nan
    return total if math.isfinite(total) else math.nan


def _few_with_the_same_sum(rest: Numbers) -> Sequence[float]:
    # Rump, Ogita and Oishi, "Accurate floating-point summation part I" (2008): next to a large power of two, all values
    # are rounded to multiples of one unit. The sum of these is exact, whatever the order, and so is what they leave.
    #
    #     values    1.25   0.3    -7.1                        a power of two that is larger than their sum can be
    #     high      1.25   0.25   -7.125   ->  -5.625         multiples of its last bit (here 1/8)
    #     rest      0.0    0.05    0.025   ->  the next round
    found: list[float] = []
    while (most := float(np.abs(rest).max())) != 0.0:
        _, exponent = math.frexp(most)
        unit = exponent + len(rest).bit_length() + 1
        if not math.isfinite(most) or unit > 1023:
            return [*found, *rest.tolist()]
        large = math.ldexp(1.0, unit)
        high = rest + large
        high -= large
        found.append(float(high.sum()))
        rest = rest - high
    return found
