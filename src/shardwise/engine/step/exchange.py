"""The two exchanges of a step: weights before anything is computed, what was touched before anything is updated.

    open    weights    of this rank's microbatches, 8 bytes each: [4, 4] and [3, 3]  ->  `Weighting`, mean weight 3.5
            facts      JSON of `StepFacts`
            batch      digest of its lines, where ranks share it, and in the first steps

    close   flags      bits: trainable parameters with a gradient, buffers changed, parameters written by forwards,
                       parameters outside of the model, stop, whether optimizers step at once, whether somebody looks at
                       gradients, whether a buffer has another shape
                       3 trainable, 2 buffers, 4 parameters: 3 + 2 + 4 + 1 + 4 = 14 bits in 2 bytes
            figures    loss and norm of this rank (`figures`)
            times      of this rank up to here (`telemetry`)

Each rank gets what all ranks give, computes the same from it, and so refuses, skips and stops like the others. A part
that ranks have alike is read once, and numbers are read as one array (`RankValues`): a step costs the host of 4,096
ranks no loop over them. Sums of what all ranks give are rounded once (`exact_sum`): they depend neither on the order of
the ranks nor on their number.
"""

import json
import math
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, compress, count, pairwise, zip_longest
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import (
    a_list,
    a_table,
    exchange_parts,
    texts_in,
    understood,
    understood_runs,
    where_unlike,
)
from shardwise.comm.rank_values import Index, RankValues, Table
from shardwise.engine.forward.batch_digests import digest_of_lines
from shardwise.engine.forward.batches import DIM_0, BatchRows, LossWeight, Microbatch, Weight, count_rows
from shardwise.engine.forward.passes import Joint
from shardwise.engine.step.channels import RankGroups
from shardwise.errors import BatchError, MismatchError

Numbers: TypeAlias = npt.NDArray[np.float64]
"""In float64."""

_FEW = 128
"""So many are added one after the other in less time than an array takes."""


def exact_sum(values: Sequence[float] | Numbers) -> float:
    """The sum, correctly rounded, as `math.fsum` has it; nan where it is not finite."""
    try:
        total = math.fsum(values if len(values) <= _FEW else _few_with_the_same_sum(np.asarray(values, np.float64)))
    except (OverflowError, ValueError):  # too large on the way, or infinities of both signs
        return math.nan
    return total if math.isfinite(total) else math.nan


