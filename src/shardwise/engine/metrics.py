"""Metrics of an evaluation: what each rank has of them, and how ranks bring it together in one message.

    function    f(output, batch) -> tensor     sum 8, rows 8 of each rank          added; the mean over all rows
    torchmetrics    update(preds, target)      states of each rank, as bytes       reduced as each state says; compute()

A rank works on a copy of the metric that it is given. Where a model has stages, the rank with the output has the
states; of ranks along tp, which have the same outputs, the first one's count. All ranks get all states, in the order of
the data ranks, and so compute the same result.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from shardwise.comm.agreement import understood
from shardwise.comm.nested_values import transform
from shardwise.comm.rank_values import RankValues
from shardwise.engine.forward.batches import BatchRows, Microbatch, count_rows
from shardwise.engine.step.edges import Metric
from shardwise.engine.step.loss_entries import PURPOSE
from shardwise.errors import MetricError
from shardwise.moving.nested_exchange import is_plain, packed, unpacked


class EvaluationMetrics:
    """The metrics of one evaluation on one rank."""

    def __init__(self, asked: Mapping[str, Metric], *, rows: BatchRows, device: torch.device, speaks: bool) -> None:
        """speaks: this rank is the first of those that have the same outputs."""
        self._asked = asked
        self._rows = rows
        self._device = device
        self._speaks = speaks
        self._metrics: dict[str, _RowMean | _MergedMetric] = {}

    def begin(self) -> None:
        """Make what counts. Raises MetricError for what is no metric."""
        if not isinstance(self._asked, Mapping):
            raise MetricError(f"metrics is a {type(self._asked).__name__}; give a dict of metrics by name")
        self._metrics = {
            str(name): _metric(str(name), each, self._rows, self._device) for name, each in self._asked.items()
        }

    def see(self, output: Any, microbatch: Microbatch) -> None:
        """The model's output for a microbatch."""
        for name, metric in self._metrics.items():
            with _noted(name):
                metric.update(output, microbatch)

    def packed(self) -> list[bytes]:
        """What this rank gives: the names, and what it has of each metric."""
        given = [each.counted() if self._speaks else None for each in self._metrics.values()]
        return [json.dumps([*self._metrics]).encode(), packed(given, "states of metrics")]

    def results(self, states: RankValues, data_ranks: Sequence[int]) -> dict[str, Any]:
        """The value of each metric, from what all ranks have of them."""
        of_ranks = understood(states, self._read, purpose=PURPOSE)
        # By data ranks: rows of one process come in this order.
        order = sorted(range(len(of_ranks)), key=lambda rank: data_ranks[rank])
        results = {}
        metric: Any
        for at, (name, metric) in enumerate(self._metrics.items()):
            with _noted(name):
                results[name] = metric.result([each for rank in order if (each := of_ranks[rank][at]) is not None])
        return results

    def _read(self, answer: bytes) -> list[Any]:
        pairs = zip(self._metrics.values(), unpacked(answer), strict=True)
        return [None if given is None else metric.read(given) for metric, given in pairs]


@contextmanager
def _noted(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"shardwise: in the metric {name!r}")
        raise


def _metric(name: str, asked: Metric, rows: BatchRows, device: torch.device) -> "_RowMean | _MergedMetric":
    metric, inputs = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, None)
    is_stateful = all(callable(getattr(metric, each, None)) for each in ("update", "compute", "reset"))
    if is_stateful and not isinstance(metric, type) and (inputs is None or callable(inputs)):
        return _MergedMetric(name, metric, inputs, device)
    if callable(metric) and not isinstance(metric, type) and inputs is None:
        return _RowMean(name, metric, rows)
    raise MetricError(
        f"the metric {name!r} is a {type(asked).__name__}. Give f(output, batch) -> tensor, which is averaged by rows; "
        "a torchmetrics object; or (such an object, f(output, batch) -> (preds, target))"
    )


