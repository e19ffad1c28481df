"""What the engine did, in numbers that tests read."""

from dataclasses import dataclass


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
