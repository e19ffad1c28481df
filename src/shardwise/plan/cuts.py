"""Cuts of a row of loads into runs, one per stage, so that the largest load of a run is as small as it can be."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf


def least_largest_load(loads: Sequence[float], num_runs: int) -> float:
    """The largest load of a run in the best cut of `loads` (none negative) into `num_runs` runs, none empty.

    Dynamic programming over (runs, end): O(len(loads) * num_runs), as the best cut before the last run moves only
    forward with the end.
    """
    sums = list(accumulate(loads, initial=0))
    best = [inf, *sums[1:]]  # best[end]: of one run
    for num in range(2, num_runs + 1):
        before, best = best, [inf] * len(sums)
        cut = num - 1
        for end in range(num, len(sums)):
            # The part before the cut grows with it and the run behind it shrinks: the best is where they meet.
            while cut + 1 < end and before[cut] < sums[end] - sums[cut]:
                cut += 1
            best[end] = min(max(before[at], sums[end] - sums[at]) for at in (cut - 1, cut) if at >= num - 1)
    return best[-1]


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
        for end in range(num, len(sums)):
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
