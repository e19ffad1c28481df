"""The learning rate over a run."""

import math
from dataclasses import dataclass

from shardwise.train.tables import Decay, TrainTable


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
        """The fraction at `update`, counted from 0; updates after the last one take what the last one took."""
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (update - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps))
        left = 1.0 - done if self.decay == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return self.final + (1.0 - self.final) * left
