"""The losses of a step or an evaluation, and what else the dicts of a loss function have: weighed alike, and summed.

    rank 0, weights 2 1     {"loss": 8.0, "aux": 1.0}   {"loss": 4.0, "aux": 4.0}
    rank 1, weight  1       {"loss": 2.0, "aux": 2.0}
    kinds                   [["aux"]]                   of both: the names of each unlike dict
    shares                  loss (2 * 8 + 1 * 4) / 4    aux (2 * 1 + 1 * 4) / 4     and 2 / 4, 2 / 4

Kinds are compared by all ranks, in the message that they exchange anyway: ranks alike refuse unlike dicts. A rank that
computes nothing has no kinds, and gives the share of its loss alone, which is 0.

An evaluation has one exchange: kinds and shares of each rank, and names and states of its metrics (`OutputObserver`).
"""

import json
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import a_list, exchange_parts, texts_in, understood, understood_runs
from shardwise.comm.hosts import naming_hosts
from shardwise.comm.rank_values import Index, RankValues
from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.step.channels import RankGroups
from shardwise.engine.step.edges import OutputObserver
from shardwise.engine.step.exchange import Numbers, Weighting, sum_of_losses
from shardwise.engine.step.reports import EvaluationReport
from shardwise.errors import MismatchError, ModelError

Kinds = list[list[str]]
"""The names in each unlike dict, sorted."""

_PLAIN: Kinds = [[]]
"""Of a loss function that gives nothing besides the loss."""


class LossEntries:
    """Those of the microbatches of one rank."""

    def __init__(
        self,
        losses: Sequence[MicrobatchLoss],
        weighting: Weighting,
        data_rank: int,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        self._losses = losses
        self.weighting = weighting
        self.scale = scale
        """What they were multiplied by, where the host does not know it."""
        self._data_rank = data_rank
        # What has no weight was not computed.
        counted = zip(losses, weighting.of_rank(data_rank), strict=True)
        found = {tuple(sorted(each.others)) for each, weight in counted if weight}
        self.kinds: Kinds = [[*kind] for kind in sorted(found)]

    def packed_kinds(self) -> bytes:
        """As they travel: nothing where there is nothing to say."""
        return b"" if self.kinds == _PLAIN else json.dumps(self.kinds).encode()

    def values(self) -> list[list[torch.Tensor]]:
        """The losses of all microbatches, and then the values of each name, where losses are; the host waits for none.

        Ranks that are refused for unlike dicts have no names.
        """
        names = self.kinds[0] if len(self.kinds) == 1 else []
        losses = [each.loss for each in self._losses]
        others = [[_on(each.loss.device, each.others.get(name, 0.0)) for each in self._losses] for name in names]
        return [losses, *others]

    def shares(self) -> list[float]:
        """The part of the weighted mean that this rank's microbatches make: of the loss, and then of each name."""
        values = self.values()
        if not self._losses:
            return [0.0] * len(values)
        # From a device in one copy.
        flat = torch.stack([each.double() for each in chain.from_iterable(values)]).cpu().numpy()
        return self.weighting.shares_of_mean(flat.reshape(len(values), -1), [self._data_rank] * len(values))


def _on(device: torch.device, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.device == device:
        return value.detach().reshape(()).double()
    return torch.full((), float(value), device=device, dtype=torch.float64)


def kinds_of_ranks(answers: RankValues, *, purpose: str) -> list[Kinds]:
    """Of each rank, from what it has packed. Raises ModelError, the same on all ranks, for unlike dicts."""
    if answers.is_one and not answers[0]:
        return [_PLAIN] * len(answers)
    first: tuple[int, list[str]] | None = None
    found: list[Kinds] = []
    for kinds, count in understood_runs(answers, _kinds_in, purpose=purpose):
        for kind in kinds:
            first = first or (len(found), kind)
            if kind != first[1]:
                raise ModelError(
                    f"the loss function gives {_named(first[1])} on rank {first[0]}, and {_named(kind)} on rank "
                    f"{len(found)}. Give the same entries for every microbatch on every rank; one that a microbatch "
                    "lacks may be 0"
                )
        found += [kinds] * count
    return found


def _named(kind: Sequence[str]) -> str:
    return ", ".join(["loss", *kind])


def _kinds_in(packed: bytes) -> Kinds:
    if not packed:
        return _PLAIN
    kinds: Kinds = a_list(packed)
    if not all(isinstance(kind, list) and all(isinstance(name, str) for name in kind) for kind in kinds):
        raise TypeError("no names")
    return kinds


def names_in(kinds: Sequence[Kinds]) -> list[str]:
    """The names of all ranks, which are alike."""
    return next((kind for each in kinds for kind in each), [])


def rows_in(answers: RankValues, kinds: Sequence[Kinds], num_norms: Sequence[int], *, purpose: str) -> Numbers:
    """A row for each rank from `LossEntries.shares` and so many norms behind them, all in float64.

    Rows are equally long: 0 stands for names, and behind the last norm, where a rank has fewer than another.
    Raises PeerError for a rank that gave more or less.
    """
    num_shares, most = 1 + len(names_in(kinds)), max(num_norms)
    given = answers.rows
    if given is not None and given.shape[1] == 8 * (num_shares + most) and len({*num_norms}) == 1 and all(kinds):
        return given.view(np.float64)  # in the order of bytes of this machine
    sizes = zip((num_shares if kind else 1 for kind in kinds), num_norms, strict=True)

    def taken_apart(packed: bytes) -> tuple[Numbers, Numbers]:
        numbers, size = np.frombuffer(packed, np.float64), next(sizes)
        if len(numbers) != sum(size):
            raise ValueError(f"{len(numbers)} numbers instead of {sum(size)}")
        return numbers[: size[0]], numbers[size[0] :]

    rows = np.zeros((len(answers), num_shares + most))
    for row, (shares, norms) in zip(rows, understood([*answers], taken_apart, purpose=purpose), strict=True):
        row[: len(shares)] = shares
        row[num_shares : num_shares + len(norms)] = norms
    return rows


def sums_of_shares(shares: Numbers, names: Sequence[str], alike: Index, *, is_exact: bool) -> dict[str, float]:
    """The weighted mean of "loss", and then of each name, over all ranks; see `sum_of_losses`."""
    found = zip(["loss", *names], shares.T, strict=True)
    return {name: sum_of_losses(row, alike, is_exact=is_exact) for name, row in found}


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
