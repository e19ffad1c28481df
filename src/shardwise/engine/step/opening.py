"""The opening of a step: a batch becomes microbatches with weights, or every rank raises the same error.

    alone       check the model, cut the batch, weigh each microbatch
    ~~~~ exchange: the verdict of each rank, its weights, what was written from outside, digests of the batch ~~~~
    together    `Weighting`; refuse ranks that share a batch and have others; warn of data ranks with the same rows

Nothing is computed before: see [1] of `engine`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.comm.agreement import agreed
from shardwise.comm.hosts import names_of
from shardwise.engine.forward.batch_digests import BatchDigests, describe_batch
from shardwise.engine.forward.batches import (
    Batch,
    GivenMicrobatches,
    Microbatch,
    Weight,
    count_rows,
    given_microbatches,
    is_on_host,
    split_batch,
    with_tensors,
)
from shardwise.engine.model.rank_parts import RankParts
from shardwise.engine.step.channels import stopping_peers
from shardwise.engine.step.exchange import (
    NUM_PARTS_OF_OPENING,
    StepFacts,
    Weighting,
    batch_compared,
    check_writes,
    merge_weights,
    parts_of_opening,
    ranks_with_same_rows,
    weigh,
)
from shardwise.errors import BatchError, SameRowsWarning

_COMPARED_STEPS = 3
"""First steps of an engine, in which a sampler that forgot the rank is noticed."""


class OpenedBatch(NamedTuple):
    """What a step computes: the same on ranks that share a batch."""

    parts: Sequence[Microbatch]
    weights: Sequence[Weight]
    """Of this rank's microbatches."""
    weighting: Weighting
    """Of those of all data ranks."""


