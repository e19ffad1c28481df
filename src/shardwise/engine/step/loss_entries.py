"""What the dicts of a loss function have besides the loss: weighed as the loss is, and summed over ranks.

    rank 0, weights 2 1     {"loss": .., "aux": 1.0, "kl": 4.0}  {"loss": .., "aux": 4.0, "kl": 1.0}
    rank 1, weight  1       {"loss": .., "aux": 2.0, "kl": 3.0}
    kinds                   [["aux", "kl"]]                       of both: the names of each unlike dict
    shares                  (2 * 1 + 1 * 4) / 4, (2 * 4 + 1 * 1) / 4      and 2 / 4, 3 / 4

Kinds are compared by all ranks, in the message that they exchange anyway: ranks alike refuse unlike dicts. A rank that
computes nothing has no kinds, and gives no shares.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.comm.agreement import a_list, understood, understood_runs
from shardwise.comm.rank_values import Index, RankValues
from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.step.exact_sums import Numbers
from shardwise.engine.step.exchange import Weighting, numbers_in, sum_of_losses
from shardwise.errors import ModelError

Kinds = list[list[str]]
"""The names in each unlike dict, sorted."""

_PLAIN: Kinds = [[]]
"""Of a loss function that gives nothing besides the loss."""


class LossEntries:
    """Those of the microbatches of one rank."""

    def __init__(self, losses: Sequence[MicrobatchLoss], weighting: Weighting, data_rank: int) -> None:
        self._losses = losses
        self._weighting = weighting
        self._data_rank = data_rank
        # What has no weight was not computed.
        counted = zip(losses, weighting.of_rank(data_rank), strict=True)
        found = {tuple(sorted(each.others)) for each, weight in counted if weight}
        self.kinds: Kinds = [[*kind] for kind in sorted(found)]

    @property
    def is_plain(self) -> bool:
        """Whether the loss function gives the loss alone."""
        return self.kinds == _PLAIN

    def packed_kinds(self) -> bytes:
        """As they travel: nothing where there is nothing to say."""
        return b"" if self.is_plain else json.dumps(self.kinds).encode()

    def packed_shares(self) -> bytes:
        """Of each name, the part of the weighted mean that this rank's microbatches make."""
        if self.is_plain or len(self.kinds) != 1:
            return b""
        given = [each.others.get(name, 0.0) for name in self.kinds[0] for each in self._losses]
        devices = {each.device for each in given if isinstance(each, torch.Tensor) and each.device.type != "cpu"}
        # From a device in one copy.
        values = torch.stack(self.on_device(devices.pop())).tolist() if devices else [*map(float, given)]
        num_losses = len(self._losses)
        cuts = [values[start : start + num_losses] for start in range(0, len(values), num_losses)]
        return np.array([self._weighting.share_of_mean(cut, self._data_rank) for cut in cuts]).tobytes()

    def on_device(self, device: torch.device) -> list[torch.Tensor]:
        """The values of each name in turn, of all microbatches; the host waits for none."""
        names = self.kinds[0] if len(self.kinds) == 1 else []
        return [_on(device, each.others.get(name, 0.0)) for name in names for each in self._losses]


def _on(device: torch.device, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
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


def sums_of_entries(
    kinds: RankValues, shares: RankValues, alike: Index, *, is_exact: bool, purpose: str
) -> dict[str, float]:
    """The weighted mean of each name over all ranks. Raises ModelError for unlike dicts; see `sum_of_losses`."""
    names = names_in(kinds_of_ranks(kinds, purpose=purpose))
    if not names:
        return {}
    size = 8 * len(names)
    if shares.rows is not None:
        table: Numbers = numbers_in(shares, len(names), purpose=purpose)
    else:
        given = understood(shares, lambda packed: _shares_in(packed or bytes(size), len(names)), purpose=purpose)
        table = np.array(given).T
    return {name: sum_of_losses(row, alike, is_exact=is_exact) for name, row in zip(names, table, strict=True)}


def _shares_in(packed: bytes, count: int) -> Numbers:
    found = np.frombuffer(packed, np.float64)
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers instead of {count}")
    return found
