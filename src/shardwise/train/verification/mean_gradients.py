"""What the mean gradients of an update have to be, and how far off they may be."""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from shardwise.train.verification.closeness import Closeness, by_element, by_size
from shardwise.train.verification.error_model import UNIT_ROUNDOFF, ErrorModel
from shardwise.train.verification.fault_words import FaultWords
from shardwise.train.verification.layout_notes import LayoutNotes
from shardwise.train.verification.one_process import OwnStep
from shardwise.train.verification.program import Program
from shardwise.train.verification.run_recording import GradientKey, places, wide
from shardwise.train.verification.shared_factor import SharedFactor


class MeanGradients:
    """The mean gradients of one process, in float64, with bounds for those of a layout."""

    def __init__(
        self, program: Program, model: ErrorModel, own: OwnStep, layout: LayoutNotes, rounded: Collection[str]
    ) -> None:
        """rounded: parameters of which not all gradients per microbatch are known to be equal in both."""
        self._model = model
        self._own = own
        self._layout = layout
        self._rounded = rounded
        self._num_terms = len(layout.counted)
        # Without averaging, microbatches are summed on each data rank, and these sums averaged over data ranks.
        divisor = program.num_microbatches if program.plan.merge.average else program.num_data_ranks
        self._scale = 1.0 / divisor
        squares, allowed = 0.0, 0.0
        for name, terms in own.terms.items():
            squares += float((terms.total.abs() * self._scale).square().sum())
            allowed += self._allowed_norm(name) ** 2
        self.norm = math.sqrt(squares) if math.isfinite(squares) else math.nan
        self.allowed_of_norm = math.sqrt(allowed) + 4 * UNIT_ROUNDOFF["float32"] * self.norm
        """By how much the norm may be off: at most by the norm of what all elements may be off."""
        self._common = SharedFactor()
        limit, theirs = program.plan.clip_grad_norm, layout.report.grad_norm
        # Clipped by the layout's norm, which is compared on its own: a wrong one must not make all gradients wrong.
        self._clip = 1.0 if limit is None else min(1.0, limit / (theirs + 1e-6))
        self._slack = 0.0 if self._clip == 1.0 else 4 * UNIT_ROUNDOFF["float32"]
        self.words = FaultWords(own, layout, factor=self._factor)

    def names(self) -> Iterator[str]:
        """Parameters with a gradient, those first whose gradients came first in the last backward."""
        last = [key.parameter for key in self._own.notes.gradients if key.microbatch == self._num_terms - 1]
        yield from dict.fromkeys([*last, *reversed(list(self._own.terms))])

    def closeness(self, name: str, theirs: torch.Tensor) -> Closeness:
        """Of what the layout's optimizer was given."""
        flat = wide(theirs).reshape(-1).cpu()
        terms = self._own.terms[name]
        expected = terms.total.reshape(-1).cpu() * self._factor
        if name not in self._rounded:
            sizes = terms.sizes.reshape(-1).cpu() * self._factor
            allowed = self._model.of_sum(self._num_terms) * sizes + self._slack * expected.abs()
            return by_element(expected, flat, allowed)
        added = self._as_added_up(name, flat)
        if added is not None and added.is_far:
            return added
        least = math.sqrt(terms.square) * self._factor
        found = by_size(expected, flat, self._rounding() + self._slack, least_size=least)
        self._common.note(name, expected, flat, least, theirs.shape)
        return found if added is None or added.ratio <= found.ratio else added

    def common_factor(self) -> tuple[str, Closeness] | None:
        """See `SharedFactor.found`; of what `closeness` was asked for."""
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
        told = {key.microbatch for key in self._own.notes.gradients if key.parameter == name}
        if len(known) != len(told):
            return None
        added = torch.stack([part.noted.sample for part in known]).sum(0) * self._factor
        sizes = torch.stack([part.sizes for part in known]).sum(0) * self._factor
        relative = self._model.of_sum(sum(len(part.parts) for part in known))
        kept = theirs[places(theirs.numel())]
        found = by_element(added, kept, relative * sizes + self._slack * added.abs())
        return replace(found, at=int(places(theirs.numel())[found.at]))
