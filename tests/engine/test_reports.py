"""Reports and counters whose numbers come when somebody looks."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from threading import Event, Thread

import pytest

from shardwise.engine.reports import Counters, StepReport, report_on_look

FULL = StepReport(loss=1.5, grad_norm=2.0, skipped=False, weight=4.0, num_microbatches=2)


class Looks:
    """Gives the values of `FULL`, and counts how often."""

    def __init__(self) -> None:
        self.count = 0
        self.report = report_on_look(self._values, num_microbatches=2, stop=False)

    def _values(self) -> dict[str, object]:
        self.count += 1
        return {"loss": 1.5, "grad_norm": 2.0, "skipped": False, "weight": 4.0, "losses": {}}


def test_the_first_look_at_a_number_is_the_only_one() -> None:
    looks = Looks()
    assert (looks.report.num_microbatches, looks.report.stop, looks.count) == (2, False, 0)
    assert (looks.report.loss, looks.report.skipped, looks.report.weight) == (1.5, False, 4.0)
    assert looks.count == 1


def test_a_look_ends_while_another_thread_looks() -> None:
    values = {"loss": 1.5, "grad_norm": 2.0, "skipped": False, "weight": 4.0, "losses": {}}
    seen: list[float] = []

    def look() -> dict[str, object]:
        if not seen:
            seen.append(0.0)
            other = Thread(target=lambda: seen.append(report.loss))
            other.start()
            other.join()
        return values

    report = report_on_look(look, num_microbatches=2, stop=False)
    assert report == FULL
    assert seen == [0.0, 1.5]


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
    assert use(Looks().report) == use(FULL)


def test_what_a_report_does_not_have() -> None:
    looks = Looks()
    with pytest.raises(AttributeError, match="'StepReport' object has no attribute 'perplexity'"):
        looks.report.perplexity  # type: ignore[attr-defined]  # noqa: B018
    assert looks.count == 0


def test_a_look_that_raises_raises_again() -> None:
    def raising() -> dict[str, float]:
        raise ValueError("differ")

    report = report_on_look(raising, num_microbatches=1, stop=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="differ"):
            report.loss  # noqa: B018


class Verdict:
    """Of a step that the device has not finished."""

    def __init__(self, is_finite: bool) -> None:
        self._is_finite = is_finite
        self.is_known = False

    @property
    def is_finite(self) -> bool:
        self.is_known = True
        return self._is_finite


def test_steps_are_counted_when_they_are_known_or_looked_at() -> None:
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
    assert pickle.loads(pickle.dumps(counters)) == Counters(updates=3, skipped=2, all_gathers=1)


class LateVerdict(Verdict):
    """Of a step whose end a test decides."""

    def __init__(self, is_finite: bool) -> None:
        super().__init__(is_finite)
        self.is_asked, self.has_ended = Event(), Event()

    @property
    def is_finite(self) -> bool:
        self.is_asked.set()
        assert self.has_ended.wait(10)
        return super().is_finite


def test_steps_are_counted_while_another_thread_looks() -> None:
    counters = Counters(updates=5)
    late = LateVerdict(True)
    counters.count(late)
    seen: list[tuple[int, int]] = []
    other = Thread(target=lambda: seen.append((counters.updates, counters.skipped)))
    other.start()
    assert late.is_asked.wait(10)
    known = Verdict(False)
    known.is_known = True
    counters.count(known)  # while the other thread waits for the step before it
    late.has_ended.set()
    other.join()
    assert (counters.updates, counters.skipped) == (6, 1)
    assert seen == [(6, 1)]


def test_a_look_while_steps_are_counted_never_loses_one() -> None:
    counters = Counters()
    seen: list[int] = []
    has_ended = Event()

    def look() -> None:
        while not has_ended.is_set():
            seen.append(counters.updates)

    others = [Thread(target=look) for _ in range(2)]
    for each in others:
        each.start()
    for number in range(2000):
        verdict = Verdict(True)
        verdict.is_known = number % 3 == 0
        counters.count(verdict)
    has_ended.set()
    for each in others:
        each.join()
    assert (counters.updates, counters.skipped) == (2000, 0)
    assert max(seen) <= 2000


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_of_counters_counts_apart(use: Callable[[Counters], Counters]) -> None:
    counters = Counters(exchanges=3)
    counters.count(Verdict(True))
    other = use(counters)
    counters.count(Verdict(False))
    assert other == Counters(updates=1, exchanges=3)
    assert counters == Counters(updates=1, skipped=1, exchanges=3)
