"""The one exchange of an evaluation: its loss, the other entries of losses, and its metrics.

kinds, shares           see `loss_entries`
names, states           see `OutputObserver`
"""

import struct
from collections.abc import Sequence

from shardwise.comm import Channel
from shardwise.comm.agreement import exchange_parts, texts_in, understood
from shardwise.comm.hosts import naming_hosts
from shardwise.comm.rank_values import RankValues
from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.step.channels import RankGroups
from shardwise.engine.step.edges import OutputObserver
from shardwise.engine.step.exchange import Weighting
from shardwise.engine.step.loss_entries import LossEntries, kinds_of_ranks, names_in, rows_in, sums_of_shares
from shardwise.engine.step.reports import EvaluationReport
from shardwise.errors import MismatchError

PURPOSE = "figures of an evaluation"


def exchange_evaluation(
    parts: Sequence[bytes],
    *,
    channel: Channel,
    weighting: Weighting,
    ranks: RankGroups,
    observer: OutputObserver | None,
) -> EvaluationReport:
    """The figures of all ranks, the same on every rank; parts: of this one.

    Raises ModelError for unlike dicts of loss functions, and MismatchError for unlike metrics, the same on all ranks.
    """
    with naming_hosts(channel):
        said, shares, names, states = exchange_parts(channel, parts, purpose=PURPOSE)
        kinds = kinds_of_ranks(said, purpose=PURPOSE)
        rows = rows_in(shares, kinds, [0] * len(kinds), purpose=PURPOSE)
        is_exact = channel.device.type == "cpu"
        losses = sums_of_shares(rows, names_in(kinds), ranks.alike, is_exact=is_exact)
        _check_names(names)
        metrics = {} if observer is None else observer.results(states, ranks.data_ranks)
        return EvaluationReport(loss=losses["loss"], weight=weighting.total, losses=losses, metrics=metrics)


def _check_names(names: RankValues) -> None:
    """Raise MismatchError for ranks that ask for unlike metrics."""
    if names.is_one:
        return
    told = understood(names, lambda answer: texts_in(answer or b"[]"), purpose=PURPOSE)
    for rank, each in enumerate(told):
        if each != told[0]:
            raise MismatchError(
                f"rank 0 asks for the metrics {told[0]}, and rank {rank} for {each}; give engine.evaluate the same "
                "metrics on every rank"
            )


def parts_of_evaluation(
    losses: Sequence[MicrobatchLoss], weighting: Weighting, data_rank: int, observer: OutputObserver | None
) -> list[bytes]:
    """What a rank gives, from the losses of its microbatches. Raises MetricError for states that cannot travel."""
    entries = LossEntries(losses, weighting, data_rank)
    shares = entries.shares()
    observed = [b"", b""] if observer is None else observer.packed()
    return [entries.packed_kinds(), struct.pack(f"<{len(shares)}d", *shares), *observed]
