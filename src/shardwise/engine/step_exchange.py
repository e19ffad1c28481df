"""The two exchanges of a step: weights before anything is computed, losses and norms before anything is updated.

    open    JSON    [weights of this rank's microbatches, lines of the batch, parameters written from outside]
            2 data ranks: [[4, 4], ..] and [[3, 3], ..]  ->  `Weighting` of all, mean weight 3.5

    close   bytes   | loss 8 | squares 8 | bits | (number 8, norm 8) ... |
            bits: trainable parameters with a gradient, buffers changed, parameters written by forwards, stop
            3 trainable, 2 buffers, 4 parameters: 3 + 2 + 4 + 1 = 10 bits in 2 bytes

Each rank gets the messages of all ranks, computes the same from them, and so refuses, skips and stops like the others.
"""

import json
import math
import struct
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
            # No factor instead of a factor of 1.0 made by a division: one process multiplies nothing, and w / mean of
            # equal weights may be rounded off 1.
            return [1.0] * len(self.by_rank[rank])
        mean = self.total / self.num_microbatches
        return [weight / mean for weight in self.by_rank[rank]]

    def share_of_mean(self, losses: Sequence[torch.Tensor], rank: int) -> float:
        """The part of the weighted mean over all microbatches that the losses of `rank` make."""
        # One copy to the host for all losses, at the end of the step.
        values = torch.stack([loss.double() for loss in losses]).tolist() if losses else []
        weights = self.by_rank[rank]
        # What has no weight was not computed, and its stand-in is no value.
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
    # JSON keeps every float: Python writes the shortest text that reads back to the same bits.
    return json.dumps([list(weights), list(batch_lines), sorted(written)]).encode()


