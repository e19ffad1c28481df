"""One update under the layout against one process, in the order of the program of the latter.

For each microbatch: what modules give, the loss, the gradients that come back; then the loss of all, the mean gradients
(last parameters first), their norm, and what the update makes of parameters, buffers and optimizer state.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shardwise.checkpoint import Catalogue
from shardwise.train.verification.closeness import EQUAL, Closeness, by_element, by_size
from shardwise.train.verification.error_model import UNIT_ROUNDOFF, UPDATE_ROUNDINGS, ErrorModel, Path
from shardwise.train.verification.layout_notes import LayoutNotes
from shardwise.train.verification.mean_gradients import MeanGradients
from shardwise.train.verification.one_process import OwnStep
from shardwise.train.verification.recording import (
    LOSS,
    GradientKey,
    Noted,
    OutputKey,
    is_number,
    places,
    wide,
)
from shardwise.train.verification.report import Divergence, StepComparison, Tally

OUTPUTS, PER_MICROBATCH, LOSSES = "outputs of modules", "gradients per microbatch", "losses"
MEANS, NORMS, UPDATED, REPLICAS = "mean gradients", "gradient norms", "updated tensors", "replicas"


@dataclass(slots=True)
class _Count:
    compared: int = 0
    equal: int = 0
    worst: float = 0.0


class StepCheck:
    """The comparison of one update; `run` gives what diverges first."""

    def __init__(self, *, step: int, layout: LayoutNotes, own: OwnStep, model: ErrorModel, clip: float | None,
                 means: MeanGradients, gradients: Catalogue, state: Catalogue) -> None:
        self._step = step
        self._layout = layout
        self._own = own
        self._model = model
        self._means = means
        self._gradients = gradients
        self._state = state
        self._counts: dict[str, _Count] = {}
        self._rounded: set[str] = set()
        """Parameters of whose gradients per microbatch some were not equal, or not compared."""

    def run(self) -> Divergence | None:
        """The first divergence; None where all is equal or rounding."""
        return next(self._divergences(), None)

    def summary(self) -> StepComparison:
        """What was compared, after `run`."""
        tallies = [
            Tally(kind=kind, num_compared=each.compared, num_equal=each.equal, worst=each.worst)
            for kind, each in self._counts.items()
        ]
        return StepComparison(
            step=self._step,
            loss=self._layout.report.loss,
            one_process_loss=self._own.report.loss,
            grad_norm=self._layout.report.grad_norm,
            one_process_grad_norm=self._means.norm,
            tallies=tuple(tallies),
        )

    def _divergences(self) -> Iterator[Divergence]:
        numbers = self._layout.counted
        for own_number, number in enumerate(numbers):
            yield from self._of_outputs(own_number, number)
            yield from self._of_contributions(own_number, number)
        yield from self._of_loss()
        yield from self._of_means()
        yield from self._of_norm()
        yield from self._of_update()
        yield from self._of_replicas()

    # Forward and backward of one microbatch ---------------------------------------------------------------------------

    def _of_outputs(self, own_number: int, number: int) -> Iterator[Divergence]:
        for key, ours in self._own.notes.outputs.items():
            if key.microbatch != own_number:
                continue
            for rank, theirs in self._layout.outputs.get(key._replace(microbatch=number), ()):
                if ours.shape != theirs.shape:  # a part of it, where parameters are cut over tp
                    continue
                closeness = self._forward_closeness(ours, theirs)
                if closeness is not None and self._is_far(OUTPUTS, closeness):
                    yield self._divergence("output", key.place or "output", key.module, closeness, ours, microbatch=number, rank=rank)

    def _forward_closeness(self, ours: Noted, theirs: Noted) -> Closeness | None:
        if ours.digest == theirs.digest and ours.dtype == theirs.dtype:
            return EQUAL
        if self._model.same_forward or (self._model.same_up_to_order and not is_number(ours.dtype)):
            return by_element(ours.sample, theirs.sample, torch.zeros(len(ours.sample), dtype=torch.float64)) if not torch.equal(ours.sample, theirs.sample) else Closeness(ratio=math.inf, at=0, allowed=0.0, ours=math.nan, theirs=math.nan)
        if not is_number(ours.dtype):  # choices that rounding may turn
            return None
        return by_size(ours.sample, theirs.sample, ours.path.deviation(roundoff_of(ours.dtype)))
