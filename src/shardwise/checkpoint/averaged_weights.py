"""Averaged weights: the model of a checkpoint with the averages that a run has kept of its weights.

stored                                            here
w                           bfloat16              w    float32, the elements of its average
optimizer/w/weight_average  float32               -
optimizer/w/master          float32               -
optimizer/w/exp_avg, ..     and their settings    -    they belong to other weights
optimizer/v/master          float32               the same: v is frozen, and has no average
"""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.outputs import model_of
from shardwise.errors import CheckpointError
from shardwise.plan.names import AVERAGE, MASTER, split_state_name
from shardwise.plan.saved_settings import OF_RUNS


def with_averages(contents: Contents) -> tuple[Contents, Mapping[str, str]]:
    """The model, with averages where there are some; and the dtypes that those weights are stored in, by name.

    Raises CheckpointError for a checkpoint without averages.
    """
    splits = {name: split_state_name(name) for name in contents.tensors}
    average_of = {split[0]: name for name, split in splits.items() if split is not None and split[1] == AVERAGE}
    if not average_of:
        raise CheckpointError(
            f"{contents.location} has no averages of weights, for which weights='average' (--weights average) asks. A "
            "run keeps and saves them with average=sw.Average(...) in its plan, average.decay in TOML"
        )
    model = model_of(contents)
    tensors = {
        name: contents.tensors[average_of[name]].renamed(name) if name in average_of else each
        for name, each in contents.tensors.items()
        if name in model.tensors or ((split := splits[name]) and split[1] == MASTER and split[0] not in average_of)
    }
    settings = {key: each for key, each in contents.settings.items() if key not in OF_RUNS}
    dtypes = {name: model.tensors[name].dtype for name in average_of if name in model.tensors}
    return replace(model, tensors=tensors, settings=settings), dtypes