def merge_weights(
    packed: Sequence[bytes], *, same_count: bool, data_ranks: Sequence[int]
) -> tuple[Weighting, list[str]]:
    """The weights of all data ranks, and the parameters that were written to on any rank.

    packed: of every rank. data_ranks: of which data rank each is; ranks of one data rank are stages of one pipeline.
    Raises the same error on all ranks when the weights cannot be used.
    """
    given = [json.loads(each) for each in packed]
    # The lowest rank of each data rank speaks for its pipeline: reversed, so that it is written last.
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
    # Digests, not values: which rank is right nobody knows, so nothing is copied; ranks that differ are named.
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
    # The first line that differs is shown: batches have many entries, and one of them is enough to find the error.
    pairs = zip_longest(lines_of[first], lines_of[rank], fillvalue="nothing")
    one, other = next((one, other) for one, other in pairs if one != other)
    listed = f"rank {rank}" if len(different) == 1 else "ranks " + ", ".join(map(str, different))
    raise MismatchError(
        f"ranks along pp and tp are given the same batch, but {listed} got another one than the first of them: rank "
        f"{first} has {one}, rank {rank} has {other}. Choose the batch by the data rank (its coordinates along "
        "dp_replicate and dp_shard), not by the rank in the world"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExchange:
    """The same on every rank."""

    loss: float
    squares: list[float]
    """Every rank's sum of squares of the gradient's elements that it counts."""
    norms: dict[int, float]
    """The norms of whole parameters' gradients, by the number of the parameter, as far as ranks gave them."""
    touched: list[bool]
    """For each trainable parameter: whether any rank has a gradient for it."""
    changed_buffers: dict[int, list[int]]
    """Buffers of the model, by number, that a forward wrote to, and the ranks where one did."""
    written: list[int]
    """Parameters of the model, by number, that a forward wrote to on some rank."""
    stop: bool
    """Whether some rank asked to stop."""


def exchange_step(
    channel: Channel,
    *,
    loss: float,
    alike: Sequence[Sequence[int]],
    squares: float,
    norms: Mapping[int, float],
    touched: Sequence[bool],
    changed_buffers: Sequence[bool],
    written: Sequence[bool],
    stop: bool,
) -> StepExchange:
    """Exchange this rank's share of the loss and of the norm, and what it touched. `alike`: see `sum_of_losses`."""
    # One bit per parameter and buffer in one message: a step costs one exchange whatever is agreed on in it.
    flags = [*touched, *changed_buffers, *written, stop]
    num_bytes = -(-len(flags) // 8)
    packed = struct.pack("<dd", loss, squares) + _bits(flags).to_bytes(num_bytes, "little")
    packed += b"".join(struct.pack("<qd", *each) for each in norms.items())
    answers = channel.exchange(packed, purpose="losses and norms")
    shares = [struct.unpack("<dd", answer[:16]) for answer in answers]
    bits_of = [int.from_bytes(answer[16 : 16 + num_bytes], "little") for answer in answers]
    union = 0
    for bits in bits_of:
        union |= bits
    anywhere = [bool(union >> at & 1) for at in range(len(flags))]
    # Parameters and buffers have the same numbers on all ranks: those of the whole model, whatever part is here.
    changed = [at for at in range(len(changed_buffers)) if anywhere[len(touched) + at]]
    return StepExchange(
        loss=sum_of_losses([share for share, _ in shares], alike, is_exact=channel.device.type == "cpu"),
        squares=[share for _, share in shares],
        norms=dict(pair for answer in answers for pair in struct.iter_unpack("<qd", answer[16 + num_bytes :])),
        touched=anywhere[: len(touched)],
        # With the ranks, not as a flag: the values of one that changed it will hold for all.
        changed_buffers={
            at: [rank for rank, bits in enumerate(bits_of) if bits >> len(touched) + at & 1] for at in changed
        },
        written=[at for at in range(len(written)) if anywhere[len(touched) + len(changed_buffers) + at]],
        stop=anywhere[-1],
    )


def exchange_loss(channel: Channel, loss: float, alike: Sequence[Sequence[int]]) -> float:
    """The sum of every rank's share of a loss, correctly rounded: the same float on every rank."""
    answers = channel.exchange(struct.pack("<d", loss), purpose="loss")
    shares = [struct.unpack("<d", answer)[0] for answer in answers]
    return sum_of_losses(shares, alike, is_exact=channel.device.type == "cpu")


def sum_of_losses(shares: Sequence[float], alike: Sequence[Sequence[int]], *, is_exact: bool) -> float:
    """The sum of the ranks' shares. `alike`: ranks along tp, which all have the same share; it counts once.

    Raises MismatchError where they have not: some value that each of them has in part was taken for a whole one.
    is_exact: to the last bit; else as far as kernels that add in any order allow.
    """
    # Ranks along tp compute the same loss from whole activations. A difference shows, at no cost, that a cut value
    # was read as a whole one somewhere; training would go on with wrong gradients otherwise.
    for ranks in alike:
        first = shares[ranks[0]]
        for rank in ranks[1:]:
            if not _is_same(shares[rank], first, tolerance=0.0 if is_exact else 1e-3):
                raise MismatchError(
                    f"rank {ranks[0]} and rank {rank} lie along tp and have the same samples, but their losses are "
                    f"{first!r} and {shares[rank]!r}: somewhere a value of which each rank has its own part is read as "
                    "if it were whole. Look at tensor.rules (a 'column' needs a 'row' or 'colwise_gather_output' "
                    "behind it, bare parameters a 'sum' around them); sw.verify (shardwise verify) names the first "
                    "tensor that differs"
                )
    return _sum([shares[ranks[0]] for ranks in alike])


def _is_same(one: float, other: float, *, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))


def _bits(flags: Sequence[bool]) -> int:
    return int("".join("1" if flag else "0" for flag in reversed(flags)) or "0", 2)


def _sum(values: Sequence[float]) -> float:
    # fsum rounds once, so that the sum does not depend on the order of the ranks, nor on how many they are.
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
