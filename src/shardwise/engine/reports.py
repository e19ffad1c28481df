"""What steps and evaluations report, and what an engine counts."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One update, in numbers that are the same on every rank."""

    loss: float
    """Weighted mean of the losses of all microbatches on all data ranks, before the update."""
    grad_norm: float
    """2-norm of the averaged gradient before the clip, every element counted once; nan when it is not finite."""
    skipped: bool
    """True when the gradient was not finite: parameters and optimizer state are as before."""
    weight: float
    """What the losses were weighted by, summed: rows, or what `loss_weight` counts."""
    num_microbatches: int
    """Microbatches per rank."""
    stop: bool = False
    """Whether `stop` of `step` was true on some rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """One evaluated batch, in numbers that are the same on every rank."""

    loss: float
    """Weighted mean of the losses of all rows on all data ranks."""
    weight: float
    """What the losses were weighted by, summed."""


@dataclass(kw_only=True, slots=True)
class Counters:
    """Counts since `parallelize` returned."""

    updates: int = 0
    """Optimizer steps taken."""
    skipped: int = 0
    """Updates left out because the gradient was not finite."""
    cast_elements: int = 0
    """Elements cast from a master to its working copy."""
    reduce_scatters: int = 0
    all_gathers: int = 0
    exchanges: int = 0
    """Small agreements between all data ranks."""
    early_reductions: int = 0
    """Reduce-scatters that were started while backward was still running."""