class StepOpening:
    """Opens the steps and evaluations of one engine."""

    def __init__(self, rank: RankParts) -> None:
        self._rank = rank
        self._loss = rank.computation.loss
        self._channels = rank.channels
        self._buffers = rank.tensors.buffers
        mesh = rank.plan.mesh
        self._shares_batch = mesh.pp * mesh.tp > 1
        self._digests = BatchDigests()
        self._compared_steps = _COMPARED_STEPS if mesh.num_data_ranks > 1 else 0
        """Steps to come in which data ranks compare their rows."""

    def open(
        self,
        batch: Batch,
        microbatches: int | None,
        *,
        is_step: bool,
        purpose: str,
        begin: Callable[[], str],
    ) -> OpenedBatch:
        """Split and weigh the batch; every rank raises the same error when one cannot.

        microbatches: into how many it is split; None: as the plan says. In an evaluation ranks may have unlike numbers.
        begin: says in words what a step trains, equal on ranks that do the same; raises where this rank cannot.
        """
        self._rank.updates.counters.exchanges += 1
        lines: Sequence[str] = ()
        with agreed(
            self._channels.world, purpose=purpose, doing="splitting a batch", num_parts=NUM_PARTS_OF_OPENING
        ) as agreement:
            trained = begin()
            batch = with_tensors(batch)
            given = given_microbatches(batch)
            if given is None:
                parts, weighed = self._split(batch, microbatches, is_step=is_step)
            else:
                parts, weighed = GivenMicrobatches(given, self._channels.everyone.device), given
                if microbatches not in (None, len(given)):
                    raise BatchError(
                        f"a list of {len(given)} microbatches was given, and microbatches={microbatches!r}; leave the "
                        "number out"
                    )
            # An evaluation leaves out what has no weight: its loss may be nan.
            weights = weigh(weighed, self._loss.weight, rows=self._loss.rows, reads_device=not is_step)
            # Ranks along pp and tp compute one batch together. Given two different batches they would train on a
            # mixture, without any error; digests cost one pass over the batch and are compared in the message that is
            # sent anyway.
            compares = is_step and self._compared_steps > 0
            if self._shares_batch or compares:
                lines = describe_batch(batch, digest=not is_step)
            facts = StepFacts(
                written=sorted(self._buffers.written),
                masters=sorted(self._buffers.written_masters),
                autocast=self._rank.computation.autocast.described(),
                trained=trained,
                is_listed=given is not None,
                values=self._buffers.digest_where_due() if self._channels.everyone.size > 1 else "",
            )
            compared = batch_compared(lines, is_whole=is_on_host(batch)) if lines else b""
            agreement.parts = parts_of_opening(weights, facts, batch=compared)
        if compares:
            self._warn_of_same_rows(agreement.of_parts[-1])
        weighting, said, are_unlike = merge_weights(
            self._channels.world, agreement.of_parts, lines, same_count=is_step, ranks=self._channels.ranks
        )
        if are_unlike:  # the exchange below finds which differ, and refuses steps until the ranks' values are equal
            self._buffers.written.update(self._buffers.own_masters)
        self._settle_writes(said, are_unlike)
        return OpenedBatch(parts, weights, weighting)

    def _settle_writes(self, said: Sequence[StepFacts], are_unlike: bool) -> None:
        """Give all ranks what was written from outside, or refuse it on all. are_unlike: digests of replicas differ."""
        # A second exchange, only after a write from outside: data ranks hold the same parameters, and one that loaded
        # other values would go its own way with every loss still looking right. All ranks know that they take part,
        # because these are the unions over all of them.
        written = sorted({name for each in said for name in each.written})
        masters = {name for each in said for name in each.masters}
        if masters:
            with stopping_peers(self._channels.world, "publishing what was written through an optimizer"):
                self._buffers.publish_masters(self._rank.updates.counters, masters)
                self._rank.tensors.ties.publish()
        if written or are_unlike:
            names = sorted({*written, *self._buffers.written})
            check_writes(self._channels.world, self._buffers.digests(names), self._channels.ranks.replicas)
            self._buffers.written.clear()

    def _split(
        self, batch: Batch, microbatches: int | None, *, is_step: bool
    ) -> tuple[Sequence[Microbatch], Sequence[Microbatch]]:
        """The microbatches, and the same where they are weighed."""
        device, wanted = self._channels.everyone.device, microbatches
        if wanted is None:
            wanted = self._rank.plan.merge.microbatches
            wanted = wanted if is_step else min(wanted, count_rows(batch, self._loss.rows))
        # Without rows there is nothing to split: legal in an evaluation, and an error of `split_batch` in a step.
        if not wanted and not is_step:
            return (), ()
        parts = split_batch(batch, wanted, device, self._loss.rows)
        if self._loss.weight is None or device.type == "cpu" or not is_on_host(batch):
            return parts, parts
        # Where the rows are: the host then knows the weights, and waits for nothing.
        return parts, split_batch(batch, wanted, torch.device("cpu"), self._loss.rows)

    def digests(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Of what is on the device, where ranks share the batch: compared with the figures of the step."""
        return self._digests.of(with_tensors(batch)) if self._shares_batch else {}

    def _warn_of_same_rows(self, batches: Sequence[bytes]) -> None:
        """Tell, once, that data ranks train on the same rows; no error, because a small dataset may repeat itself."""
        self._compared_steps -= 1
        if ranks := ranks_with_same_rows(batches, self._channels.ranks.speakers.tolist()):
            self._compared_steps = 0
            if self._channels.world.rank == 0:
                names = names_of(self._channels.world)
                named = " and ".join(f"rank {names[rank]}" for rank in ranks[:2])
                more = f" (and {len(ranks) - 2} more)" if len(ranks) > 2 else ""
                text = (
                    f"{named}{more} are different data ranks, and got the same rows: they train on one share of the "
                    "data twice. Choose the rows by the data rank, plan.mesh.data_rank(channel.rank), as sw.Data does: "
                    "for batch in data.on(engine)"
                )
                warnings.warn(text, SameRowsWarning, stacklevel=4)
