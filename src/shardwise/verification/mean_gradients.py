"""The mean gradients of an update: their right values, how far off they may be, and words for wrong ones.

known equal per microbatch     each element within (2n + 4) u of the mean of its terms' sizes
else, twice                    against the layout's own microbatches: only adding rounds; each element
                               against one process: root mean square within the bound of the path
all parameters together        a factor that they share (`SharedFactor`), for which the bounds above are too wide

too far off?   FaultWords:     "It is 2 times that of one process"
                               "It is as if microbatches 0 to 2 counted once, 3 counted not at all"
                               "It is as if its uses, along pp, on rank 0 counted once, on rank 1 counted 2 times"
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from shardwise.plan import Plan
from shardwise.space import Piece
from shardwise.verification.error_model import (
    UNIT_ROUNDOFF,
    Closeness,
    ErrorModel,
    by_element,
    by_size,
    factor_between,
)
from shardwise.verification.layout_run import LayoutNotes
from shardwise.verification.one_process import OwnStep
from shardwise.verification.run_recording import GradientKey, places, wide


class MeanGradients:
    """The mean gradients of one process, in float64, with bounds for those of a layout."""

    def __init__(
        self, plan: Plan, model: ErrorModel, own: OwnStep, layout: LayoutNotes, rounded: Collection[str]
    ) -> None:
        """rounded: parameters whose gradients per microbatch are not all known to be equal in both."""
        self._model = model
        self._own = own
        self._layout = layout
        self._rounded = rounded
        self._num_terms = len(layout.counted)
        # Without averaging, microbatches are summed on each data rank, and these sums averaged over data ranks.
        divisor = len(layout.inputs) if plan.merge.average else plan.mesh.num_data_ranks
        # Hooks have seen gradients of scaled losses.
        self._scale = 1.0 / (divisor * (own.report.loss_scale or 1.0))
        squares, allowed = 0.0, 0.0
        for name, terms in own.terms.items():
            squares += float((terms.total.abs() * self._scale).square().sum())
            allowed += self._allowed_norm(name) ** 2
        self.norm = math.sqrt(squares) if math.isfinite(squares) else math.nan
        self.allowed_of_norm = math.sqrt(allowed) + 4 * UNIT_ROUNDOFF["float32"] * self.norm
        """By how much the norm may be off: the norm of the bounds of all elements."""
        self._common = SharedFactor()
        limit, theirs = plan.clip_grad_norm, layout.report.grad_norm
        assert not isinstance(limit, Mapping), "a program has no clip of parts"
        # Clipped by the layout's norm, which is compared on its own: a wrong one must not make all gradients wrong.
        self._clip = 1.0 if limit is None else min(1.0, limit / (theirs + 1e-6))
        # The factor is computed in float32 by the engine: a few roundings of the norm, the division and the product.
        self._slack = 0.0 if self._clip == 1.0 else 4 * UNIT_ROUNDOFF["float32"]
        self.words = FaultWords(own, layout, factor=self._factor)

    def names(self) -> Iterator[str]:
        """Parameters with a gradient, those first whose gradients came first in the last backward."""
        # In the order of backward: what comes first depends on the fewest operations, so a fault is named where it
        # begins.
        last = [key.parameter for key in self._own.notes.gradients if key.microbatch == self._num_terms - 1]
        yield from dict.fromkeys([*last, *reversed(list(self._own.terms))])

    def closeness(self, name: str, theirs: torch.Tensor) -> Closeness:
        """Of the gradient that the layout's optimizer was given."""
        flat = wide(theirs).reshape(-1).cpu()
        terms = self._own.terms[name]
        expected = terms.total.reshape(-1).cpu() * self._factor
        if name not in self._rounded:
            sizes = terms.sizes.reshape(-1).cpu() * self._factor
            allowed = self._model.of_sum(self._num_terms) * sizes + self._slack * expected.abs()
            return by_element(expected, flat, allowed)
        # The bound on a path is wide. That on adding alone is narrow, and finds a microbatch that counts twice.
        added = self._as_added_up(name, flat)
        if added is not None and added.is_far:
            return added
        # What the gradient would be had its terms not cancelled: that is what rounds. Without it a gradient near
        # zero would have a bound near zero.
        least = math.sqrt(terms.square) * self._factor
        found = by_size(expected, flat, self._rounding() + self._slack, least_size=least)
        self._common.note(name, expected, flat, least, theirs.shape)
        return found if added is None or added.ratio <= found.ratio else added

    def common_factor(self) -> tuple[str, Closeness] | None:
        """See `SharedFactor.found`; over the gradients that `closeness` was asked for."""
        return self._common.found(rounding=self._rounding(), slack=self._slack)

    @property
    def _factor(self) -> float:
        return self._scale * self._clip

    def _allowed_norm(self, name: str) -> float:
        terms = self._own.terms[name]
        norm_of_sizes = float(terms.sizes.square().sum().sqrt()) * self._scale
        if name not in self._rounded:
            return self._model.of_sum(self._num_terms) * norm_of_sizes
        size = max(float(terms.total.abs().square().mean().sqrt()), math.sqrt(terms.square)) * self._scale
        return self._rounding() * size * math.sqrt(terms.total.numel())

    def _rounding(self) -> float:
        return self._own.path.there_and_back().deviation + self._model.of_sum(self._num_terms)

    def _as_added_up(self, name: str, theirs: torch.Tensor) -> Closeness | None:
        """Against the layout's own gradients of each microbatch, as far as these are known: only adding rounds."""
        parts = [self._layout.gradients.get(GradientKey(number, name)) for number in self._layout.counted]
        known = [part for part in parts if part is not None]
        expected = {key.microbatch for key in self._own.notes.gradients if key.parameter == name}
        if len(known) != len(expected):
            return None
        added = torch.stack([part.noted.sample for part in known]).sum(0) * self._factor
        sizes = torch.stack([part.sizes for part in known]).sum(0) * self._factor
        relative = self._model.of_sum(sum(len(part.parts) for part in known))
        # Microbatches of the layout are known by their samples only, so the sum is compared at these places.
        kept = theirs[places(theirs.numel())]
        found = by_element(added, kept, relative * sizes + self._slack * added.abs())
        return replace(found, at=int(places(theirs.numel())[found.at]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factor:
    """The gradient of one parameter, projected on that of one process."""

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
        """The number by which one process's gradient is multiplied."""
        return self.product / self.square


class SharedFactor:
    """The parameters so far: their gradients, projected on those of one process."""

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

        Rounding errors of many elements point everywhere. Along the gradient they nearly vanish: d / sqrt(n) of it for
        n independent errors of size d. Of a tensor, the elements along its longest dim are taken for independent.
        """
        total = sum(each.square for each in self._factors)
        if not total:
            return None
        # The least-squares factor over all parameters as one long vector.
        factor = sum(each.product for each in self._factors) / total
        variance = sum((each.square / total * each.excess) ** 2 / each.num_independent for each in self._factors)
        allowed = (rounding + slack) * math.sqrt(variance) + slack
        first = next(each for each in self._factors if each.square and abs(each.factor - 1) >= abs(factor - 1) / 2)
        found = Closeness(ratio=abs(factor - 1) / allowed, at=0, allowed=allowed, ours=1.0, theirs=factor)
        return first.name, found


_UNLIKE_ONE = 0.004
"""Weights in a fit that are that far from 1 are reported."""

_LEFT_OVER = 0.04
"""The part of a gradient that a fit may leave unexplained: rounding in bfloat16 is some 0.01 of it."""

_MAX_FITTED = 64
"""Microbatches that are fitted at most."""


class FaultWords:
    """The words for one update."""

    def __init__(self, own: OwnStep, layout: LayoutNotes, *, factor: float) -> None:
        """factor: turns the sum over microbatches into the mean, clipped."""
        self._own = own
        self._layout = layout
        self._factor = factor

    def explain(self, name: str, theirs: torch.Tensor, at: int, pieces: Sequence[Piece]) -> tuple[str, int | None]:
        """Words for a gradient that is too far off, and the first microbatch that counts wrongly.

        pieces: as the layout holds it. Every owner has its own sum: only the piece with element `at` is fitted.
        """
        flat = wide(theirs).reshape(-1).cpu()
        if not bool((flat.abs() > 0).any()):
            return "The layout's is zero everywhere", None
        kept = places(flat.numel())
        inside = _in_piece_of(at, kept, tuple(theirs.shape), pieces)
        target = flat[kept[inside]]
        expected = (self._own.terms[name].total.reshape(-1).cpu() * self._factor)[kept[inside]]
        # The simplest explanation first: a fit with many weights explains a mere factor too.
        if words := _as_factor(expected, target):
            return words, None
        # As a sum of the microbatches' own gradients: weights that are not one name the microbatches that count
        # wrongly.
        weights = _fitted(self._of_microbatches(name, inside), target)
        wrong = [at for at, weight in enumerate(weights) if abs(weight - 1) > _UNLIKE_ONE]
        if wrong:
            listed = [f"{self._range(numbers)} counted {_times(weight)}" for weight, numbers in _runs(weights)]
            return f"It is as if microbatches {', '.join(listed)}", self._layout.counted[wrong[0]]
        stages = self._of_stages(name, inside)
        weights = _fitted(list(stages.values()), target) if len(stages) > 1 else []
        if any(abs(weight - 1) > _UNLIKE_ONE for weight in weights):
            listed = [f"rank {rank} counted {_times(weight)}" for rank, weight in zip(stages, weights, strict=True)]
            return f"It is as if its uses, along pp, on {', on '.join(listed)}", None
        return "", None

    def _range(self, numbers: Sequence[int]) -> str:
        first, last = self._layout.counted[numbers[0]], self._layout.counted[numbers[-1]]
        return str(first) if first == last else f"{first} to {last}"

    def _of_microbatches(self, name: str, inside: torch.Tensor) -> list[torch.Tensor]:
        found = [
            self._own.notes.gradients.get(GradientKey(number, name)) for number in range(len(self._layout.counted))
        ]
        zeros = torch.zeros(len(inside), dtype=torch.float64)
        return [zeros if noted is None else noted.sample[inside] * self._factor for noted in found]

    def _of_stages(self, name: str, inside: torch.Tensor) -> dict[int, torch.Tensor]:
        """The parts of ranks along pp in the gradient of a parameter that they share."""
        stages: dict[int, torch.Tensor] = {}
        for number in self._layout.counted:
            contribution = self._layout.gradients.get(GradientKey(number, name))
            for stage, part in contribution.parts if contribution is not None else ():
                stages[stage] = stages.get(stage, torch.zeros_like(part[inside])) + part[inside] * self._factor
        return dict(sorted(stages.items()))


def _fitted(columns: Sequence[torch.Tensor], target: torch.Tensor) -> list[float]:
    """With which weights the columns add up to `target`; nothing where no weights do."""
    # With fewer elements than that, some weights always fit.
    if not columns or len(columns) > _MAX_FITTED or 2 * len(columns) > len(target):
        return []
    matrix = torch.stack([column.to(target.dtype) for column in columns], dim=1)
    if not bool(torch.isfinite(matrix.abs()).all() & torch.isfinite(target.abs()).all()):
        return []
    # gelsd takes columns that depend on each other (equal microbatches), with the smallest weights.
    weights = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    left_over = float((matrix @ weights - target).abs().square().sum().sqrt())
    if left_over > _LEFT_OVER * float(target.abs().square().sum().sqrt()):
        return []
    return [float(each.real) for each in weights]


def _in_piece_of(at: int, kept: torch.Tensor, shape: tuple[int, ...], pieces: Sequence[Piece]) -> torch.Tensor:
    """Which of the kept elements are in the piece that has the element `at`."""
    everywhere = torch.arange(len(kept))
    for piece in pieces:
        for_at, for_kept = _inside(torch.tensor([at]), shape, piece), _inside(kept, shape, piece)
        if bool(for_at.any()):
            return everywhere[for_kept]
    return everywhere


def _inside(elements: torch.Tensor, shape: tuple[int, ...], piece: Piece) -> torch.Tensor:
    found = torch.zeros(len(elements), dtype=torch.bool)
    indices = torch.unravel_index(elements, shape) if shape else ()
    for box in piece.boxes():
        in_box = torch.ones(len(elements), dtype=torch.bool)
        for index, start, size in zip(indices, box.offset, box.shape, strict=True):
            in_box &= (index >= start) & (index < start + size)
        found |= in_box
    return found


def _as_factor(expected: torch.Tensor, theirs: torch.Tensor) -> str:
    factor = factor_between(expected, theirs)
    if factor is None or not math.isfinite(factor):
        return ""
    left_over = float((theirs - factor * expected).abs().square().sum().sqrt())
    if left_over > _LEFT_OVER * float(theirs.abs().square().sum().sqrt()) or abs(factor - 1) < _UNLIKE_ONE:
        return ""
    return f"It is {factor:.3g} times that of one process"


def _runs(weights: Sequence[float]) -> Iterator[tuple[float, list[int]]]:
    for weight, group in groupby(enumerate(weights), key=lambda each: round(each[1], 2)):
        yield weight + 0.0, [at for at, _ in group]


def _times(weight: float) -> str:
    rounded = round(weight, 3) + 0.0
    return {0.0: "not at all", 1.0: "once"}.get(rounded, f"{rounded:g} times")
