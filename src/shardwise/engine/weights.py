"""How much each microbatch counts, agreed between all data ranks before any of them computes."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import digest_of_values
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.batches import Batch, LossWeight, count_rows
from shardwise.engine.zero.uneven_microbatches import Joint
from shardwise.errors import BatchError, MismatchError


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

    @property
    def joint(self) -> list[Joint]:
        """For each number of a microbatch which data ranks compute it: one with weight 0 is not computed."""
        most = max(map(len, self.by_rank))
        counts = [sum(at < len(weights) and weights[at] > 0 for weights in self.by_rank) for at in range(most)]
        return [Joint.ALL if count == len(self.by_rank) else Joint.SOME if count else Joint.NONE for count in counts]

    @property
    def is_even(self) -> bool:
        """Whether all data ranks compute microbatches of the same numbers."""
        return len({tuple(at for at, weight in enumerate(weights) if weight) for weights in self.by_rank}) == 1

    def factors(self, rank: int) -> list[float]:
        """What each loss of `rank` is multiplied by, so that the plain mean over all is the weighted mean."""
        if self.uniform:
            return [1.0] * len(self.by_rank[rank])
        mean = self.total / self.num_microbatches
        return [weight / mean for weight in self.by_rank[rank]]

    def share_of_mean(self, losses: Sequence[torch.Tensor], rank: int) -> float:
        """The part of the weighted mean over all microbatches that the losses of `rank` make."""
        values = torch.stack([loss.double() for loss in losses]).tolist() if losses else []
        weights = self.by_rank[rank]
        return math.fsum(w * value for w, value in zip(weights, values, strict=True) if w) / self.total


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


def describe_batch(batch: Batch) -> list[str]:
    """One line per entry, with a digest of its values: what must be equal on all ranks that share a batch."""
    return [
        f"{name!r} {list(value.shape)} {dtype_name(value.dtype)} with digest {digest_of_values(value)}"
        if isinstance(value, torch.Tensor)
        else f"{name!r} {json.dumps(value, default=lambda each: type(each).__name__)}"
        for name, value in batch.items()
    ]


def pack_weights(weights: Sequence[float], *, batch_lines: Sequence[str] = (), written: Collection[str] = ()) -> bytes:
    """What each rank tells the others before a step.

    batch_lines: a description of the batch, which all ranks of a pipeline have to have alike. written: the parameters
    that were written to on this rank.
    """
    return json.dumps([list(weights), list(batch_lines), sorted(written)]).encode()


def merge_weights(
    packed: Sequence[bytes], *, same_count: bool, data_ranks: Sequence[int]
) -> tuple[Weighting, list[str]]:
    """The weights of all data ranks, and the parameters that were written to on any rank.

    packed: of every rank. data_ranks: of which data rank each is; ranks of one data rank are stages of one pipeline.
    Raises the same error on all ranks when the weights cannot be used.
    """
    given = [json.loads(each) for each in packed]
    firsts = {data_rank: rank for rank, data_rank in reversed(list(enumerate(data_ranks)))}
    _refuse_different_batches([lines for _, lines, _ in given], [firsts[each] for each in data_ranks])
    weighting = Weighting(by_rank=tuple(tuple(given[firsts[data_rank]][0]) for data_rank in sorted(firsts)))
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
    return weighting, sorted({name for _, _, names in given for name in names})


def check_writes(channel: Channel, digests: Mapping[str, str], replicas: Sequence[Sequence[int]]) -> None:
    """Raise MismatchError, the same on all ranks, where ranks that hold the same parameters hold other values.

    digests: of what was written to on any rank, as this rank has it. replicas: groups of data ranks.
    """
    found = [json.loads(each) for each in channel.exchange(json.dumps(digests).encode(), purpose="written parameters")]
    for ranks in replicas:
        for rank in ranks[1:]:
            for name, digest in found[ranks[0]].items():
                if found[rank].get(name) != digest:
                    raise MismatchError(
                        f"parameter {name!r} was written to after parallelize, and rank {ranks[0]} and rank {rank} "
                        "have other values of it now, where data ranks hold the same. Write alike on all ranks "
                        "(load_state_dict), or use sw.load(path, engine). An optimizer over model.parameters() steps "
                        "each rank by its own gradient: give it to parallelize, and call engine.step(batch)"
                    )


def _refuse_different_batches(lines_of: Sequence[Sequence[str]], first_of: Sequence[int]) -> None:
    """`first_of`: for each rank the first one that has to have the same lines."""
    different = [rank for rank, first in enumerate(first_of) if lines_of[rank] != lines_of[first]]
    if not different:
        return
    rank, first = different[0], first_of[different[0]]
    pairs = zip_longest(lines_of[first], lines_of[rank], fillvalue="nothing")
    one, other = next((one, other) for one, other in pairs if one != other)
    listed = f"rank {rank}" if len(different) == 1 else "ranks " + ", ".join(map(str, different))
    raise MismatchError(
        f"ranks along pp and tp are given the same batch, but {listed} got another one than the first of them: rank "
        f"{first} has {one}, rank {rank} has {other}. Choose the batch by the data rank (its coordinates along "
        "dp_replicate and dp_shard), not by the rank in the world"
    )
