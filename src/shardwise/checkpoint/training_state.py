"""Training state: what another program goes on from, out of a checkpoint: weights, moments, groups of the optimizer.

    here                              in a state dict of torch, as torch.distributed.checkpoint.state_dict has it
    w, optimizer/w/master             model.w                     the master, where there is one
    optimizer/w/exp_avg               optim.state.w.exp_avg
    settings: groups                  optim.param_groups.0.lr     and optim.param_groups.w.lr, for both of its forms
    step, extra                       step, extra

The second form is that of flatten_optimizer_state_dict=True.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.contents import is_model_name
from shardwise.checkpoint.dcp_folders import DcpFolder, DcpObject, DcpTensor, plan_dcp
from shardwise.checkpoint.foreign.dcp_training import KeyPath
from shardwise.checkpoint.outputs import Outputs
from shardwise.plan.names import split_state_name
from shardwise.plan.saved_settings import stored_optimizers, take_over

__all__ = ["dcp_folder", "groups_of_torch"]

_MODEL, _OPTIMIZER = "model", "optim"

_IMPLEMENTATION = MappingProxyType({"foreach": None, "capturable": False, "differentiable": False, "fused": None})
"""Settings of torch's groups that choose between implementations. Saves have none; torch's loaders ask for them."""


def groups_of_torch(settings: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """The groups of all optimizers, with the settings that torch's optimizers have: parameters and settings.

    Raises CheckpointError for settings that are not understood.
    """
    found = []
    for each in (group for optimizer in stored_optimizers(settings) for group in optimizer.groups):
        group: dict[str, Any] = dict(_IMPLEMENTATION)
        take_over(group, each.settings)
        found.append((each.parameters, group))
    return found


def dcp_folder(outputs: Outputs, *, max_file_bytes: int) -> DcpFolder:
    """The folder of `torch.distributed.checkpoint` with what is written of a checkpoint. Raises CheckpointError."""
    ties: dict[str, list[str]] = {}
    for alias, name in outputs.aliases.items():
        ties.setdefault(name, []).append(alias)
    tensors = [
        DcpTensor(each.whole, tuple(_paths(name, ties.get(name, ()), outputs.contents.format)))
        for name, each in outputs.tensors.items()
    ]
    return plan_dcp(tensors, list(_objects(outputs)), max_file_bytes=max_file_bytes)


def _paths(name: str, ties: Sequence[str], format_: str) -> Iterator[KeyPath]:
    if (split := split_state_name(name)) is not None:
        yield _OPTIMIZER, "state", *split
    elif is_model_name(name, format_):
        yield from ((_MODEL, each) for each in (name, *ties))
    else:
        yield (name,)


def _objects(outputs: Outputs) -> Iterator[DcpObject]:
    contents = outputs.contents
    taken = set()
    groups = groups_of_torch(outputs.settings)
    for number, (parameters, settings) in enumerate(groups):
        for key, value in {**settings, "params": list(parameters)}.items():
            taken.add(f"{number}.{key}")
            yield DcpObject(value, (_OPTIMIZER, "param_groups", number, key))
    for parameters, settings in groups:
        for name in parameters:
            for key, value in settings.items():
                if f"{name}.{key}" not in taken:
                    yield DcpObject(value, (_OPTIMIZER, f"param_groups.{name}.{key}"))
    if contents.step is not None:
        yield DcpObject(contents.step, ("step",))
    if contents.extra:
        yield DcpObject(dict(contents.extra), ("extra",))
