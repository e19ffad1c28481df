"""The trainer: a configuration in, a trained model's metrics and pictures out. The only room that joins the others.

Names are loaded when first used: reading a configuration needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.train.best_save import BestSave
    from shardwise.train.callbacks import Callback, EvaluationValues, Position, StepMetrics, TrainingLoop
    from shardwise.train.config import RunConfig, read_config
    from shardwise.train.early_stopping import EarlyStopping
    from shardwise.train.rank import run
    from shardwise.train.references import check_references
    from shardwise.train.run_build import device_of
    from shardwise.train.wandb_curves import Wandb

_MODULE_OF = {
    "BestSave": "best_save",
    "Callback": "callbacks",
    "EarlyStopping": "early_stopping",
    "EvaluationValues": "callbacks",
    "TrainingLoop": "callbacks",
    "Position": "callbacks",
    "RunConfig": "config",
    "StepMetrics": "callbacks",
    "Wandb": "wandb_curves",
    "check_references": "references",
    "device_of": "run_build",
    "read_config": "config",
    "run": "rank",
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
    "run",
]


# Hidden from type checkers: a name that is not there would be an object to them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'shardwise.train' has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(f"shardwise.train.{_MODULE_OF[name]}"), name)
