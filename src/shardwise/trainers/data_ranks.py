"""The data ranks of a plan, as trainers of other libraries ask for them."""

import json
from collections.abc import Callable, Sequence
from functools import reduce as folded
from numbers import Real
from typing import Any

import numpy as np
import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import a_table, json_as, understood
from shardwise.engine.pipeline.stage_tensor import StageTensor
from shardwise.engine.step.channels import DATA_AXES
from shardwise.errors import BatchError, MismatchError
from shardwise.moving.nested_exchange import exchange
from shardwise.plan import Plan


def _numbers_in(answer: bytes) -> dict[str, Any]:
    numbers = a_table(answer)
    if not all(isinstance(each, int | float) for each in numbers.values()):
        raise TypeError("no numbers")
    return numbers


class DataRanks:
    """The data ranks of a plan, seen from one rank; what they tell each other outside of the engine's steps."""

    def __init__(self, plan: Plan, channel: Channel) -> None:
        self.world = channel
        self.data_rank_of = plan.mesh.data_rank
        """The data rank of a rank."""
        self.count = plan.mesh.num_data_ranks
        self.rank = plan.mesh.data_rank(channel.rank)
        members = plan.mesh.peers(channel.rank, DATA_AXES)
        self.is_speaker = channel.rank == min(
            rank for rank in range(channel.size) if plan.mesh.data_rank(rank) == self.rank
        )
        """Whether this rank writes for its data rank."""
        # Of its own: what a loss gathers travels while the engine's transfers are under way.
        self.channel = channel.over(members) if self.count > 1 else None
        """Between data ranks; None where there is one."""
        copies = plan.mesh.peers(channel.rank, ("tp",))
        self._copies = channel.over(copies) if len(copies) > 1 else None

    def sums(self, numbers: Sequence[float], *, purpose: str) -> list[float]:
        """Each number summed over the data ranks, in their order."""
        if self.channel is None:
            return list(numbers)
        told = self.channel.exchange(json.dumps(list(numbers)).encode(), purpose=purpose)
        form = json_as(tuple[(float,) * len(numbers)])  # type: ignore[misc]
        return [sum(each) for each in zip(*understood(told, form, purpose=purpose), strict=True)]

    def take_numbers(self, metrics: dict[str, Any]) -> None:
        """Give every rank the numbers of rank 0; those that it counted may differ."""
        if self.world.size == 1:
            return
        own = {name: each for name, each in metrics.items() if isinstance(each, Real)} if self.world.rank == 0 else {}
        purpose = "metrics of an evaluation"
        told = self.world.exchange(json.dumps(own, default=float).encode(), purpose=purpose)
        (numbers,) = understood(told[:1], _numbers_in, purpose=purpose)
        if self.world.rank:
            metrics.update(numbers)

    def check_alike(self, own: torch.Tensor) -> None:
        """Raise MismatchError, the same on all of them, where ranks along tp computed different tensors."""
        if self._copies is None:
            return
        values = own.detach().to("cpu", torch.float64).reshape(-1)
        purpose = "what a loss gathers, along tp"
        told = self._copies.exchange(values.numpy().tobytes(), purpose=purpose)
        first, *others = understood(told, np.frombuffer, purpose=purpose)
        # Near: a small model that knows nothing has nearly the entropy of its part of the vocabulary everywhere.
        if all(each.shape == first.shape and np.allclose(each, first, rtol=1e-5, equal_nan=True) for each in others):
            return
        raise MismatchError(
            "ranks along tp have the same rows, and the loss gathers different values on each of them. Some module, or "
            "a head whose weight the loss reads, has this rank's part where the whole is read. Leave lm_head whole, by "
            "tensor.rules for the layers alone"
        )

    def tensors(self, own: torch.Tensor | None, *, purpose: str, of_speakers: bool = False) -> list[torch.Tensor]:
        """A tensor of each data rank that has one, in their order. Ranks may have other sizes, and one dtype.

        of_speakers: all ranks of the world take those of the speakers, which may differ from their own along pp and tp.
        """
        channel = self.world if of_speakers and self.world.size > self.count else self.channel
        if channel is None:
            return [] if own is None else [own]
        back = channel.device if own is None else own.device
        if channel is self.world and not self.is_speaker:
            own = None
        own = None if own is None else plain_tensor(own)
        found = [each.to(back) for each in exchange(own, channel=channel, purpose=purpose) if each is not None]
        if len(dtypes := {each.dtype for each in found}) > 1:
            raise BatchError(f"data ranks gather tensors of the dtypes {sorted(map(str, dtypes))}; give one dtype")
        return found


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may travel, with the same values."""
    if isinstance(tensor, StageTensor):
        # Every rank along pp gathers with its own peers. As numbers: all of them can read these.
        tensor = torch.tensor(tensor.detach().tolist(), dtype=tensor.dtype).reshape(tensor.shape)
    return tensor.as_subclass(torch.Tensor)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduced(parts: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """The tensors of ranks as one, element by element, in the order of ranks and in their dtype.

    how: sum, mean, max or min. Bools are counted, in int64. A mean of whole numbers is of the default dtype. Raises
    BatchError for other words and for tensors of different shapes.
    """
    if how not in _FOLDS:
        raise BatchError(f"tensors of ranks are reduced by {how!r}; give one of {', '.join(_FOLDS)}")
    if len(shapes := {tuple(each.shape) for each in parts}) > 1:
        raise BatchError(
            f"data ranks reduce tensors of the shapes {sorted(shapes)}, element by element; pad them to one shape first"
        )
    dtype = parts[0].dtype
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if how in ("sum", "mean") and (dtype == torch.bool or (is_whole and how == "mean")):
        parts = [each.long() for each in parts]
    found = folded(_FOLDS[how], parts)
    return found / len(parts) if how == "mean" else found.clone() if len(parts) == 1 else found


def padded_to(tensor: torch.Tensor, size: int, *, dim: int, value: Any, first: bool = False) -> torch.Tensor:
    """The tensor, padded with `value` to `size` in `dim`, at its end or at its beginning."""
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_full(shape, value)
    return torch.cat([filling, tensor] if first else [tensor, filling], dim=dim)
