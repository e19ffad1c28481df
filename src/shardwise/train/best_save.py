"""The best save of a loop: the model as it was where an evaluation was best, in a folder that nothing else prunes.

    runs/demo/checkpoints/save-00000007      regular saves, the newest ones kept
                         /best/save-00000003 the best so far; the one before goes once it is committed

What is best so far is read from the save itself. So the folder and the callback cannot disagree, whatever save a run
goes on from.
"""

import json
from typing import Any

from shardwise.checkpoint import load
from shardwise.checkpoint import open as look_into
from shardwise.comm.agreement import a_table, agreed, of_form, understood
from shardwise.errors import ConfigError
from shardwise.runs.callbacks import Callback, EvaluationValues, TrainingLoop
from shardwise.train.checkpointing import listing_at
from shardwise.train.early_stopping import Improvement, Mode
from shardwise.train.regrouping import RegroupedEngine

_KEY = "best"
"""In the `extra` of a save: the metric by which it is the best, and its value."""


class BestSave(Callback):
    """Saves the run where an evaluation is the best so far, and keeps that save alone.

    path: folder or address; left out: "best" in the folder of the run's saves. metric, mode, min_delta: as for
    `EarlyStopping`. load_at_end: fill the engine with the best save at the end, but not after an error or a signal.

    A run that goes on compares with the save that it finds. Other saves there, by another metric or of an earlier run,
    raise ConfigError: none of them goes. Every save is whole, and a run can go on from it.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        metric: str = "loss",
        mode: Mode = "min",
        min_delta: float = 0.0,
        load_at_end: bool = False,
    ) -> None:
        self.path = path
        self._load_at_end = load_at_end
        self._improvement = Improvement("BestSave", metric, mode, min_delta)

    def on_begin(self, loop: TrainingLoop) -> None:
        """See what is the best so far."""
        if self.path is None:
            if loop.saves is None:
                raise ConfigError("BestSave: this loop has no folder of saves; give one, as path")
            self.path = f"{loop.saves.rstrip('/')}/best"
        found, best = self._found(loop), self._improvement
        if not found:
            return
        if loop.is_fresh:
            raise ConfigError(
                f"BestSave: {self.path} holds the best save of another run. Give another path, or remove the folder"
            )
        best.best, best.best_step = found["value"], found["step"]
        loop.say(f"best save so far: {best.words()}, in {self.path}")

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Save, where it is the best so far."""
        best = self._improvement
        if best.is_new(evaluation):
            assert self.path is not None
            self._found(loop)  # refuses a folder into which others have saved meanwhile: their saves would go
            loop.save(self.path, extra={_KEY: {"metric": best.metric, "value": best.best}}, keep=1)

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        """Load the best save, if that is asked for."""
        best = self._improvement
        if error is not None or best.best is None or loop.is_interrupted:
            return
        assert self.path is not None
        words = f"best save: {best.words()}, in {self.path}"
        if self._load_at_end and best.best_step != loop.step:
            # Groups may have changed since that save, if the run went on from another one.
            load(self.path, RegroupedEngine(loop.engine), channel=loop.engine.channel)
            words += "; the model has its values now"
        loop.say(words)

    def _found(self, loop: TrainingLoop) -> dict[str, Any]:
        """The metric, the value and the step of the save at the path; empty where there is none."""
        purpose = "best save so far"
        with agreed(loop.engine.channel, purpose=purpose, only=0) as agreement:
            if loop.is_first:
                agreement.value = json.dumps(self._read()).encode()
        (found,) = understood(agreement.values[:1], _best_in, purpose=purpose)
        return found

    def _read(self) -> dict[str, Any]:
        assert self.path is not None
        if not listing_at(self.path).committed:
            return {}
        catalogue = look_into(self.path)
        if catalogue.extra.get(_KEY, {}).get("metric") != self._improvement.metric:
            raise ConfigError(
                f"BestSave: {self.path} holds other saves than the best by {self._improvement.metric!r}, which would "
                "go; give another path"
            )
        return {**catalogue.extra[_KEY], "step": catalogue.step}


def _best_in(answer: bytes) -> dict[str, Any]:
    found = a_table(answer)
    if found:
        of_form([found["value"], found["step"]], tuple[float, int])
    return found
