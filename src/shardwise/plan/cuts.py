"""Cuts of a row of loads into runs, one per stage, so that the largest load of a run is as small as it can be."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf


def least_largest_load(loads: Sequence[float], num_runs: int) -> float:
    """The largest load of a run in the best cut of `loads` (none negative) into `num_runs` runs, none empty.

    Found by halving between a bound below and a load that some cut reaches: runs filled in order up to a limit are the
    fewest. There must be as many loads as runs, so that fewer runs can be cut further.
    """
    sums = list(accumulate(loads, initial=0))
    low, high = max(end - start for start, end in pairwise(sums)), sums[-1]
    while low < high:
        limit = (low + high) // 2 if isinstance(high, int) else (low + high) / 2
        num, reached, beyond = _filled(sums, limit)
        if num <= num_runs and reached < high:
            high = reached
        elif num > num_runs and beyond > low:
            low = beyond
        else:  # neighbours among the floats
            break
    return high


def _filled(sums: Sequence[float], limit: float) -> tuple[int, float, float]:
    """Runs filled in order up to `limit`: how many, the largest, and the least limit that would change one of them."""
    num, reached, beyond, start = 0, sums[0], inf, 0
    while start + 1 < len(sums):
        end = max(start + 1, bisect_right(sums, sums[start] + limit) - 1)
        reached = max(reached, sums[end] - sums[start])
        if end + 1 < len(sums):
            beyond = min(beyond, sums[end + 1] - sums[start])
        num, start = num + 1, end
    return num, reached, beyond


def cut_evenly(loads: Sequence[float], num_runs: int) -> list[int]:
    """Where each run ends, in the best cut of `loads` (none negative) into `num_runs` runs, none empty.

    Of the cuts with the least largest load: the least sum of squares, so that the other runs are even too, and of those
    the one whose first and last run are lightest (the first holds most activations, the last computes the loss).
    """
    limit = least_largest_load(loads, num_runs)
    sums = list(accumulate(loads, initial=0))
    best: list[tuple[float, float]] = [(0, 0)] + [(inf, inf)] * len(loads)
    cuts: list[list[int]] = []
    for num in range(1, num_runs + 1):
        before, best = best, [(inf, inf)] * len(sums)
        cuts.append([0] * len(sums))
        for end in _ends_within(sums, limit, num, num_runs - num):
            for start in range(end - 1, num - 2, -1):
                if (load := sums[end] - sums[start]) > limit:
                    break
                squares, outer = before[start]
                cost = (squares + load * load, outer + (load if num in (1, num_runs) else 0))
                if cost < best[end]:
                    best[end], cuts[-1][end] = cost, start
    ends = [len(loads)]
    for starts in reversed(cuts[1:]):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def _ends_within(sums: Sequence[float], limit: float, num_before: int, num_behind: int) -> range:
    """Where the runs before an end, and those behind it, can stay within `limit`, as far as their sum tells."""
    reach = limit * (1 + 1e-9)  # a little further, for sums that are not exact
    first = bisect_left(sums, sums[-1] - num_behind * reach)
    last = bisect_right(sums, num_before * reach)
    return range(max(first, num_before), min(last, len(sums) - num_behind))