def _few_with_the_same_sum(rest: Numbers) -> Sequence[float]:
    # Rump, Ogita and Oishi, "Accurate floating-point summation part I" (2008): next to a large power of two, all values
    # are rounded to multiples of one unit. The sum of these is exact, whatever the order, and so is what they leave.
    #
    #     values    1.25   0.3    -7.1                        a power of two that is larger than their sum can be
    #     high      1.25   0.25   -7.125   ->  -5.625         multiples of its last bit (here 1/8)
    #     rest      0.0    0.05    0.025   ->  the next round
    found: list[float] = []
    while (most := float(np.abs(rest).max())) != 0.0:
        _, exponent = math.frexp(most)
        unit = exponent + len(rest).bit_length() + 1
        if not math.isfinite(most) or unit > 1023:
            return [*found, *rest.tolist()]
        large = math.ldexp(1.0, unit)
        high = rest + large
        high -= large
        found.append(float(high.sum()))
        rest = rest - high
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighting:
    """The weights of all microbatches of all data ranks."""

    table: Numbers
    """A row for each data rank; 0 behind the last microbatch of one that has fewer than another."""
    counts: Index
    """How many microbatches each data rank has."""
    is_known: bool = True
    """False: the weights are on the devices. Each counts as 1 here, so that all microbatches are computed."""

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[float]]) -> Self:
        """Those of each data rank."""
        counts = np.array([*map(len, by_rank)])
        table = np.zeros((len(by_rank), counts.max()))
        for row, weights in zip(table, by_rank, strict=True):
            row[: len(weights)] = weights
        return cls(table=table, counts=counts)

    def of_rank(self, rank: int) -> list[float]:
        """Those of one data rank."""
        weights: list[float] = self.table[rank, : self.counts[rank]].tolist()
        return weights

    @property
    def is_same_count(self) -> bool:
        """Whether all data ranks have as many microbatches."""
        return bool((self.counts == self.table.shape[1]).all())

    @cached_property
    def _values(self) -> Numbers:
        """All of them, in the order of the ranks."""
        if self.is_same_count:
            return self.table.reshape(-1)
        return self.table[np.arange(self.table.shape[1]) < self.counts[:, np.newaxis]]

    @cached_property
    def total(self) -> float:
        """Sum over all microbatches of all ranks, correctly rounded."""
        return exact_sum(self._values)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of all ranks together."""
        return len(self._values)

    @cached_property
    def _extremes(self) -> tuple[float, float]:
        """The least and the largest; nan where one is no number."""
        values = self._values
        return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)

    @property
    def uniform(self) -> bool:
        """Whether all microbatches count the same: then losses need no factor, and the mean is a plain one."""
        least, most = self._extremes
        return least == most

    @property
    def joint(self) -> list[Joint]:
        """For each number of a microbatch which data ranks compute it: one with weight 0 is not computed."""
        num_ranks, num_numbers = self.table.shape
        if self._extremes[0] > 0 and self.is_same_count:
            return [Joint.ALL] * num_numbers
        counts = np.count_nonzero(self.table > 0, axis=0).tolist()
        return [Joint.ALL if count == num_ranks else Joint.SOME if count else Joint.NONE for count in counts]

    @property
    def has_unknown(self) -> bool:
        """Whether one of them is no number."""
        return math.isnan(self._extremes[0])

    def check(self) -> None:
        """Raise BatchError for what is no weight, and for weights with which no mean can be taken."""
        least, most = self._extremes
        if not (least >= 0 and most < math.inf):
            for weight in self._values.tolist():
                check_weight(weight)
        if not self.total > 0:
            raise BatchError(
                "no microbatch on any rank has a weight above 0, so there is nothing to average; check loss_weight, "
                "and that batches have rows"
            )

    def factors(self, rank: int) -> list[float]:
        """What each loss of `rank` is multiplied by, so that the plain mean over all is the weighted mean."""
        weights = self.of_rank(rank)
        if self.uniform:
            # No factor instead of a factor of 1.0 made by a division: one process multiplies nothing, and w / mean of
            # equal weights may be rounded off 1.
            return [1.0] * len(weights)
        mean = self.total / self.num_microbatches
        return [weight / mean for weight in weights]

    def shares_of_mean(self, losses: Numbers, ranks: Sequence[int]) -> list[float]:
        """The part of the weighted mean over all microbatches that each row of losses makes.

        Each is of one of `ranks`, and has anything behind its last one.
        """
        weights = self.table[[*ranks], : losses.shape[1]]
        # What has no weight was not computed, and its stand-in is no value.
        with np.errstate(over="ignore", invalid="ignore"):
            terms = np.multiply(weights, losses, out=np.zeros_like(losses), where=weights != 0)
        return [each / self.total for each in map(math.fsum, terms.tolist())]


def weigh(
    microbatches: Sequence[Microbatch],
    loss_weight: LossWeight | None,
    *,
    rows: BatchRows = DIM_0,
    reads_device: bool = True,
) -> list[Weight]:
    """The weight of each microbatch: its rows, or what the user's function counts. Raises BatchError.

    reads_device: wait for a weight that is on a device.
    """
    weights: list[Weight] = []
    for microbatch in microbatches:
        weight = count_rows(microbatch, rows) if loss_weight is None else loss_weight(microbatch)
        is_there = isinstance(weight, torch.Tensor) and weight.device.type != "cpu" and weight.numel() == 1
        if is_there and not reads_device:
            weights.append(weight.detach().reshape(()))  # type: ignore[union-attr]
            continue
        try:
            value = float(weight)
        except (TypeError, ValueError, RuntimeError):
            raise BatchError(f"loss_weight gave {weight!r} for a microbatch; a weight is one number") from None
        check_weight(value)
        weights.append(value)
    return weights


@torch.no_grad()
def factors_on_device(
    everyone: Channel, weights: Sequence[Weight], weighting: Weighting
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights that stay on the device, of this rank, and what each loss is multiplied by; all data ranks call it.

    As `Weighting.factors`, for the weights that `weighting` does not know.
    """
    device = everyone.device
    held = [each if isinstance(each, torch.Tensor) else torch.full((), each, device=device) for each in weights]
    own = (
        torch.stack([each.to(device) for each in held]).double()
        if held
        else torch.empty(0, dtype=torch.float64, device=device)
    )
    of_all = torch.empty(weighting.num_microbatches, dtype=own.dtype, device=device)
    counts = None if weighting.is_same_count else weighting.counts.tolist()
    everyone.all_gather(of_all, own, counts=counts, purpose="weights of microbatches").wait()
    return own, list((own * (weighting.num_microbatches / of_all.sum())).float().unbind())


def check_weight(value: float) -> None:
    """Raise BatchError for what is no weight."""
    if not (math.isfinite(value) and value >= 0):
        raise BatchError(f"loss_weight gave {value} for a microbatch; a weight is a finite number of at least 0")


