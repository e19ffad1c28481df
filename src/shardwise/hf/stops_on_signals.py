"""SIGTERM and SIGUSR1 in a Trainer: one that comes to any rank saves and ends the training on all ranks.

    step           6              7                                    train() returns on both
    rank 0         on_step_end    on_step_end: should_save, should_training_stop
    rank 1         SIGTERM        on_step_end: the same

It stands in for the callback of transformers, whose handler saves on the rank that has the signal. Others would wait.
"""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class StopsOnSignals(TrainerCallback):
    """Asks after each step whether a signal has come to any rank."""

    def __init__(self, is_requested: Callable[[], bool]) -> None:
        """is_requested: the same on all ranks, which call it together."""
        self._is_requested = is_requested
        self._is_over = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask from the first step on."""
        self._is_over = False
        self._is_requested()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and end, where a signal has come; what belongs to the end of an epoch is saved with it."""
        if self._is_requested():
            self._is_over = control.should_training_stop = True
            control.should_save = not _ends_epoch(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing happens here where the epoch goes on in the run that resumes."""
        if self._is_over and not _ends_epoch(state):
            control.should_log = control.should_evaluate = control.should_save = False
        elif self._is_over:
            control.should_save = True


def _ends_epoch(state: Any) -> bool:
    return bool(state.epoch == int(state.epoch))
