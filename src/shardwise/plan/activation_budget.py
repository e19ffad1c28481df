"""The cheapest modules to run again, or to keep on the host, so that saved tensors stay within a budget.

What one rank holds of a microbatch, module by module in the order of its forward (K kept, R run again, H on the host):

    bytes held     before  K: saved   before  R: inputs   before  H: small ones   after the last
    while it runs                     + what it makes again      + its own, and those of the H before it
    prefix         ------------------------------------------------------------------------------->

Forward fills the prefix and backward empties it, so that one walk gives the peak of both: the largest prefix with what
is there while a module runs. Every other microbatch in flight holds its whole prefix meanwhile.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwise.errors import PlanError

Choice = Literal["keep", "recompute", "offload"]

_MOST_LABELS = 600
"""Partial choices that are looked at together; of more, one stands for those that are nearly alike."""
_GRAIN = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCall:
    """One forward of a module in a microbatch, in bytes of storages that autograd saves tensors of."""

    module: str
    before_bytes: int
    """Saved between the module before and this one, or by several modules and here first: held whatever is chosen."""
    saved_bytes: int
    """Saved by this module alone."""
    inputs_bytes: int
    """Of its inputs alone, and of outputs that `Activations.save` keeps: held where it runs again."""
    again_bytes: int
    """That it makes anew when it runs again."""
    fixed_bytes: int = 0
    """Of `saved_bytes`, what is too small for the host."""
    seconds: float
    """Of its forward."""
    choices: tuple[Choice, ...]
    """What may be done."""

    def held_bytes(self, choice: Choice) -> int:
        """From its forward to its backward."""
        if choice == "keep":
            return self.saved_bytes
        return self.inputs_bytes if choice == "recompute" else self.fixed_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The forward of one microbatch on one stage of a pipeline."""

    calls: tuple[MeasuredCall, ...]
    after_bytes: int
    """Saved after the last of them."""
    in_flight: int
    """Most microbatches whose activations the rank holds at a time."""
    bytes_per_second: float | None = None
    """To the host; None: nothing was copied."""

    def peak_of(self, label: "_Label") -> int:
        """The most that the rank holds at a time, by what the choices for all calls come to."""
        held = label.prefix_bytes + self.after_bytes
        return (self.in_flight - 1) * held + max(label.peak_bytes, held + label.leaving_bytes)

    def price(self, call: MeasuredCall, choice: Choice) -> float:
        """The seconds that a choice adds to forward and backward of a call."""
        if choice == "recompute":
            return call.seconds
        if choice == "offload":
            # A copy out is hidden behind a forward like this one, the copy back behind a backward of twice its time.
            copy = (call.saved_bytes - call.fixed_bytes) / (self.bytes_per_second or _SLOW)
            # Not nothing: what costs no time still costs a link.
            return max(copy * 1e-3, copy - call.seconds) + max(copy * 1e-3, copy - 2 * call.seconds)
        return 0.0


_SLOW = 1e9
"""Bytes per second of a link that was not measured."""


class _Label(NamedTuple):
    """What the calls up to one hold, under the choices for them."""

    prefix_bytes: int = 0
    peak_bytes: int = 0
    leaving_bytes: int = 0
    """Of the last module on the host, which are on the device until the next one has run."""

    def after(self, call: MeasuredCall, choice: Choice) -> "_Label":
        """With the next call."""
        prefix, running, leaving = (
            self.prefix_bytes + call.before_bytes + call.held_bytes(choice),
            0,
            self.leaving_bytes,
        )
        if choice == "recompute":
            running = call.again_bytes
        elif choice == "offload":
            running = leaving = call.saved_bytes - call.fixed_bytes
        return _Label(prefix, max(self.peak_bytes, prefix + running + self.leaving_bytes), leaving)