class StepFacts(NamedTuple):
    """What a rank says of a step before it is computed, besides its weights and its batch."""

    written: Sequence[str] = ()
    """Parameters that were written to from outside."""
    masters: Sequence[str] = ()
    """A parameter for each bucket whose masters were."""
    autocast: str = ""
    """The region of torch.autocast around the call."""
    trained: str = ""
    """Which parameters the step trains, in words."""
    is_listed: bool = False
    """Whether microbatches were given as a list, so that ranks may have unlike numbers of them."""
    values: str = ""
    """A digest of parameters, in looks that compare everything: see `FlatParams.digest_where_due`."""


def parts_of_opening(weights: Sequence[Weight], facts: StepFacts, *, batch: bytes = b"") -> list[bytes]:
    """What each rank tells the others before a step. batch: from `batch_compared`."""
    # nan is no weight: it stands for one that is on the device.
    known = [math.nan if isinstance(each, torch.Tensor) else each for each in weights]
    return [struct.pack(f"<{len(known)}d", *known), json.dumps(facts).encode(), batch]


NUM_PARTS_OF_OPENING = 3


_OPENING = "weights of microbatches"
_CLOSING = "losses and norms"
_WHOLE = b"+"


def batch_compared(lines: Sequence[str], *, is_whole: bool) -> bytes:
    """A batch in few bytes: equal where the lines are. is_whole: they tell of all its values."""
    return (_WHOLE if is_whole else b"") + digest_of_lines(lines).encode()


def _facts_in(packed: bytes) -> StepFacts:
    written, masters, autocast, trained, is_listed, values = a_list(packed)
    texts = [*written, *masters, autocast, trained, values]
    if not all(isinstance(each, str) for each in texts) or not isinstance(is_listed, bool):
        raise TypeError("no names")
    return StepFacts(written, masters, autocast, trained, is_listed, values)


def _weights_in(packed: bytes) -> tuple[float, ...]:
    return tuple(memoryview(packed).cast("d"))


def merge_weights(
    channel: Channel,
    parts: Sequence[RankValues],
    lines: Sequence[str],
    *,
    same_count: bool,
    ranks: RankGroups,
) -> tuple[Weighting, list[StepFacts], bool]:
    """The weights of all data ranks; each run of ranks' facts, once; whether replicas hold unlike values.

    parts: `parts_of_opening` of every rank. lines: of the batch of this rank.
    Raises the same error on all ranks when the weights cannot be used.
    """
    packed, said, batches = parts
    weighting = _weighting_in(packed, ranks)
    facts = [each for each, _ in understood_runs(said, _facts_in, purpose=_OPENING)]
    _refuse_different_steps(facts, said.starts)
    # The lines themselves travel only where they have to be shown.
    if not _are_those_of(batches, ranks):
        answers = channel.exchange(json.dumps(lines).encode(), purpose="lines of a batch")
        refuse_different_batches(understood(answers, texts_in, purpose="lines of a batch"), ranks.first_of)
    if weighting.has_unknown:
        # One is unknown: then all ranks give theirs on the device.
        are_there = np.arange(weighting.table.shape[1]) < weighting.counts[:, np.newaxis]
        weighting = replace(weighting, table=are_there.astype(np.float64), is_known=False)
    if same_count and not weighting.is_same_count and not any(each.is_listed for each in facts):
        raise MismatchError(
            f"every rank merges the same number of microbatches, but the ranks have {weighting.counts.tolist()}. "
            "Give step() the same microbatches on all, or a list of them, of any number"
        )
    weighting.check()
    return weighting, facts, _are_unlike(facts, said.starts, ranks.replicas)


def _are_unlike(facts: Sequence[StepFacts], starts: Sequence[int], replicas: Sequence[Sequence[int]]) -> bool:
    """Whether ranks that hold the same parameters gave unlike digests of them. starts: the first rank of each fact."""
    # What was written to a master is at its owner alone, until it is published.
    if not any(each.values for each in facts) or any(each.masters for each in facts):
        return False
    groups = ({facts[bisect_right(starts, rank) - 1].values for rank in ranks} for ranks in replicas)
    return any(len(values) > 1 and "" not in values for values in groups)


def _weighting_in(packed: RankValues, ranks: RankGroups) -> Weighting:
    rows = packed.rows
    if rows is None or not rows.size or rows.shape[1] % 8:
        told = understood(packed, _weights_in, purpose=_OPENING)
        return Weighting.of([told[rank] for rank in ranks.speakers.tolist()])
    # In the order of bytes of this machine, as tensors travel.
    table = rows.view(np.float64).take(ranks.speakers, axis=0)
    return Weighting(table=table, counts=np.full(len(table), table.shape[1]))


