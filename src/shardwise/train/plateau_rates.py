"""Learning rates that fall where held-out losses no longer do: torch's `ReduceLROnPlateau` as a callback of a run."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shardwise.errors import ConfigError, in_words
from shardwise.plan.saved_settings import take_over
from shardwise.runs.callbacks import Callback, EvaluationValues, TrainingLoop
from shardwise.train.config import RunConfig
from shardwise.train.references import resolve

NAME = "reduce_lr_on_plateau"
"""What transformers calls it."""
_KEPT = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def plateau_of(config: RunConfig) -> "PlateauRates | None":
    """The callback, where `train.schedule` names torch's class."""
    schedule = config.train.schedule
    if schedule is None or (":" not in schedule and schedule != NAME):
        return None
    if schedule != NAME and resolve(schedule, folder=config.folder, key="train.schedule") is not ReduceLROnPlateau:
        return None
    return PlateauRates(config.train.schedule_options)


class PlateauRates(Callback):
    """Lowers the learning rates of all optimizers after evaluations. A run that goes on has the counts of its save."""

    def __init__(self, options: Mapping[str, object]) -> None:
        """options: of `ReduceLROnPlateau`. Raises ConfigError for those that it does not take."""
        self._options: dict[str, Any] = dict(options)
        self._schedulers: list[ReduceLROnPlateau] = []
        self._full: list[list[float]] = []
        self._saved: list[dict[str, Any]] = []
        self._make(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))

    def on_begin(self, loop: TrainingLoop) -> None:
        """Begin with the full rates, or go on with the part of them that the save had."""
        optimizers = loop.engine.optimizers
        self._full = [[float(group["lr"]) for group in each.param_groups] for each in optimizers]
        self._schedulers = [self._make(each) for each in optimizers]
        for scheduler, full, saved in zip(self._schedulers, self._full, self._saved, strict=False):
            vars(scheduler).update({key: saved[key] for key in _KEPT}, best=_number(saved["best"], scheduler.best))
            parts = saved["parts"]
            for at, (group, rate) in enumerate(zip(scheduler.optimizer.param_groups, full, strict=True)):
                # Of other groups than in the save it is not known which were which: all have fallen alike, as a rule.
                take_over(group, {"lr": rate * parts[at if len(parts) == len(full) else 0]})

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Count, and lower the rates when it is time."""
        for scheduler in self._schedulers:
            scheduler.step(evaluation.value("loss", "train.schedule"))

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "schedulers": [
                {
                    **{key: getattr(each, key) for key in _KEPT},
                    "best": each.best if math.isfinite(each.best) else None,  # JSON has no infinity
                    "parts": [
                        float(group["lr"]) / rate if rate else 1.0
                        for group, rate in zip(each.optimizer.param_groups, full, strict=True)
                    ],
                }
                for each, full in zip(self._schedulers, self._full, strict=True)
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave; taken up when the loop begins."""
        self._saved = list(state["schedulers"])

    def _make(self, optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        try:
            return ReduceLROnPlateau(optimizer, **self._options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"train.schedule_options: ReduceLROnPlateau raised {in_words(error)}") from error


def _number(saved: float | None, fresh: float) -> float:
    return fresh if saved is None else saved
