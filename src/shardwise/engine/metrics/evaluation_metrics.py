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
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from shardwise.comm.agreement import texts_in, understood
from shardwise.comm.local_tensors import dtype_name
from shardwise.comm.nested_values import transform
from shardwise.comm.rank_values import RankValues
from shardwise.engine.forward.batch_rows import BatchRows
from shardwise.engine.forward.batches import Microbatch, count_rows
from shardwise.errors import MetricError, MismatchError

Metric: TypeAlias = Any
"""f(output, microbatch) -> a number or tensor; a torchmetrics object, for batches (inputs, target); or (such an object,
f(output, microbatch) -> what its `update` takes: a tuple, a dict of keyword arguments, or one value)."""

PURPOSE = "figures of an evaluation"


class EvaluationMetrics:
    """The metrics of one evaluation on one rank."""

    def __init__(
        self, asked: Mapping[str, Metric] | None, *, rows: BatchRows, device: torch.device, speaks: bool
    ) -> None:
        """speaks: this rank is the first of those that have the same outputs."""
        self._asked = {} if asked is None else asked
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

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def see(self, output: Any, microbatch: Microbatch) -> None:
        """The model's output for a microbatch."""
        for name, metric in self._metrics.items():
            with _noted(name):
                metric.update(output, microbatch)

    def packed(self) -> list[bytes]:
        """What this rank gives: the names, and what it has of each metric."""
        if not self:
            return [b"", b""]
        given = [each.packed() if self._speaks else b"" for each in self._metrics.values()]
        lengths = struct.pack(f"<{len(given)}Q", *map(len, given))
        return [json.dumps([*self._metrics]).encode(), lengths + b"".join(given)]

    def results(self, parts: Sequence[RankValues], data_ranks: Sequence[int]) -> dict[str, Any]:
        """The value of each metric, from what all ranks have packed. Raises MismatchError for unlike names."""
        names, states = parts
        if not names.is_one:
            told = understood(names, lambda answer: texts_in(answer or b"[]"), purpose=PURPOSE)
            for rank, each in enumerate(told):
                if each != told[0]:
                    raise MismatchError(
                        f"rank 0 asks for the metrics {told[0]}, and rank {rank} for {each}; give engine.evaluate the "
                        "same metrics on every rank"
                    )
        if not self:
            return {}
        of_ranks = understood(states, self._taken_apart, purpose=PURPOSE)
        order = sorted(range(len(of_ranks)), key=lambda rank: data_ranks[rank])
        results = {}
        metric: Any
        for at, (name, metric) in enumerate(self._metrics.items()):
            # By data ranks: rows of one process come in this order.
            given = RankValues.of(of_ranks[rank][at] for rank in order)
            with _noted(name):
                told = [each for each in understood(given, metric.read, purpose=PURPOSE) if each]
                results[name] = metric.result(told)
        return results

    def _taken_apart(self, answer: bytes) -> list[bytes]:
        lengths = struct.unpack_from(f"<{len(self._metrics)}Q", answer)
        ends = [*accumulate(lengths, initial=8 * len(lengths))]
        if ends[-1] != len(answer):
            raise ValueError(f"states that end at {ends[-1]}")
        return [answer[start:end] for start, end in pairwise(ends)]


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

    def packed(self) -> bytes:
        """The sum and the rows; nothing where there were none."""
        if not self._sums:
            return b""
        return struct.pack("<dd", math.fsum(torch.stack(self._sums).tolist()), self._num_rows)

    def read(self, packed: bytes) -> tuple[float, float] | None:
        """What a rank has packed."""
        return struct.unpack("<dd", packed) if packed else None

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

    def packed(self) -> bytes:
        """The states, as bytes; nothing where there was no update."""
        if callable(values := getattr(self._metric, "values", None)) and hasattr(self._metric, "compute_groups"):
            # Metrics of a collection that count alike have one state, which only the first of them updates.
            values(copy_state=False)
        counts = [
            part._update_count or self._num_updates * is_around
            for part, is_around in zip(self._parts, self._are_around, strict=True)
        ]
        if not any(counts):
            return b""
        header, tensors = [], []
        for part, count in zip(self._parts, counts, strict=True):
            described = {}
            for key in part._reductions:
                state = getattr(part, key)
                held = state if isinstance(state, list) else [state]
                if not all(isinstance(each, torch.Tensor) for each in held):
                    raise MetricError(
                        f"the metric {self._name!r} has a state {key!r} that is no tensor and no list of tensors; "
                        "ranks cannot bring it together. Give f(output, batch) -> tensor"
                    )
                tensors += held
                shapes = [[dtype_name(each.dtype), list(each.shape)] for each in held]
                described[key] = shapes if isinstance(state, list) else shapes[0]
            header.append([count, described])
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + b"".join(map(_bytes_of, tensors))

    def read(self, packed: bytes) -> _MetricStates | None:
        """What a rank has packed."""
        if not packed:
            return None
        start = 8 + struct.unpack_from("<Q", packed)[0]
        header, content = json.loads(packed[8:start]), _PackedTensors(memoryview(packed)[start:], self._device)
        states = []
        for part, (_, described) in zip(self._parts, header, strict=True):
            if not isinstance(described, dict) or [*described] != [*part._reductions]:
                raise ValueError(f"states {described}")
            states.append({key: content.state(each) for key, each in described.items()})
        content.end()
        return _MetricStates([int(count) for count, _ in header], states)

    def result(self, given: Sequence[_MetricStates]) -> Any:
        """The value of the metric over what all ranks have counted."""
        for at, part in enumerate(self._parts):
            updated = [each for each in given if each.counts[at]]
            if not updated:
                continue
            for key, reduce in part._reductions.items():
                states = [each.states[at][key] for each in updated]
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


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # A clone, because one element may have any stride, and cannot be viewed as bytes then.
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class _PackedTensors:
    """Tensors that travel one behind the other, as bytes."""

    def __init__(self, content: memoryview, device: torch.device) -> None:
        self._content = content
        self._device = device

    def state(self, described: Any) -> State:
        """The next state, from its dtype and shape, or a list of them. Raises ValueError and TypeError."""
        if described and isinstance(described[0], str):
            return self._tensor(*described)
        return [self._tensor(*each) for each in described]

    def end(self) -> None:
        """Raise ValueError where more bytes come."""
        if self._content:
            raise ValueError(f"{len(self._content)} bytes too many")

    def _tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        dtype, sizes = getattr(torch, name, None), [int(size) for size in shape]
        if not isinstance(dtype, torch.dtype) or min(sizes, default=0) < 0:
            raise ValueError(f"a tensor of {name} and shape {sizes}")
        num_bytes = math.prod(sizes) * dtype.itemsize
        taken, self._content = self._content[:num_bytes], self._content[num_bytes:]
        if len(taken) < num_bytes:
            raise ValueError(f"{len(taken)} bytes of {num_bytes}")
        return torch.from_numpy(np.frombuffer(taken, np.uint8).copy()).view(dtype).reshape(sizes).to(self._device)


def _as_number(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.item() if not leaf.ndim else leaf.cpu()