def _are_those_of(batches: RankValues, ranks: RankGroups) -> bool:
    """Whether ranks that share a batch were given equal ones."""
    if batches.is_one or len(ranks.speakers) == len(batches):
        return True
    if (rows := batches.rows) is None:
        return [batches[rank] for rank in ranks.first_of.tolist()] == [*batches]
    return np.array_equal(rows.take(ranks.first_of, axis=0), rows)


def ranks_with_same_rows(batches: Sequence[bytes], speakers: Sequence[int]) -> list[int]:
    """The first ranks of data ranks that gave the same digest of a whole batch: at least two, or none.

    batches: of all ranks, from `batch_compared`. speakers: the first rank of each data rank.
    """
    by_digest: dict[bytes, list[int]] = {}
    for rank in speakers:
        by_digest.setdefault(batches[rank], []).append(rank)
    return next((ranks for digest, ranks in by_digest.items() if digest[:1] == _WHOLE and len(ranks) > 1), [])


def check_writes(channel: Channel, digests: Mapping[str, str], replicas: Sequence[Sequence[int]]) -> None:
    """Raise MismatchError, the same on all ranks, where ranks that hold the same parameters hold other values.

    digests: of what was written to on any rank, as this rank has it. replicas: groups of data ranks.
    """
    # Digests, not values: which rank is right nobody knows, so nothing is copied; ranks that differ are named.
    found = where_unlike(channel, dict(digests), a_table, subject="written parameters", groups=replicas)
    if found is None:
        return
    for ranks in replicas:
        for rank in ranks[1:]:
            for name, digest in found[ranks[0]].items():
                if found[rank].get(name) != digest:
                    raise MismatchError(
                        f"parameter {name!r} was written to after parallelize. Data ranks hold the same values, but "
                        f"rank {ranks[0]} and rank {rank} now differ. Write alike on all ranks (load_state_dict), or "
                        "use sw.load(path, engine). An optimizer over model.parameters() steps each rank by its own "
                        "gradient: give it to parallelize, and call engine.step(batch)"
                    )


def _refuse_different_steps(facts: Sequence[StepFacts], ranks: Sequence[int]) -> None:
    """ranks: the first one that says each."""
    first = facts[0]
    for rank, each in zip(ranks, facts, strict=True):
        if each.autocast != first.autocast:
            raise MismatchError(
                f"ranks would compute in different dtypes: rank 0 calls under {first.autocast}, rank {rank} under "
                f"{each.autocast}. Call under the same torch.autocast on all ranks"
            )
    for rank, each in zip(ranks, facts, strict=True):
        if each.trained != first.trained:
            raise MismatchError(
                f"ranks would train different parameters: rank 0 trains {first.trained or 'all'}, and rank {rank} "
                f"trains {each.trained or 'all'}. Call step(only=..., norms=...) and requires_grad_() the same on all "
                "ranks, on the parameters that the model has after parallelize"
            )


def refuse_different_batches(lines_of: Sequence[Sequence[str]], first_of: Index) -> None:
    """Raise MismatchError for ranks whose lines differ; `first_of` each rank: the first that must have the same."""
    firsts = first_of.tolist()
    different = [rank for rank, first in enumerate(firsts) if lines_of[rank] != lines_of[first]]
    if not different:
        return
    rank, first = different[0], firsts[different[0]]
    # The first line that differs is shown: batches have many entries, and one of them is enough to find the error.
    pairs = zip_longest(lines_of[first], lines_of[rank], fillvalue="nothing")
    one, other = next((one, other) for one, other in pairs if one != other)
    listed = f"rank {rank}" if len(different) == 1 else "ranks " + ", ".join(map(str, different))
    raise MismatchError(
        f"ranks along pp and tp need the same batch, but {listed} got another one than the first. Rank {first} has "
        f"{one}, rank {rank} has {other}. Choose the batch by the data rank (its coordinates along dp_replicate and "
        "dp_shard), not by the rank in the world"
    )


class StepFlags(NamedTuple):
    """What has happened in a step: on one rank, or on any."""

    touched: Sequence[bool]
    """For each trainable parameter: whether there is a gradient for it."""
    changed_buffers: Sequence[bool]
    """Buffers of the model that a forward wrote to."""
    written: Sequence[bool]
    """Parameters of the model that a forward wrote to."""
    outside: Sequence[bool] = ()
    """Parameters of the loss alone, by what `LossParameters.flags` says of them."""
    stop: bool = False
    """Whether the program asks to stop."""
    steps_at_once: bool = False
    """Whether code of the user sees each step of an optimizer."""
    shows_gradients: bool = False
    """Whether code of the user looks at the gradients of the model."""
    are_reshaped: bool = False
    """Whether a buffer has another shape than before."""


