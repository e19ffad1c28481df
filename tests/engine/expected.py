"""Until all have moved: `tests.oracle.batches` and `tests.oracle.program`."""

from tests.oracle.batches import points, square_loss
from tests.oracle.program import adamw, seeded, sgd

__all__ = ["adamw", "points", "seeded", "sgd", "square_loss"]
