"""How much each microbatch counts, agreed between all data ranks before any of them computes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.comm import Channel
from shardwise.comm.agreement import agree
from shardwise.engine.batches import Batch, LossWeight, count_rows
from shardwise.errors import BatchError, MismatchError, ShardwiseError


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighting:
    """The weights of all microbatches of all data ranks."""

    by_rank: tuple[tuple[float, ...], ...]

    @property
    def total(self) -> float:
        """Sum over all microbatches of all ranks."""
        return math.fsum(weight for weights in self.by_rank for weight in weights)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of all ranks together."""
        return sum(len(weights) for weights in self.by_rank)

    @property
    def uniform(self) -> bool:
        """Whether all microbatches count the same: then losses need no factor, and the mean is a plain one."""
        return len({weight for weights in self.by_rank for weight in weights}) == 1

    def factors(self, rank: int) -> list[float]:
        """What each loss of `rank` is multiplied by, so that the plain mean over all is the weighted mean."""
        if self.uniform:
            return [1.0] * len(self.by_rank[rank])
        mean = self.total / self.num_microbatches
        return [weight / mean for weight in self.by_rank[rank]]


def weigh(microbatches: Sequence[Batch], loss_weight: LossWeight | None) -> list[float]:
    """The weight of each microbatch: its rows, or what the user's function counts. Raises BatchError."""
    weights = []
    for microbatch in microbatches:
        weight = count_rows(microbatch) if loss_weight is None else loss_weight(microbatch)
        try:
            value = float(weight)
        except (TypeError, ValueError, RuntimeError):
            raise BatchError(f"loss_weight gave {weight!r} for a microbatch; a weight is one number") from None
        if not (math.isfinite(value) and value >= 0):
            raise BatchError(f"loss_weight gave {value} for a microbatch; a weight is a finite number of at least 0")
        weights.append(value)
    return weights


def agree_on_weights(
    channel: Channel, weights: Sequence[float], refusal: ShardwiseError | None, *, purpose: str, same_count: bool
) -> Weighting:
    """Exchange the weights of all data ranks; raise the same error on all when they cannot be used."""
    packed = agree(channel, refusal, purpose=purpose, value=json.dumps(list(weights)).encode())
    weighting = Weighting(by_rank=tuple(tuple(json.loads(each)) for each in packed))
    counts = [len(each) for each in weighting.by_rank]
    if same_count and len(set(counts)) > 1:
        raise MismatchError(
            f"every rank merges the same number of microbatches, but the ranks have {counts}; give step() the same "
            f"microbatches on all"
        )
    if not weighting.total > 0:
        raise BatchError(
            "no microbatch on any rank has a weight above 0: there is nothing to average; check loss_weight, and that "
            "batches have rows"
        )
    return weighting
