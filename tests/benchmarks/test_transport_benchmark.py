"""How the measurement of transports counts: ratios in the same round, the best side on gloo, and the verdict."""

from benchmarks.transport import OURS, Cell, summary, verdict


def cell(megabits: int, ours: list[float], gloo: list[float], between: list[float]) -> Cell:
    elapsed = {OURS: ours, "gloo": gloo, "gloo between": between}
    return Cell(megabits=megabits, operation="message", num_bytes=4096, elapsed=elapsed, processor=elapsed)


def test_ratios_are_of_the_same_round_and_the_quickest_side_counts() -> None:
    # A busy machine slows both sides of its round alike: the medians alone would say 10 to 10.
    measured = cell(1000, [10.0, 100.0, 1.0], [20.0, 200.0, 10.0], [11.0, 120.0, 1.2])
    assert (measured.ratio("gloo"), measured.ratio("gloo between")) == (2.0, 1.2)
    assert measured.best == "gloo between"


def test_the_verdict_counts_links_with_a_limit_alone() -> None:
    quick, slow = ([1.25], [1.0], [2.0]), ([1.5], [1.0], [0.75])
    cells = [cell(1000, *quick), cell(10000, *slow), cell(0, *quick)]
    assert verdict(cells).endswith("takes at most 1.25 times as long as the best side on gloo in 1 of 2 cells.")
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in summary(cells).splitlines()[2:]]
    assert lines == [
        ["1 Gbit/s", "message", "1 of 1", "1.25", "1.25", "1.25"],
        ["10 Gbit/s", "message", "0 of 1", "2.00", "2.00", "2.00"],
        ["no limit", "message", "1 of 1", "1.25", "1.25", "1.25"],
    ]
