"""What steps and evaluations report, and what an engine counts.

On a device the host learns the figures of a step when they have come, or when somebody looks:

    report = engine.step(batch)     loss  --  grad_norm  --  skipped  --     empty: the device still computes them
    report.loss                     loss 1.5  grad_norm 2.0  skipped False   the first look waits, and fills all
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardwise.engine.forward.counters import FilledOnLook
from shardwise.plan.timeline import slow_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """What one rank did from the close of one step to that of the next, in seconds and bytes.

    Where a device computes, the seconds are those of its stream, of an earlier step (`late_steps`).
    """

    rank: int
    compute_s: float
    """In `engine.step`, waits left out. On a device also the time in which it had nothing to do."""
    waiting_s: float
    """In `engine.step`, until other ranks gave what this one needed."""
    waited_for: Mapping[int, float]
    """Of it, by the rank that came last, the longest first and four at most. Waits of a device in a collective of three
    and more ranks are for none of them."""
    outside_s: float
    """Between two steps: data, evaluations, saves, and what else the loop does."""
    sent_bytes: int
    """Of exchanges and tensors, as any implementation has to send them at least. Memory that ranks of one host read in
    place is not sent."""
    received_bytes: int
    peak_bytes: int
    """Most memory so far: of the device's allocator, on the CPU of the whole process. Looked up once per second."""
    late_steps: int
    """How many steps ago this was; 0 on the CPU."""

    @property
    def busy_s(self) -> float:
        """All time in which the rank did not wait for others."""
        return self.compute_s + self.outside_s


def slowest(ranks: Sequence[RankTimes]) -> tuple[int, ...]:
    """The slow ones among them, by what they were busy; see `slow_ranks`."""
    return slow_ranks({each.rank: each.busy_s for each in ranks})


class _ValuesOnLook(FilledOnLook):
    __slots__ = ("_times", "_values")
    _values: Callable[[], Mapping[str, Any]]
    _times: Callable[[], tuple[RankTimes, ...]]

    def _on_look(self, name: str) -> Any:
        try:
            values = self._values
        except AttributeError:  # another thread, which logs, has looked meanwhile
            return object.__getattribute__(self, name)
        for found, value in values().items():
            object.__setattr__(self, found, value)
        with suppress(AttributeError):
            object.__delattr__(self, "_values")  # and what it holds on the device
        return object.__getattribute__(self, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport(_ValuesOnLook):
    """One update, in numbers that are the same on every rank.

    On a device the first look at one of the numbers waits until the device has computed them. A look at what was not
    asked for waits for nothing: `norms` without `step(norms=...)`, and a `loss_scale` that the plan gives.
    """

    loss: float
    """Weighted mean of the losses of all microbatches on all data ranks, before the update."""
    grad_norm: float
    """2-norm of the averaged gradient before the clip, every element counted once; nan when it is not finite."""
    skipped: bool
    """True when the gradient was not finite: parameters and optimizer state are as before."""
    weight: float
    """What the losses were weighted by, summed: rows, or what `loss_weight` counts."""
    num_microbatches: int
    """Microbatches of this rank: in a list that was given to it, or in equal parts the same on all ranks."""
    stop: bool = False
    """Whether `stop` of `step` was true on some rank."""
    loss_scale: float | None = None
    """What the losses were multiplied by for their backward; None where the plan scales none."""
    losses: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weighted means of what the loss function gives in a dict, and the loss as "loss"."""
    norms: Mapping[str, float] | None = field(default=None, hash=False)
    """2-norms of the parts that `step(norms=...)` asked for, each as `grad_norm`; None where it asked for none."""

    @property
    def ranks(self) -> tuple[RankTimes, ...]:
        """What every rank did with its time, from the close of the step before to that of this one.

        A step closes where ranks agree on its norm, before the update: that counts in the next one. Empty on a device
        until its first step is over, and in a copy of a report. No look waits for a device.
        """
        return self._times() if hasattr(self, "_times") else ()

    @property
    def slowest(self) -> tuple[int, ...]:
        """The ranks for which the others waited, the slowest first: at most three, and none where all were alike.

        They were busy more than 1.1 times as long as the middle one.
        """
        return slowest(self.ranks)


def report_on_look(
    values: Callable[[], Mapping[str, Any]], *, times: Callable[[], tuple[RankTimes, ...]] = tuple, **known: object
) -> StepReport:
    """A report with `known` fields, whose others are what `values` gives at the first look.

    times: those of all ranks.
    """
    report = object.__new__(StepReport)
    # Past the constructor, which would want all fields, and past the refusal of a frozen class.
    for name, value in {**known, "_values": values, "_times": times}.items():
        object.__setattr__(report, name, value)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """One evaluated batch, in numbers that are the same on every rank."""

    loss: float
    """Weighted mean of the losses of all rows on all data ranks."""
    weight: float
    """What the losses were weighted by, summed."""
    losses: Mapping[str, float] = field(default_factory=dict, hash=False)
    """As in `StepReport`."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of all rows on all data ranks, by the names that `evaluate` was given: numbers, else tensors on the CPU."""
