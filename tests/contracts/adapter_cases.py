"""The contract of adapters of other trainers: what each of their loops does under a plan, as in one process without.

A `Column` is one adapter: its loop as users write it, plain or under a plan. The claims are the functions below, which
hold for every column; `Column.cases` has the plans and settings that its loop has.

claim                  hf                        lightning                  accelerate
trains                 losses, norms, rates      losses, rates, weights     norms, rates, weights
goes on                any to any, plain too     any to any, plain too      any to any; plain has another format
trains on devices      all                       all                        all
to the bit             within float32: it sums   on one rank                on one rank
                       losses in another order
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import shardwise as sw
from shardwise.errors import ShardwiseError

PLAIN = "plain"
"""The name of no plan: the other library's own trainer in one process."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One training."""

    setting: str = PLAIN
    folder: Path | None = None
    saves: bool = False
    """Leave a checkpoint in the folder, in the middle."""
    resumes: bool = False
    """Go on from the checkpoint in the folder."""
    device: torch.device | None = None
    """Of a rank; None: the CPU."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training shows."""

    figures: Sequence[Mapping[str, float]]
    """What it logs of each step and evaluation, in order; of a run that goes on, maybe the last ones alone."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Whole; where all ranks do not have them, of the first rank alone."""
    of_own_rows: Mapping[str, float] = field(default_factory=dict)
    """What is logged of the rows of a data rank alone."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """An adapter, and what of it is tried."""

    plans: Mapping[str, sw.Plan]
    train: Callable[[sw.Plan | None, sw.Channel | None, Asked], Outcome]
    """Without a plan: the plain trainer, on the rows of all data ranks."""
    cases: Sequence[tuple[str, str]]
    """Plans and settings under which it trains."""
    moves: Sequence[tuple[str, str]]
    """A run that is saved under the first goes on under the second."""
    on_device: Sequence[tuple[str, str]]
    """Plans and settings under which it trains on devices."""
    exact: str = ""
    """The plan under which it has the bits of the plain trainer."""

    def run(self, plan: str, asked: Asked, *, device: str = "cpu") -> list[Outcome]:
        """What each rank of a plan has; PLAIN: what the plain trainer has."""
        if plan == PLAIN:
            return [self.train(None, None, asked)]

        def on(channel: sw.Channel) -> Outcome:
            where = None if device == "cpu" else channel.device
            return self.train(self.plans[plan], channel, Asked(**{**vars(asked), "device": where}))

        return sw.simulate(self.plans[plan].mesh.size, on, device=device)


def trains_as_the_plain_one(column: Column, plan: str, setting: str, folder: Path, *, device: str = "cpu") -> None:
    """The numbers of all ranks are those of the plain trainer."""
    (expected,) = column.run(PLAIN, Asked(setting=setting, folder=folder / "plain"))
    assert expected.figures or expected.weights
    for number, found in enumerate(column.run(plan, Asked(setting=setting, folder=folder / "ours"), device=device)):
        assert_near(found, expected, rank=number)
        assert found.of_own_rows.keys() == expected.of_own_rows.keys()
        if column.plans[plan].mesh.num_data_ranks == 1:  # a plain figure of other rows is another one
            torch.testing.assert_close(dict(found.of_own_rows), dict(expected.of_own_rows), rtol=2e-5, atol=2e-6)
        if plan == column.exact and device == "cpu":
            assert all(torch.equal(found.weights[name], each) for name, each in expected.weights.items())


def goes_on(column: Column, saved: str, resumed: str, folder: Path, *, device: str = "cpu") -> None:
    """A run that is saved under one plan goes on under another one as if nothing had been."""
    (expected,) = column.run(PLAIN, Asked(folder=folder / "whole"))
    column.run(saved, Asked(folder=folder / "save", saves=True), device=device)
    again = Asked(folder=folder / "save", resumes=True)
    for number, found in enumerate(column.run(resumed, again, device=device)):
        assert len(found.figures) > 0
        tail = expected.figures[-len(found.figures) :]
        assert_near(found, Outcome(figures=tail, weights=expected.weights), rank=number)


def assert_near(found: Outcome, expected: Outcome, *, rank: int = 0) -> None:
    """Equal within the error of float32 sums in another order, over some updates."""
    assert [each.keys() for each in found.figures] == [each.keys() for each in expected.figures]
    for one, other in zip(found.figures, expected.figures, strict=True):
        for name, value in other.items():
            assert abs(one[name] - value) <= 2e-5 * abs(value) + 2e-6, (rank, name, one[name], value)
    if found.weights or rank == 0:
        assert found.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            torch.testing.assert_close(found.weights[name].cpu(), weight, rtol=2e-5, atol=2e-6)


def refused_on_all(plan: sw.Plan, run: Callable[[sw.Channel], object]) -> None:
    """Raise what ranks are refused with: all of them, some maybe as peers of the first."""
    errors: dict[int, ShardwiseError] = {}

    def on(channel: sw.Channel) -> None:
        try:
            run(channel)
        except ShardwiseError as error:
            errors[channel.rank] = error

    sw.simulate(plan.mesh.size, on)
    assert len(errors) == plan.mesh.size, "not refused on all ranks"
    first = min(errors.values(), key=lambda error: len(str(error)))
    assert all(str(first) in str(each) for each in errors.values()), errors
    raise first