class StepExchange(NamedTuple):
    """The same on every rank."""

    flags: StepFlags
    """Of any rank."""
    changed_buffers: dict[int, int]
    """The buffers, by number, that a forward wrote to, and the first rank where one did."""
    figures: Sequence[RankValues]
    """What every rank gives to the loss and the norm, by parts."""
    times: Sequence[RankValues]
    """What every rank did with its time, by parts."""


def exchange_step(
    channel: Channel, mine: StepFlags, *, figures: Sequence[bytes], times: Sequence[bytes]
) -> StepExchange:
    """Exchange what has happened on this rank, and what it gives to the figures of the step."""
    # One bit per parameter and buffer in one message: a step costs one exchange whatever is agreed on in it. They have
    # the same numbers on all ranks: those of the whole model, whatever part is here.
    flags = np.array([*chain.from_iterable(mine[:4]), *mine[4:]], dtype=np.bool_)
    packed = np.packbits(flags, bitorder="little").tobytes()
    bits, *others = exchange_parts(channel, [packed, *figures, *times], purpose=_CLOSING)
    # Of ranks in a row: what they have touched is mostly the same.
    table = _table_of(bits, len(packed), purpose=_CLOSING)
    anywhere: list[bool] = _flags(np.bitwise_or.reduce(table, axis=0), len(flags)).tolist()
    ends = [*accumulate(map(len, mine[:4]), initial=0)]
    touched, changed_buffers, written, outside = (anywhere[start:end] for start, end in pairwise(ends))
    of_all = StepFlags(touched, changed_buffers, written, outside, *anywhere[ends[-1] :])
    changed = [*compress(count(), changed_buffers)]
    # With the rank, not as a flag: the values of one that changed it will hold for all.
    first_runs = _flags(table, ends[2])[:, ends[1] :].argmax(axis=0).tolist() if changed else []
    return StepExchange(
        flags=of_all,
        changed_buffers={at: bits.starts[first_runs[at]] for at in changed},
        figures=others[: len(figures)],
        times=others[len(figures) :],
    )


def _table_of(values: RankValues, length: int, *, purpose: str) -> Table:
    """A row of so many bytes for each of the runs. Raises PeerError for a rank that gave more or less."""
    if (table := values.table) is None or table.shape[1] != length:
        understood(values, struct.Struct(f"{length}s").unpack, purpose=purpose)
        raise AssertionError("a value of another length is refused")
    return table


def sum_of_losses(shares: Sequence[float] | Numbers, alike: Index, *, is_exact: bool) -> float:
    """The sum of the ranks' shares. `alike`: ranks along tp, which all have the same share; it counts once.

    Raises MismatchError where they have not: some value that each of them has in part was taken for a whole one.
    is_exact: to the last bit; else as far as kernels that add in any order allow.
    """
    # Ranks along tp compute the same loss from whole activations. A difference shows, at no cost, that a cut value
    # was read as a whole one somewhere; training would go on with wrong gradients otherwise.
    if len(alike) == len(shares):
        return exact_sum(shares)
    of_groups = np.asarray(shares, np.float64)[alike]
    firsts = of_groups[:, :1]
    are_same = (of_groups == firsts) | (np.isnan(of_groups) & np.isnan(firsts))
    if not is_exact:
        largest = np.maximum(abs(of_groups), abs(firsts))
        with np.errstate(invalid="ignore"):  # of infinities and nans
            are_same |= (abs(of_groups - firsts) <= 1e-3 * largest) & np.isfinite(largest)
    if not are_same.all():
        group, at = np.argwhere(~are_same)[0]
        raise MismatchError(
            f"rank {alike[group, 0]} and rank {alike[group, at]} are peers along tp and have the same samples, but "
            f"their losses are {float(firsts[group, 0])!r} and {float(of_groups[group, at])!r}. A module or the "
            "loss reads this rank's part of a value as if it were whole. Look at tensor.rules: a 'column' needs a "
            "'row' or 'colwise_gather_output' behind it, bare parameters a 'sum' around them. sw.verify (shardwise "
            "verify) names the first tensor that differs. A program that itself takes gradients of cut parameters "
            "(torch.autograd.grad, Hessian products), or norms of them, gets parts. Use stage 3 instead of mesh.tp"
        )
    return exact_sum(firsts[:, 0])


def _flags(packed: Table, count: int) -> Table:
    return np.unpackbits(packed, axis=-1, count=count, bitorder="little").astype(np.bool_)
