"""The findings of a verification, as values and as text."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter

Verdict = Literal["equal", "rounding", "diverges", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first tensor, in the order of one process's program, that differs by more than rounding."""

    kind: str
    """The kind of tensor: "output", "gradient of a microbatch", "mean gradient", "updated", .."""
    tensor: str
    """Its name: of a parameter, of an entry of the state, or where it is in a module's output."""
    module: str
    """The module that gave it or holds it; "" is the model itself."""
    step: int
    """The update, counted from 0."""
    microbatch: int | None
    """Over all data ranks, counted from 0; None where all have a part in it, or it is unknown."""
    rank: int | None
    """A rank that has the layout's value, where it is one rank's."""
    index: tuple[int, ...] | None
    """The element that is furthest off."""
    one_process: str
    """Its value in one process."""
    layout: str
    """Its value under the layout."""
    allowed: float
    """The difference that rounding explains."""
    explanation: str = ""
    """A description of the difference."""

    def text(self) -> str:
        """One paragraph."""
        where = f"step {self.step}"
        if self.microbatch is not None:
            where += f", microbatch {self.microbatch}"
        if self.rank is not None:
            where += f", rank {self.rank}"
        at = "" if self.index is None or not self.index else f" at {list(self.index)}"
        limit = "the two have to be equal" if self.allowed == 0 else f"rounding explains {self.allowed:.3g}"
        words = (
            f"first diverging tensor: {self.kind} {self.tensor!r} of module {self.module or 'the model'!r}, {where}: "
            f"one process has {self.one_process}{at}, the layout {self.layout}; {limit}"
        )
        return f"{words}. {self.explanation}" if self.explanation else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How the tensors of one kind compare in one update."""

    kind: str
    num_compared: int
    num_equal: int
    """Equal to the bit."""
    worst: float
    """The largest difference, as a fraction of the bound on rounding."""

    def text(self) -> str:
        """For a line."""
        if self.num_compared == self.num_equal:
            return f"{self.num_compared} {self.kind} equal"
        return f"{self.num_compared} {self.kind}: {self.num_equal} equal, others within {self.worst:.2f} of the bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One update."""

    step: int
    loss: float
    """Under the layout."""
    one_process_loss: float
    grad_norm: float
    one_process_grad_norm: float
    tallies: tuple[Tally, ...]

    def text(self) -> str:
        """Two lines."""
        compared = "; ".join(each.text() for each in self.tallies)
        return (
            f"step {self.step}: loss {self.loss:.7g} (one process {self.one_process_loss:.7g}), gradient norm "
            f"{self.grad_norm:.7g} ({self.one_process_grad_norm:.7g})\n  {compared}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """The findings of a verification."""

    verdict: Verdict
    """equal: every tensor to the bit; rounding: within the error model; diverges: see `divergence`.

    inconclusive: no update had a finite loss and a finite gradient, so that nothing was compared.
    """
    title: str
    """The layout and what was compared, in words."""
    model: str
    """The error model, in words."""
    steps: tuple[StepComparison, ...]
    """Up to the first that diverges."""
    divergence: Divergence | None
    """Where the layout first leaves the error model; None where it does not."""
    remarks: tuple[str, ...] = ()
    """Tensors that were not compared, and other facts that a reader needs to judge."""

    def text(self) -> str:
        """All of it, the verdict last."""
        lines = [self.title, "error model:", *(f"  {line}" for line in self.model.splitlines())]
        lines += [each.text() for each in self.steps]
        lines += self.remarks
        if self.divergence is not None:
            lines.append(self.divergence.text())
        return "\n".join([*lines, f"verdict: {self.verdict}"])

    def packed(self) -> bytes:
        """As JSON; `unpacked` gives an equal report."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> "VerificationReport":
        """The report that `packed` was made of."""
        return TypeAdapter(cls).validate_json(packed)
