"""The end of a loop whose evaluations no longer improve, and the rule by which one is better than another."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from shardwise.errors import ConfigError
from shardwise.runs.callbacks import Callback, EvaluationValues, TrainingLoop

Mode = Literal["min", "max"]


class Improvement:
    """The best value of one figure of evaluations so far.

    metric: "loss", or another name of the evaluations. mode: whether the smallest or the largest is best. min_delta: a
    value has to be better by more than this. Raises ConfigError for what makes no sense.
    """

    def __init__(self, who: str, metric: str, mode: Mode, min_delta: float) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f'{who}: mode is {mode!r}; give "min" or "max"')
        if not (isinstance(min_delta, float | int) and 0 <= min_delta < math.inf):
            raise ConfigError(f"{who}: min_delta is {min_delta!r}; give a number, 0 or more")
        self.metric = metric
        self.best: float | None = None
        self.best_step = 0
        self._who = who
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta

    def is_new(self, evaluation: EvaluationValues) -> bool:
        """Whether this evaluation is the best so far, which is then noted; one that is not a number never is."""
        value = evaluation.value(self.metric, self._who)
        if not math.isfinite(value):
            return False
        if self.best is not None and not self._sign * (self.best - value) > self._min_delta:
            return False
        self.best, self.best_step = value, evaluation.step
        return True

    def words(self) -> str:
        """The best value and its step."""
        return (
            f"no finite {self.metric}"
            if self.best is None
            else f"{self.metric} {self.best:.6g} at step {self.best_step}"
        )


class EarlyStopping(Callback):
    """Ends the loop where so many evaluations in a row were no better than the best before them.

    metric: "loss", or a metric of the evaluations. patience: evaluations in a row. min_delta: by how much a better one
    is better. mode: "min" or "max". A run that goes on has the count of its save.

    All ranks stop after the step behind the evaluation. Raises ConfigError for a metric that evaluations do not have.
    """

    def __init__(self, metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0, mode: Mode = "min") -> None:
        if type(patience) is not int or patience < 1:
            raise ConfigError(f"EarlyStopping: patience is {patience!r}; give a number of evaluations, 1 or more")
        self.patience = patience
        self.num_worse = 0
        """Evaluations since the best one."""
        self._improvement = Improvement("EarlyStopping", metric, mode, min_delta)

    def on_begin(self, loop: TrainingLoop) -> None:
        """A run that had ended has nothing left to do, unless it has more patience now."""
        self._judge(loop)

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Count."""
        self.num_worse = 0 if self._improvement.is_new(evaluation) else self.num_worse + 1
        self._judge(loop)

    def state_dict(self) -> dict[str, Any]:
        """The count, and the best value."""
        best = self._improvement
        return {"metric": best.metric, "num_worse": self.num_worse, "best": best.best, "best_step": best.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting, if it is the same metric."""
        best = self._improvement
        if state["metric"] == best.metric:
            self.num_worse, best.best, best.best_step = state["num_worse"], state["best"], state["best_step"]

    def _judge(self, loop: TrainingLoop) -> None:
        if self.num_worse >= self.patience:
            best = self._improvement
            loop.stop(f"{best.metric} has not improved in {self.num_worse} evaluations; the best was {best.words()}")
