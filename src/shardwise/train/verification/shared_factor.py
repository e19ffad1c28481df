"""A factor that the gradients of all parameters have in common: where each may round by more, all together do not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.train.verification.closeness import Closeness


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factor:
    """How the gradient of one parameter lies along that of one process."""

    name: str
    square: float
    """Of the norm in one process."""
    product: float
    """The inner product of both."""
    excess: float
    """How much larger than the gradient its terms are, which may have cancelled."""
    num_independent: int

    @property
    def factor(self) -> float:
        """By what one process's is to be multiplied."""
        return self.product / self.square


class SharedFactor:
    """What is known of parameters so far: how their gradients lie along those of one process."""

    def __init__(self) -> None:
        self._factors: list[_Factor] = []

    def note(self, name: str, expected: torch.Tensor, theirs: torch.Tensor, least: float, shape: Sequence[int]) -> None:
        """The gradient of one parameter, of this shape. All are flat; least: see `by_size`."""
        square = float(expected.abs().square().sum())
        size = math.sqrt(square / max(1, expected.numel()))
        if square and math.isfinite(square):
            self._factors.append(
                _Factor(
                    name=name,
                    square=square,
                    product=float((expected.conj() * theirs).real.sum()),
                    excess=max(1.0, least / size),
                    num_independent=max(shape, default=1),
                )
            )

    def found(self, *, rounding: float, slack: float) -> tuple[str, Closeness] | None:
        """A factor that gradients have in common, where it is no rounding, and the first parameter that has it.

        Rounding errors of many elements point everywhere: along the gradient itself there is next to nothing of them,
        d / sqrt(n) of it where n independent errors have the size d. Of a tensor, the elements along its longest dim
        are taken for independent.
        """
        total = sum(each.square for each in self._factors)
        if not total:
            return None
        factor = sum(each.product for each in self._factors) / total
        variance = sum((each.square / total * each.excess) ** 2 / each.num_independent for each in self._factors)
        allowed = (rounding + slack) * math.sqrt(variance) + slack
        first = next(each for each in self._factors if each.square and abs(each.factor - 1) >= abs(factor - 1) / 2)
        found = Closeness(ratio=abs(factor - 1) / allowed, at=0, allowed=allowed, ours=1.0, theirs=factor)
        return first.name, found
