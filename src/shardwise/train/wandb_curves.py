"""The curves of a run in Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.runs.callbacks import Callback, EvaluationValues, StepMetrics, TrainingLoop


class Wandb(Callback):
    """Writes the figures of every update and evaluation to Weights & Biases, from rank 0.

    options: of `wandb.init`, such as project, name, group, tags, and mode="offline" for hosts without a network. A run
    that goes on continues the same record, unless options name an id. Curves have the step of the run as their axis.
    Raises ConfigError where wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._id: str | None = options.get("id")
        self._run: Any = None

    def on_begin(self, loop: TrainingLoop) -> None:
        """Open the record."""
        if not loop.is_first:
            return
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                'train.callbacks: Wandb needs the package wandb; pip install "shardwise[wandb]" brings it'
            ) from error
        given: dict[str, Any] = {"config": dict(loop.settings), "resume": "allow", **self._options, "id": self._id}
        if loop.folder is not None:
            given.setdefault("dir", str(loop.folder))
        self._run = wandb.init(**given)
        self._id = str(self._run.id)
        # By a count of its own, W&B would drop the points that a resumed run makes again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Add its points, where no update comes with them."""
        if self._run is not None and evaluation.step == 0:
            self._run.log({**evaluation.curves(), "step": 0})

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Add one point to each curve."""
        if self._run is not None:
            self._run.log({**metrics.curves(), "step": metrics.step})

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        """Close the record, as failed after an error."""
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)

    def state_dict(self) -> dict[str, Any]:
        """The id of the record."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that record."""
        self._id = self._id or state["id"]
