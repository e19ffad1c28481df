"""Which loads are timed: from which layout to which, and by whom."""

from benchmarks.checkpoint.outcome import Cell
from benchmarks.checkpoint.states import Layout

__all__ = ["COLUMNS", "ROWS", "SLICES", "SLICES_AS_COLUMNS", "SLICES_AS_ROWS", "jobs_of"]

ROWS = "load rows as rows"
COLUMNS = "load rows as columns"
SLICES = "load slices as slices"
SLICES_AS_ROWS = "load slices as rows"
SLICES_AS_COLUMNS = "load slices as columns"

_OURS = ("ours", "ours-default", "ours-default-unverified", "ours-unverified", "ours-of-hf-unverified")
_ANYWHERE = (*_OURS, "dcp", "hf", "hf-consolidated")
_RANK_BY_RANK = ("plain", "torch.load", "torch_checkpointing")
_FROM_SLICES = ("ours-slices", "ours-slices-unverified", "dcp-flat-cut")
_SLICES_BY_DEFAULT = ("ours-slices-default", "ours-slices-default-unverified", "dcp")

Loads = dict[str, Layout]
"""Who loads, and the layout of the target."""


def jobs_of(cell: Cell) -> dict[str, Loads]:
    """The loads of a cell, by job."""
    slices: Loads = {"ours-slices": "slices", "ours-slices-unverified": "slices", "dcp-flat": "flat"}
    if cell.work == "load what others saved":
        counts = f"{cell.num_savers} to {cell.num_ranks} ranks"
        return {
            f"load rows, {counts}": dict.fromkeys(_ANYWHERE, "rows"),
            f"load slices, {counts}": slices,
            f"load slices as columns, {counts}": dict.fromkeys(_SLICES_BY_DEFAULT, "columns"),
        }
    jobs: dict[str, Loads] = {
        ROWS: dict.fromkeys((*_ANYWHERE, "ours-whole", *_RANK_BY_RANK), "rows"),
        SLICES: slices,
        COLUMNS: dict.fromkeys(_ANYWHERE, "columns"),
        SLICES_AS_ROWS: dict.fromkeys(_FROM_SLICES, "rows"),
        SLICES_AS_COLUMNS: dict.fromkeys((*_FROM_SLICES, "dcp"), "columns"),
    }
    if cell.num_ranks == 1:  # rows and columns are the same there
        del jobs[COLUMNS], jobs[SLICES_AS_COLUMNS]
    return jobs
