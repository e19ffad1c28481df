"""shardwise: write the single-process program once, run it under any layout, get the same numbers.

Names are loaded when first used, so that planning needs neither torch nor processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise import checkpoint

    # From their modules: type checkers take `room.parallelize` for the module of that name.
    from shardwise.checkpoint import Replicas, full, load, save, stream
    from shardwise.comm import Channel, Recorded, default_channel, simulate
    from shardwise.comm.process.world import processes
    from shardwise.data import Data
    from shardwise.engine import Engine, EvaluationReport, StepReport
    from shardwise.engine.adapters import load_adapters, save_adapters
    from shardwise.engine.engine import full_state_dict
    from shardwise.engine.parallelize import parallelize
    from shardwise.engine.relayout import relayout
    from shardwise.engine.tensor.vocabulary import VocabularyCrossEntropy
    from shardwise.errors import ShardwiseError
    from shardwise.moving import exchange, reshard, reshard_tensor
    from shardwise.plan import Activations, Average, Merge, Pipeline, Plan, Precision, Sharding, Tensor
    from shardwise.rewrite import Rewrite
    from shardwise.runs.preemption import Preemption
    from shardwise.space import Mesh, Piece
    from shardwise.train.merged_folders import save_merged
    from shardwise.verification.verifier import verify, verify_program

__version__ = "0.1.0"

_ROOM_OF = {
    "Activations": "plan",
    "Average": "plan",
    "Channel": "comm",
    "Data": "data",
    "Engine": "engine",
    "EvaluationReport": "engine",
    "Merge": "plan",
    "Mesh": "space",
    "Piece": "space",
    "Pipeline": "plan",
    "Plan": "plan",
    "Precision": "plan",
    "Preemption": "runs.preemption",
    "Recorded": "comm",
    "Replicas": "checkpoint",
    "Rewrite": "rewrite",
    "Sharding": "plan",
    "ShardwiseError": "errors",
    "StepReport": "engine",
    "Tensor": "plan",
    "VocabularyCrossEntropy": "engine.tensor.vocabulary",
    "default_channel": "comm",
    "exchange": "moving",
    "full": "checkpoint",
    "full_state_dict": "engine.engine",
    "load": "checkpoint",
    "load_adapters": "engine.adapters",
    "parallelize": "engine",
    "processes": "comm",
    "relayout": "engine",
    "reshard": "moving",
    "reshard_tensor": "moving",
    "save": "checkpoint",
    "save_adapters": "engine.adapters",
    "save_merged": "train.merged_folders",
    "simulate": "comm",
    "stream": "checkpoint",
    "verify": "verification.verifier",
    "verify_program": "verification.verifier",
}

_ROOMS = ("checkpoint",)
"""Rooms that are used by their own name: `shardwise.checkpoint.open(path)`."""

__all__ = [
    "Activations",
    "Average",
    "Channel",
    "Data",
    "Engine",
    "EvaluationReport",
    "Merge",
    "Mesh",
    "Piece",
    "Pipeline",
    "Plan",
    "Precision",
    "Preemption",
    "Recorded",
    "Replicas",
    "Rewrite",
    "Sharding",
    "ShardwiseError",
    "StepReport",
    "Tensor",
    "VocabularyCrossEntropy",
    "__version__",
    "checkpoint",
    "default_channel",
    "exchange",
    "full",
    "full_state_dict",
    "load",
    "load_adapters",
    "parallelize",
    "processes",
    "relayout",
    "reshard",
    "reshard_tensor",
    "save",
    "save_adapters",
    "save_merged",
    "simulate",
    "stream",
    "verify",
    "verify_program",
]


# Hidden from type checkers: a name that is not there would be an object to them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _ROOMS:
            return import_module(f"shardwise.{name}")
        if name not in _ROOM_OF:
            raise AttributeError(f"module 'shardwise' has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(f"shardwise.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
