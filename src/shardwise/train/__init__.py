"""The trainer: a configuration in, a trained model's metrics and pictures out. The only room that joins the others.

Names are loaded when first used: reading a configuration needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.runs.callbacks import Callback, EvaluationValues, Position, StepMetrics, TrainingLoop
    from shardwise.runs.recorded_runs import recorded
    from shardwise.train.best_save import BestSave
    from shardwise.train.config import RunConfig, read_config
    from shardwise.train.early_stopping import EarlyStopping
    from shardwise.train.rank import run
    from shardwise.train.references import check_references
    from shardwise.train.run_build import device_of
    from shardwise.train.wandb_curves import Wandb

_MODULE_OF = {
    "BestSave": "train.best_save",
    "Callback": "runs.callbacks",
    "EarlyStopping": "train.early_stopping",
    "EvaluationValues": "runs.callbacks",
    "TrainingLoop": "runs.callbacks",
    "Position": "runs.callbacks",
    "RunConfig": "train.config",
    "StepMetrics": "runs.callbacks",
    "Wandb": "train.wandb_curves",
    "check_references": "train.references",
    "device_of": "train.run_build",
    "read_config": "train.config",
    "recorded": "runs.recorded_runs",
    "run": "train.rank",
}

__all__ = [
    "BestSave",
    "Callback",
    "EarlyStopping",
    "EvaluationValues",
    "Position",
    "RunConfig",
    "StepMetrics",
    "TrainingLoop",
    "Wandb",
    "check_references",
    "device_of",
    "read_config",
    "recorded",
    "run",
]


# Hidden from type checkers: a name that is not there would be an object to them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'shardwise.train' has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(f"shardwise.{_MODULE_OF[name]}"), name)
