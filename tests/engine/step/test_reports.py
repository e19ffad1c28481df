"""Reports and counters whose numbers come when somebody looks."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from shardwise.engine.forward.counters import Counters
from shardwise.engine.step.reports import StepReport, report_on_look

FULL = StepReport(loss=1.5, grad_norm=2.0, skipped=False, weight=4.0, num_microbatches=2)
VALUES: dict[str, Any] = {
    "loss": 1.5,
    "grad_norm": 2.0,
    "skipped": False,
    "weight": 4.0,
    "losses": {},
    "loss_scale": None,
    "norms": None,
}


def waiting(values: Callable[[], dict[str, Any]] = lambda: VALUES) -> StepReport:
    return report_on_look(values, num_microbatches=2, stop=False)


def test_the_first_look_at_a_number_is_the_only_one_and_one_that_raises_raises_again() -> None:
    looks: list[int] = []

    def look() -> dict[str, Any]:
        looks.append(1)
        return VALUES

    report = waiting(look)
    assert (report.num_microbatches, report.stop, looks) == (2, False, [])
    with pytest.raises(AttributeError, match="'StepReport' object has no attribute 'perplexity'"):
        report.perplexity  # type: ignore[attr-defined]  # noqa: B018
    assert not looks
    assert (report.loss, report.skipped, report.weight) == (1.5, False, 4.0)
    assert looks == [1]

    def raising() -> dict[str, Any]:
        raise ValueError("differ")

    report = waiting(raising)
    for _ in range(2):
        with pytest.raises(ValueError, match="differ"):
            report.loss  # noqa: B018


@pytest.mark.parametrize(
    "use",
    [
        repr,
        hash,
        asdict,
        copy.copy,
        copy.deepcopy,
        lambda report: pickle.loads(pickle.dumps(report)),
        lambda report: replace(report, stop=True),
        lambda report: StepReport(**asdict(report)),
        lambda report: report == FULL,
    ],
    ids=["repr", "hash", "asdict", "copy", "deepcopy", "pickle", "replace", "rebuilt", "equal"],
)
def test_a_report_that_waits_is_used_like_any_other(use: Callable[[StepReport], object]) -> None:
    assert use(waiting()) == use(FULL)


class Verdict:
    """Of a step that the device has not finished."""

    def __init__(self, is_finite: bool) -> None:
        self._is_finite = is_finite
        self.is_known = False

    @property
    def is_finite(self) -> bool:
        self.is_known = True
        return self._is_finite


def test_steps_are_counted_when_they_are_known_or_looked_at_and_a_copy_counts_apart() -> None:
    counters = Counters()
    first, second, third = Verdict(True), Verdict(False), Verdict(True)
    for verdict in (first, second):
        counters.count(verdict)
    counters.all_gathers += 1
    first.is_known = True
    counters.count(third)
    assert not second.is_known, "counting waits for no step"
    assert (counters.updates, counters.skipped, counters.all_gathers) == (2, 1, 1)
    counters.count(Verdict(True))
    assert asdict(counters) == asdict(Counters(updates=3, skipped=1, all_gathers=1))
    counters.count(Verdict(False))
    for other in (copy.copy(counters), copy.deepcopy(counters), pickle.loads(pickle.dumps(counters))):
        other.count(Verdict(False))
        assert other == Counters(updates=3, skipped=3, all_gathers=1)
    assert counters == Counters(updates=3, skipped=2, all_gathers=1)
