"""Until all have moved: `tests.oracle`."""

from torch import Tensor, nn

from tests.oracle.batches import Batch, parts_of
from tests.oracle.one_process import State, Trained, expected, state_of
from tests.oracle.program import Program, adamw

Case = Program
Trajectory = Trained
microbatches_of = parts_of


def loss_of(case: Program, model: nn.Module, part: Batch) -> Tensor:
    """The loss of one microbatch."""
    return case.loss_of(model, part)


__all__ = [
    "Case",
    "State",
    "Trajectory",
    "adamw",
    "expected",
    "loss_of",
    "microbatches_of",
    "state_of",
]
