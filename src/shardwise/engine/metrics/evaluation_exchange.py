"""The one exchange of an evaluation: its loss, the other entries of losses, and its metrics.

loss       8 bytes      the part of the weighted mean that this rank's microbatches make
kinds, shares           see `loss_entries`
names, states           see `evaluation_metrics`
"""

import struct
from collections.abc import Sequence

import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import exchange_parts
from shardwise.comm.hosts import naming_hosts
from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.metrics.evaluation_metrics import PURPOSE, EvaluationMetrics
from shardwise.engine.step.channels import RankGroups
from shardwise.engine.step.exchange import Weighting, numbers_in, sum_of_losses
from shardwise.engine.step.loss_entries import LossEntries, sums_of_entries
from shardwise.engine.step.reports import EvaluationReport


def exchange_evaluation(
    parts: Sequence[bytes],
    *,
    channel: Channel,
    weighting: Weighting,
    ranks: RankGroups,
    metrics: EvaluationMetrics,
) -> EvaluationReport:
    """The figures of all ranks, the same on every rank; parts: of this one.

    Raises ModelError for unlike dicts of loss functions, and MismatchError for unlike metrics, the same on all ranks.
    """
    with naming_hosts(channel):
        shares, kinds, given, *states = exchange_parts(channel, parts, purpose=PURPOSE)
        is_exact = channel.device.type == "cpu"
        (row,) = numbers_in(shares, 1, purpose=PURPOSE)
        loss = sum_of_losses(row, ranks.alike_index, is_exact=is_exact)
        others = sums_of_entries(kinds, given, ranks.alike_index, is_exact=is_exact, purpose=PURPOSE)
        return EvaluationReport(
            loss=loss,
            weight=weighting.total,
            losses={"loss": loss, **others},
            metrics=metrics.results(states, ranks.data_ranks),
        )


def parts_of_evaluation(
    losses: Sequence[MicrobatchLoss], weighting: Weighting, data_rank: int, metrics: EvaluationMetrics
) -> list[bytes]:
    """What a rank gives, from the losses of its microbatches. Raises MetricError for states that cannot travel."""
    # One copy to the host for all losses.
    values = torch.stack([each.loss.double() for each in losses]).tolist() if losses else []
    entries = LossEntries(losses, weighting, data_rank)
    return [
        struct.pack("<d", weighting.share_of_mean(values, data_rank)),
        entries.packed_kinds(),
        entries.packed_shares(),
        *metrics.packed(),
    ]
