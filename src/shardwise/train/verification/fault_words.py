"""What a wrong mean gradient looks like: microbatches or uses that count too often, or not at all."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from shardwise.space import Piece
from shardwise.train.verification.closeness import factor_between
from shardwise.train.verification.layout_notes import LayoutNotes
from shardwise.train.verification.one_process import OwnStep
from shardwise.train.verification.run_recording import GradientKey, places, wide

_UNLIKE_ONE = 0.004
"""Weights in a fit that are that far from 1 are told."""

_LEFT_OVER = 0.04
"""The part of a gradient that a fit may leave unexplained: rounding in bfloat16 is some 0.01 of it."""

_MAX_FITTED = 64
"""Microbatches that are fitted at most."""


class FaultWords:
    """The words for one update."""

    def __init__(self, own: OwnStep, layout: LayoutNotes, *, factor: float) -> None:
        """factor: what the sum over microbatches is multiplied by, to be the mean, and clipped."""
        self._own = own
        self._layout = layout
        self._factor = factor

    def explain(self, name: str, theirs: torch.Tensor, at: int, pieces: Sequence[Piece]) -> tuple[str, int | None]:
        """What a gradient that is too far off looks like, and the first microbatch that counts wrongly.

        pieces: as the layout holds it. Every owner has a sum of its own: only the piece with element `at` is fitted.
        """
        flat = wide(theirs).reshape(-1).cpu()
        if not bool((flat.abs() > 0).any()):
            return "The layout's is zero everywhere", None
        kept = places(flat.numel())
        inside = _in_piece_of(at, kept, tuple(theirs.shape), pieces)
        target = flat[kept[inside]]
        expected = (self._own.terms[name].total.reshape(-1).cpu() * self._factor)[kept[inside]]
        if words := _as_factor(expected, target):
            return words, None
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
        """What ranks along pp give to the gradient of a parameter that they share."""
        stages: dict[int, torch.Tensor] = {}
        for number in self._layout.counted:
            contribution = self._layout.gradients.get(GradientKey(number, name))
            for stage, part in contribution.parts if contribution is not None else ():
                stages[stage] = stages.get(stage, torch.zeros_like(part[inside])) + part[inside] * self._factor
        return dict(sorted(stages.items()))


def _fitted(columns: Sequence[torch.Tensor], target: torch.Tensor) -> list[float]:
    """With which weights the columns add up to `target`; nothing where no weights do."""
    if not columns or len(columns) > _MAX_FITTED or 2 * len(columns) > len(target):
        return []
    matrix = torch.stack([column.to(target.dtype) for column in columns], dim=1)
    if not bool(torch.isfinite(matrix.abs()).all() & torch.isfinite(target.abs()).all()):
        return []
    weights = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    left_over = float((matrix @ weights - target).abs().square().sum().sqrt())
    if left_over > _LEFT_OVER * float(target.abs().square().sum().sqrt()):
        return []
    return [float(each.real) for each in weights]


def _in_piece_of(at: int, kept: torch.Tensor, shape: tuple[int, ...], pieces: Sequence[Piece]) -> torch.Tensor:
    """Which of the kept elements lie in the piece that has the element `at`."""
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
