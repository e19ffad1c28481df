"""`self.log` inside of a call of the engine: noted there, and logged when the call has ended.

A value of a pipeline's stage is on one rank only, and a batch may be several microbatches. So what a training step
logs goes the way of its loss: one entry of each microbatch, averaged over all of them and over all ranks.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn

from shardwise.engine import StepReport
from shardwise.errors import ModelError

ALIKE = "alike on all ranks"
"""The group of values that need no reduction; Lightning gives it to `Strategy.reduce`."""

_ENTRY = "self.log: "
"""Before the names of entries: a user may log a "loss"."""


class StepLogs:
    """What one call of the engine logs."""

    def __init__(self) -> None:
        # Where stages of a rank take turns, forwards of several microbatches stop in the middle, each in its thread.
        self._here = threading.local()
        self._settings: dict[str, dict[str, Any]] = {}
        self._sizes: dict[str, int] = {}
        self._metrics: dict[str, nn.Module] = {}

    @contextmanager
    def noting(self) -> Iterator[dict[str, Any]]:
        """Inside, what is logged comes into the dict."""
        values: dict[str, Any] = {}
        self._here.values = values
        try:
            yield values
        finally:
            self._here.values = None

    @property
    def values(self) -> dict[str, Any] | None:
        """By name, of the microbatch that runs; None outside of all."""
        found: dict[str, Any] | None = getattr(self._here, "values", None)
        return found

    def note(self, name: str, value: Any, settings: dict[str, Any], *, has_stages: bool) -> None:
        """One call of `self.log`. Raises ModelError for a metric object where a model has stages."""
        values = self.values
        assert values is not None
        self._settings[name] = settings
        if (size := settings.get("batch_size")) is not None:
            self._sizes[name] = self._sizes.get(name, 0) + size
        if not isinstance(value, nn.Module):
            values[name] = value
        elif has_stages:
            raise ModelError(
                f"self.log({name!r}) was given a {type(value).__name__}, and the model has stages (mesh.pp): its "
                "inputs are on one rank. Return them from the step, and update and log it in on_..._batch_end(outputs)"
            )
        else:
            self._metrics[name] = value

    def entries(self, values: Mapping[str, Any], weight: float) -> dict[str, Any]:
        """What of a microbatch the loss function reports. weight: by what it counts in means."""
        return {
            _ENTRY + name: value / weight if _is_sum(self._settings[name]) else value for name, value in values.items()
        }

    def log_step(self, log: Callable[..., None], report: StepReport, size_of_batches: Callable[[], int | None]) -> None:
        """Log what a step reported. size_of_batches: the rows of this rank, where it was several batches."""
        values = {}
        for name, value in report.losses.items():
            if name.startswith(_ENTRY):
                name = name.removeprefix(_ENTRY)
                settings = self._settings[name]
                if _is_extreme(settings) and report.weight > 1:
                    raise ModelError(
                        f"self.log({name!r}, reduce_fx={settings['reduce_fx']!r}) in training_step: a step gives the "
                        "mean over ranks and microbatches, not their extreme. Log it in on_train_batch_end"
                    )
                values[name] = value * report.weight if _is_sum(settings) else value
        self.log(log, values, {"sync_dist": True, "sync_dist_group": ALIKE}, size_of_batches)

    def log(
        self,
        log: Callable[..., None],
        values: Mapping[str, Any],
        other: Mapping[str, Any],
        size_of_batches: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Log what was noted, with the values that it has now, and forget it. other: other settings."""
        for name, settings in self._settings.items():
            size = self._sizes[name] if name in self._sizes else size_of_batches()
            value = self._metrics.get(name)
            changed = other if value is None else {}
            log(name, values[name] if value is None else value, **settings | {"batch_size": size} | dict(changed))
        self._settings, self._sizes, self._metrics = {}, {}, {}


def _is_sum(settings: Mapping[str, Any]) -> bool:
    return settings.get("reduce_fx") in ("sum", torch.sum)


def _is_extreme(settings: Mapping[str, Any]) -> bool:
    return settings.get("reduce_fx") in ("min", "max", torch.min, torch.max)


def rows_of(batches: Sequence[tuple[Any, ...]]) -> int | None:
    """The rows of several batches; None for one, which Lightning counts itself."""
    return sum(extract_batch_size(each[0]) for each in batches) if len(batches) > 1 else None
