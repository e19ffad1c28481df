"""How a batch is cut into microbatches."""

from itertools import pairwise


def split_rows(num_rows: int, num_microbatches: int) -> list[range]:
    """Cut rows into microbatches whose sizes differ by one at most, larger ones first.

    >>> split_rows(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    small, num_larger = divmod(num_rows, num_microbatches)
    starts = [index * small + min(index, num_larger) for index in range(num_microbatches + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
