"""Until all have moved: `tests.oracle`."""

from tests.oracle.batches import Batch, count_rows, factors_of, microbatches_of, rows_of, share_of
from tests.oracle.one_process import Trained, train_in_one_process, values_of
from tests.oracle.program import Loss, Optimizers
from tests.oracle.rank_order import Gradients, RankOrder

__all__ = [
    "Batch",
    "Gradients",
    "Loss",
    "Optimizers",
    "RankOrder",
    "Trained",
    "count_rows",
    "factors_of",
    "microbatches_of",
    "rows_of",
    "share_of",
    "train_in_one_process",
    "values_of",
]
