"""How the learning rate goes from update to update: the decay of [train], or a schedule of torch, transformers, yours.

    decay = "cosine"                                          a fraction of each group's rate, known for every update
    schedule = "cosine_with_restarts"                         get_scheduler of transformers, with warmup_steps and steps
    schedule = "torch.optim.lr_scheduler:ExponentialLR"       the class, with schedule_options
    schedule = "mine.py:make"                                 f(optimizer, steps, **schedule_options) -> scheduler

A run that goes on makes the scheduler anew and lets it take the steps that it had taken. So nothing of it is saved, and
another schedule, or more steps, hold from the beginning on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from shardwise.errors import ConfigError, in_words
from shardwise.train.config import Decay, RunConfig, TrainTable
from shardwise.train.references import is_scheduler_class, named_schedules, resolve

SchedulerMaker: TypeAlias = Callable[[torch.optim.Optimizer, int], LRScheduler]
"""f(an optimizer, whose groups have their full rates; steps that were taken) -> its scheduler, as far as that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """The fraction of the full learning rate that each update takes: a linear warm-up, then a decay."""

    steps: int
    warmup_steps: int
    decay: Decay
    final: float
    """The fraction that the last update takes."""

    @classmethod
    def of(cls, train: TrainTable) -> "LearningRateSchedule":
        """The schedule that [train] asks for."""
        return cls(steps=train.steps, warmup_steps=train.warmup_steps, decay=train.decay, final=train.min_learning_rate)

    def __call__(self, update: int) -> float:
        """The fraction at `update`, counted from 0; updates after the last one take the fraction of the last one."""
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        # `steps - 1`: the last update, counted from 0, is to take exactly `final`.
        done = min(1.0, (update - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps))
        left = 1.0 - done if self.decay == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return self.final + (1.0 - self.final) * left


def decaying(train: TrainTable) -> SchedulerMaker:
    """By `decay`. A fraction is known for every update, so that nothing has to be repeated."""
    fraction = LearningRateSchedule.of(train)
    # With `last_epoch` -1 a scheduler begins; with more it takes `initial_lr` from the groups, which a resumed run has.
    return lambda optimizer, num_taken: LambdaLR(optimizer, fraction, last_epoch=num_taken - 1)


def advance(scheduler: LRScheduler) -> None:
    """The rates of the next update. Raises ConfigError where a schedule has no more."""
    # Of several optimizers, one may have had no turn yet. Torch would warn of that.
    scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
    try:
        scheduler.step()
    except Exception as error:  # such as OneCycleLR behind its total_steps
        raise ConfigError(
            f"train.schedule: {type(scheduler).__name__} raised {in_words(error)}; give it as many steps as train.steps"
        ) from error


def scheduler_maker(config: RunConfig) -> SchedulerMaker:
    """The maker of the schedulers that [train] asks for. Raises ConfigError for what makes none."""
    train = config.train
    if train.schedule is None:
        return decaying(train)
    make = _made_by_name(train) if ":" not in train.schedule else _made_by_reference(config)

    def caught_up(optimizer: torch.optim.Optimizer, num_taken: int) -> LRScheduler:
        try:
            scheduler = make(optimizer)
        except Exception as error:  # what a foreign callable raises is the fault of its options
            raise ConfigError(f"train.schedule: {train.schedule} raised {in_words(error)}") from error
        if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "get_last_lr", None)):
            raise ConfigError(
                f"train.schedule: {train.schedule} gave a {type(scheduler).__name__}, which is no scheduler of torch"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            # `PlateauRates` makes one of the class itself, and keeps its counts.
            raise ConfigError(
                f"train.schedule: {train.schedule} makes a ReduceLROnPlateau, whose counts no save would have. Name "
                'the class: "torch.optim.lr_scheduler:ReduceLROnPlateau"'
            )
        # As torch does in `optimizer.step`: steps were taken, although by an optimizer of an earlier process.
        vars(optimizer)["_opt_called"] = True
        for _ in range(num_taken):
            advance(scheduler)
        return scheduler

    return caught_up


def _made_by_name(train: TrainTable) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    name = str(train.schedule)
    named_schedules()  # refuses where transformers is not there

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        from transformers import get_scheduler

        made: LRScheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=train.warmup_steps,
            num_training_steps=train.steps,
            scheduler_specific_kwargs=dict(train.schedule_options),
        )
        return made

    return make


def _made_by_reference(config: RunConfig) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    factory: Any = resolve(str(config.train.schedule), folder=config.folder, key="train.schedule")
    options = config.train.schedule_options
    if is_scheduler_class(factory):
        return lambda optimizer: factory(optimizer, **options)
    return lambda optimizer: factory(optimizer, config.train.steps, **options)
