"""The folder of a run of Lightning, as `shardwise top` shows it."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from shardwise.errors import PlanError
from shardwise.lightning.strategy import Strategy
from shardwise.runs.callbacks import TrainingLoop
from shardwise.runs.recorded_runs import recorded
from shardwise.runs.stop_signals import Stopped

_OF_EVALUATIONS = "val_"


class RunRecord(Callback):
    """Writes `metrics.jsonl` and `run.json` of a fit under the strategy, for `shardwise top FOLDER`.

    A line comes every `log_every_n_steps` of the Trainer, at the end, and with each validation: of what is logged as
    `val_...`.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        """folder: None: that of the Trainer's logger, else its `default_root_dir`."""
        self._folder = folder
        self._services, self._pause = ExitStack(), ExitStack()
        self._loop: TrainingLoop | None = None
        self._num_rows = 0.0
        """Since the last line, on all data ranks."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the files, or continue them."""
        strategy = trainer.strategy
        if not isinstance(strategy, Strategy):
            raise PlanError(
                f"RunRecord has no ranks to show under {type(strategy).__name__}; give Trainer(strategy=Strategy(plan))"
            )
        assert strategy.engine is not None
        folder = trainer.log_dir or trainer.default_root_dir  # all ranks ask for it
        record = recorded(
            strategy.engine,
            folder if self._folder is None else self._folder,
            steps=_known(trainer.estimated_stepping_batches),
            step=trainer.global_step,
        )
        self._num_rows, self._loop = 0.0, self._services.enter_context(record)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write a line, when it is time."""
        self._num_rows += _rows_in(batch) * trainer.strategy.plan.mesh.num_data_ranks
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._hand_over(trainer, {})

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Its time is not that of updates."""
        if self._loop is not None:
            self._pause.enter_context(self._loop.paused())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what it has found."""
        self._pause.close()
        if self._loop is not None:
            known = trainer.callback_metrics.items()
            names = {name: name.removeprefix(_OF_EVALUATIONS) for name, _ in known if name.startswith(_OF_EVALUATIONS)}
            self._hand_over(trainer, {names[name]: float(value) for name, value in known if name in names})

    def _hand_over(self, trainer: Any, values: Mapping[str, float]) -> None:
        assert self._loop is not None
        if trainer.global_step > self._loop.step:
            rows, self._num_rows = self._num_rows, 0.0
            self._loop.after_step(trainer.strategy.report, values or None, rows=rows, step=trainer.global_step)
        elif values:
            self._loop.evaluated(values)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say that the run has finished."""
        self._hand_over(trainer, {})
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say how it has ended."""
        if isinstance(exception, SIGTERMException) and (code := trainer.strategy.preemption.exit_code):
            exception = Stopped(code - 128, f"after step {trainer.global_step}")
            if self._loop is not None:
                self._hand_over(trainer, {})
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        self._pause.close()
        services, self._services, self._loop = self._services, ExitStack(), None
        services.__exit__(None if error is None else type(error), error, None)


def _known(steps: float) -> int | None:
    """None for what stands for an unknown number: infinity of an endless fit, -1 of data without a length."""
    return int(steps) if 0 <= steps < math.inf else None


def _rows_in(batch: Any) -> int:
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException:  # no tensors in it
        return 0
