"""The losses of steps that wait to be logged, and those of single microbatches where a step is not finite.

data rank 0     losses 1.0  nan          one process logs 1.0, the mean so far in the place of nan, 2.0, 3.0
data rank 1     losses 2.0  3.0          here so too: microbatches of data ranks follow one another in each round
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from shardwise.comm.agreement import json_as, understood
from shardwise.engine import StepReport
from shardwise.trainers.data_ranks import DataRanks


@dataclass(frozen=True, slots=True)
class StepToLog:
    """An update whose loss waits for a look."""

    report: StepReport
    step: int
    """Updates before it."""
    num_microbatches: int
    """Of all data ranks."""
    of_microbatches: Sequence[torch.Tensor]
    """Their losses on this rank; zero where another stage has them."""

    def losses(self, ranks: DataRanks) -> list[float]:
        """What adds up to the loss: one number, or those of all microbatches where it is not finite.

        Then all ranks call this together; a loss is the same on all of them.
        """
        loss = self.report.loss
        if math.isfinite(loss) or self.num_microbatches == 1:
            return [loss]
        own = [each.item() for each in self.of_microbatches]
        purpose = "losses of microbatches"
        told = ranks.world.exchange(json.dumps(own).encode(), purpose=purpose)
        by_rank: dict[int, list[float]] = {}
        for rank, losses in enumerate(understood(told, json_as(list[float]), purpose=purpose)):
            known = by_rank.setdefault(ranks.data_rank_of(rank), [0.0] * len(losses))
            known[:] = [one or other for one, other in zip(known, losses, strict=True)]
        rounds = zip_longest(*(by_rank[rank] for rank in sorted(by_rank)))
        return [each / self.num_microbatches for one in rounds for each in one if each is not None]
