"""Signals that ask a fit to end: one that comes to any rank ends it on all ranks after the same step.

                 Lightning alone                         under the strategy
    the signal   the handler asks the other ranks,       is noted
                 which are in a step: all wait
    the step     -                                       says so to all: they have `trainer.received_sigterm`
    its batch    ends with SIGTERMException, and callbacks that save on exceptions do so: on all ranks

Under SLURM with `auto_requeue` the signal that asks for it saves and requeues then, and not in the middle of a step.
"""

import sys
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerStatus

from shardwise.engine import Engine
from shardwise.lightning.held_modules import StandIns
from shardwise.runs.preemption import Preemption


class AgreedSignals:
    """Stands in for what Lightning does with SIGTERM and SIGUSR1, for the time of a fit."""

    def __init__(self, trainer: Any, preemption: Preemption, stand_ins: StandIns) -> None:
        """To make before Lightning installs its handlers: it keeps those that it finds."""
        self._trainer, self._connector = trainer, trainer._signal_connector
        stand_ins.put(self._connector, _sigterm_notifier_fn=lambda *_: None)
        self._asked_steps = -1
        self._preemption = preemption
        preemption.__enter__()

    def ask(self, engine: Engine[Any]) -> None:
        """Where a signal has come to any rank, Lightning sees it on all. Called before training, and after batches."""
        if engine.steps != self._asked_steps:  # else the batch waits for its update
            self._asked_steps = engine.steps
            if self._preemption.requested(engine):
                self._connector.received_sigterm = True

    def requeue(self) -> None:
        """Save and requeue the job, if that is what the signal asks for under SLURM; after the batch, on all ranks."""
        environment = self._trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            number = environment.requeue_signal
            if number is not None and self._preemption.exit_code == 128 + number:
                self._connector._slurm_sigusr_handler_fn(number, None)

    def leave(self) -> None:
        """Put back the handlers that were there before."""
        # Before the Trainer does: it would put back ours, which it found.
        self._connector.teardown()
        is_interrupted = self._trainer.state.status == TrainerStatus.INTERRUPTED
        self._preemption.__exit__(*(sys.exc_info() if is_interrupted else (None, None, None)))