class _RowMean:
    """A function of outputs and batches, averaged by rows."""

    def __init__(self, name: str, function: Callable[[Any, Microbatch], Any], rows: BatchRows) -> None:
        self._name = name
        self._function = function
        self._rows = rows
        self._sums: list[torch.Tensor] = []
        self._num_rows = 0

    def update(self, output: Any, microbatch: Microbatch) -> None:
        """Add the rows of a microbatch."""
        given = self._function(output, microbatch)
        if not isinstance(given, torch.Tensor | np.ndarray | np.generic | float | int | list | tuple):
            raise MetricError(f"the metric {self._name!r} gave a {type(given).__name__}; give a number or a tensor")
        value = torch.as_tensor(given).detach()
        if not value.numel():
            raise MetricError(f"the metric {self._name!r} gave an empty tensor; give a number, or one for each row")
        num_rows = count_rows(microbatch, self._rows)
        # The mean of the microbatch counts by its rows. Of one number for each row that is their sum, without rounding.
        self._sums.append(value.double().sum() * (num_rows / value.numel()))
        self._num_rows += num_rows

    def counted(self) -> list[float] | None:
        """The sum and the rows; None where there were none."""
        return [math.fsum(torch.stack(self._sums).tolist()), float(self._num_rows)] if self._sums else None

    def read(self, given: Any) -> tuple[float, float]:
        """What a rank has counted. Raises TypeError or ValueError for anything else."""
        total, num_rows = given
        return total + 0.0, num_rows + 0.0

    def result(self, given: Sequence[tuple[float, float]]) -> float:
        """The mean over the rows of all ranks; nan where there are none."""
        num_rows = math.fsum(rows for _, rows in given)
        return math.fsum(total for total, _ in given) / num_rows if num_rows else math.nan


State: TypeAlias = Any
"""A tensor, or a list of tensors."""


@dataclass(frozen=True, slots=True)
class _MetricStates:
    """Of a metric and of those inside of it."""

    counts: list[int]
    """How often each was updated."""
    states: list[dict[str, State]]