_START = _Label()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What is done with each module of a stage."""

    choices: tuple[tuple[str, Choice], ...]
    peak_bytes: int
    seconds: float
    """Added to each microbatch, as was measured."""


def choose(measured: Measured, budget_bytes: int, *, stage: int = 0) -> Chosen:
    """The cheapest choices whose peak is within the budget. Raises PlanError with the least budget that can be met."""
    found = _best(measured, budget_bytes)
    if found is None:
        least = _best(measured, None)
        assert least is not None
        raise PlanError(
            f"activations.budget_bytes: {budget_bytes} asked; on stage {stage} of the pipeline the tensors saved for "
            f"backward take {least.peak_bytes} bytes at least, with {measured.in_flight} microbatches in flight. Give "
            f"{least.peak_bytes} or more, or smaller microbatches"
        )
    return found


# Each partial choice with what it costs, and the choices so far as a chain.
_Chain = tuple[str, Choice, "_Chain"] | None
_Partial = tuple[float, _Chain]


def _best(measured: Measured, budget_bytes: int | None) -> Chosen | None:
    """Of least cost within a budget; None: of the least peak."""
    # What the calls to come hold at least decides early which partial choices end above the budget.
    least_after = [0] * (len(measured.calls) + 1)
    for at, call in reversed(list(enumerate(measured.calls))):
        least_after[at] = least_after[at + 1] + call.before_bytes + min(map(call.held_bytes, call.choices))
    num_calls = Counter(call.module for call in measured.calls)
    labels: dict[_Label, _Partial] = {_START: (0.0, None)}
    for at, call in enumerate(measured.calls):
        following: dict[_Label, _Partial] = {}
        prices = {choice: measured.price(call, choice) for choice in call.choices}
        for label, (cost, chain) in labels.items():
            known = _choice_in(chain, call.module) if num_calls[call.module] > 1 else None
            for choice in call.choices if known is None else (known,):
                new = label.after(call, choice)
                rest = new.prefix_bytes + least_after[at + 1] + measured.after_bytes
                if budget_bytes is not None and (
                    (measured.in_flight - 1) * rest + max(new.peak_bytes, rest) > budget_bytes
                ):
                    continue
                added = cost + prices[choice]
                if new not in following or added < following[new][0]:
                    following[new] = added, chain if known is not None else (call.module, choice, chain)
        labels = _fewer(following, by_peak=budget_bytes is None)
    ends = [
        (measured.peak_of(label), cost, chain)
        for label, (cost, chain) in labels.items()
        if budget_bytes is None or measured.peak_of(label) <= budget_bytes
    ]
    if not ends:
        return None
    peak, cost, chain = min(ends, key=lambda end: end[:2] if budget_bytes is None else (end[1], end[0]))
    return Chosen(choices=tuple(reversed(list(_choices_of(chain)))), peak_bytes=peak, seconds=cost)


def _fewer(labels: dict[_Label, _Partial], *, by_peak: bool) -> dict[_Label, _Partial]:
    """All of them, or the best of each group that is nearly alike."""
    if len(labels) <= _MOST_LABELS:
        return labels
    grain = max(1, max(label.peak_bytes for label in labels) // _GRAIN)
    best: dict[tuple[int, int, int], _Label] = {}
    for label, (cost, _) in labels.items():
        key = (label.prefix_bytes // grain, label.peak_bytes // grain, label.leaving_bytes // grain)
        other = best.get(key)
        if other is None or (
            (label.peak_bytes, label.prefix_bytes) < (other.peak_bytes, other.prefix_bytes)
            if by_peak
            else cost < labels[other][0]
        ):
            best[key] = label
    return {label: labels[label] for label in best.values()}


def _choice_in(chain: _Chain, module: str) -> Choice | None:
    return next((choice for name, choice in _choices_of(chain) if name == module), None)


def _choices_of(chain: _Chain) -> Iterable[tuple[str, Choice]]:
    while chain is not None:
        name, choice, chain = chain
        yield name, choice
