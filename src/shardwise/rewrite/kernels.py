"""Kernels: what the operations of a statement do to tensors of given metas, whatever the tensors are called."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.rewrite.casts import keeps_values
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.statements import Operation
from shardwise.rewrite.steps import Casts, Step, undone

__all__ = ["OPEN", "Degrees", "Inverse", "Kernel", "Refusal", "tensor"]


Degrees: TypeAlias = tuple[int | None, int | None]
"""For how many ranks along `tp` the fused tensor on the left is laid out, and that on the right.

None: no layout tells, so 1. 0: there is a layout, and it does not tell.
"""

OPEN: Degrees = (None, None)


class Refusal(Exception):  # noqa: N818 - it is a verdict that travels upwards, no user sees it
    """Why operations do not fit. In `text`, `tensor(0)` stands for the name of the first left tensor."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def of(self, left: Sequence[str]) -> str:
        """The message for an instance with these left names."""
        return _TENSOR.sub(lambda match: left[int(match[1])], self.text)


_TENSOR = re.compile("\0([0-9]+)\0")


def tensor(place: int) -> str:
    """What stands for the name of a left tensor in the text of a refusal."""
    return f"\0{place}\0"


@dataclass(frozen=True, slots=True)
class Inverse:
    """What undoes operations on tensors of given metas, as operations that say everything."""

    after: tuple[tuple[Operation, ...], ...]
    """For each result what is done with it first."""
    joint: Operation | None
    """What makes the tensors of the results."""
    before: tuple[tuple[Operation, ...], ...]
    """For each tensor what is done with it last."""

    @property
    def alike(self) -> tuple[Operation, ...] | None:
        """All in one go, where that is the same for all results and for all tensors; else None."""
        if len(set(self.after)) > 1 or len(set(self.before)) > 1:
            return None
        joint = () if self.joint is None else (self.joint,)
        return (*self.after[0], *joint, *self.before[0])


class Kernel:
    """What operations do to tensors of given metas."""

    __slots__ = ("_undoing", "inverse", "narrowed", "proved", "results", "steps", "undo")

    def __init__(self, steps: tuple[Step, ...], results: tuple[TensorMeta, ...], inverse: Inverse) -> None:
        self.steps = steps
        self.results = results
        self.inverse = inverse
        self.undo = undone(steps)
        """The steps that lead back."""
        casts = [step for step in steps if isinstance(step, Casts)]
        pairs = dict.fromkeys(pair for step in casts for pair in zip(step.old, step.dtypes, strict=True))
        self.narrowed = tuple([pair for pair in pairs if not keeps_values(*pair)])
        """Casts (from, to) that do not keep all values."""
        self.proved = False
        """Whether it was shown that `undo` leads back."""
        self._undoing: dict[Kernel, bool] = {}

    @property
    def does_nothing(self) -> bool:
        """Whether there is nothing to undo either: what is laid out as it was may be laid out anew on the way back."""
        return not self.steps and self.inverse.joint is None

    def undone_by(self, other: "Kernel") -> bool:
        """Whether another kernel, on what this made, does nothing but lead back; casts that lost something do not."""
        found = self._undoing.get(other)
        if found is None:
            found = self._undoing[other] = not self.narrowed and self.undo == other.steps
        return found