class _MergedMetric:
    """A metric with states that ranks bring together, as those of torchmetrics have them."""

    def __init__(
        self, name: str, metric: Any, inputs: Callable[[Any, Microbatch], Any] | None, device: torch.device
    ) -> None:
        self._name = name
        # What the caller has counted stays as it is.
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        if isinstance(metric, nn.Module):
            self._metric.to(device)
        self._device = device
        self._inputs = inputs
        self._parts = list(filter(_has_states, _within(self._metric)))
        if not self._parts:
            raise MetricError(
                f"the metric {name!r} is a {type(metric).__name__} without states that ranks can bring together; give "
                "a torchmetrics object, or f(output, batch) -> tensor"
            )
        self._lists = [
            {key for key in part._reductions if isinstance(getattr(part, key), list)} for part in self._parts
        ]
        """States that begin as lists; some metrics make a tensor of one."""
        self._num_updates = 0
        self._are_around = [len(list(filter(_has_states, _within(each)))) > 1 for each in self._parts]
        """Which have others inside: wrappers of torchmetrics do not count their updates, and may have states."""
        for part in self._parts:
            # It would exchange its states over the process group of its own choice, besides what ranks exchange here.
            part.sync_on_compute = part._to_sync = False

    def update(self, output: Any, microbatch: Microbatch) -> None:
        """Let the metric count a microbatch."""
        self._num_updates += 1
        if self._inputs is None:
            given: Any = self._of_pair(output, microbatch)
        else:
            given = self._inputs(output, microbatch)
        if isinstance(given, tuple):
            self._metric.update(*given)
        elif isinstance(given, Mapping):
            self._metric.update(**given)
        else:
            self._metric.update(given)

    def _of_pair(self, output: Any, microbatch: Microbatch) -> tuple[Any, Any]:
        if isinstance(output, torch.Tensor) and isinstance(microbatch, tuple | list) and len(microbatch) == 2:
            return output, microbatch[1]
        raise MetricError(
            f"the metric {self._name!r} takes (output, batch[1]) where the output is a tensor and the batch (inputs, "
            f"target); here they are a {type(output).__name__} and a {type(microbatch).__name__}. Give (metric, "
            "lambda output, batch: (preds, target))"
        )

    def counted(self) -> list[Any] | None:
        """For each part how often it was updated, and its states; None where there was no update."""
        if callable(values := getattr(self._metric, "values", None)) and hasattr(self._metric, "compute_groups"):
            # Metrics of a collection that count alike have one state, which only the first of them updates.
            values(copy_state=False)
        counts = [
            part._update_count or self._num_updates * is_around
            for part, is_around in zip(self._parts, self._are_around, strict=True)
        ]
        if not any(counts):
            return None
        held: list[Any] = []
        for part, lists, count in zip(self._parts, self._lists, counts, strict=True):
            states = {key: getattr(part, key) for key in part._reductions}
            for key, state in states.items():
                if not _is_state(state, may_be_list=key in lists):
                    raise MetricError(
                        f"the metric {self._name!r} has a state {key!r} that is neither a dense tensor nor, from "
                        "the start, a list of them; ranks cannot bring it together. Give f(output, batch) -> tensor"
                    )
            held.append([count, states])
        return held

    def read(self, given: Any) -> _MetricStates:
        """What a rank has counted. Raises TypeError or ValueError for anything else."""
        for part, lists, (_, states) in zip(self._parts, self._lists, given, strict=True):
            if not isinstance(states, dict) or [*states] != [*part._reductions]:
                raise ValueError(f"states {states}")
            if not all(_is_state(each, may_be_list=key in lists) for key, each in states.items()):
                raise TypeError("no tensors")
        held = transform(given, lambda leaf: leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf)
        return _MetricStates([int(count) for count, _ in held], [states for _, states in held])

    def result(self, given: Sequence[_MetricStates]) -> Any:
        """The value of the metric over what all ranks have counted."""
        for at, (part, lists) in enumerate(zip(self._parts, self._lists, strict=True)):
            updated = [each for each in given if each.counts[at]]
            if not updated:
                continue
            for key, reduce in part._reductions.items():
                states = [each.states[at][key] for each in updated]
                if key in lists and len(states) > 1:  # else it stays what the metric has made of it
                    states = [each if isinstance(each, list) else [each] for each in states]
                elif len(shapes := {tuple(each.shape) for each in states if isinstance(each, torch.Tensor)}) > 1:
                    raise MetricError(
                        f"the metric {self._name!r} has a state {key!r} of unlike shapes on ranks, {sorted(shapes)}; "
                        "ranks bring together a state of one shape, or a list of tensors"
                    )
                setattr(part, key, _reduced(states, reduce, [each.counts[at] for each in updated]))
            part._update_count = sum(each.counts[at] for each in updated)
            part._computed = None
        return transform(self._metric.compute(), _as_number)


def _within(metric: Any) -> Iterator[Any]:
    return iter(metric.modules()) if isinstance(metric, nn.Module) else iter((metric,))


def _has_states(metric: Any) -> bool:
    return isinstance(getattr(metric, "_reductions", None), dict)


def _reduced(states: Sequence[State], reduce: Callable[[Any], Any] | None, counts: Sequence[int]) -> State:
    """States of several ranks as one, as torchmetrics reduces them."""
    if len(states) == 1:
        return states[0]
    if isinstance(states[0], list):
        flat = list(chain.from_iterable(states))
        return reduce(flat) if reduce is not None and flat else flat
    stacked = torch.stack([*states])
    # A mean over updates; ranks may have made unlike numbers of them.
    if getattr(reduce, "__name__", "") == "dim_zero_mean" and len(set(counts)) > 1:
        weights = torch.tensor(counts, dtype=stacked.dtype, device=stacked.device)
        return torch.tensordot(weights / weights.sum(), stacked, dims=1)
    return stacked if reduce is None else reduce(stacked)


def _is_state(value: Any, *, may_be_list: bool) -> bool:
    held = value if may_be_list and isinstance(value, list) else [value]
    return all(isinstance(each, torch.Tensor) and is_plain(each) for each in held)


def _as_number(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.item() if not leaf.ndim else leaf.cpu()
