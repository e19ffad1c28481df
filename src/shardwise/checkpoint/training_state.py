"""Training state: what another program goes on from, out of a checkpoint: weights, moments, groups of the optimizer.

    here                              in a state dict of torch, as torch.distributed.checkpoint.state_dict has it
    w, optimizer/w/master             model.w                     the master, where there is one
    optimizer/w/exp_avg               optim.state.w.exp_avg
    settings: groups                  optim.param_groups.0.lr     and optim.param_groups.w.lr, for both of its forms
    step, extra                       step, extra

The second form is that of flatten_optimizer_state_dict=True. torchtitan has it alone, and the weights without a prefix:
w, optimizer.state.w.exp_avg, optimizer.param_groups.w.lr.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.contents import is_model_name
from shardwise.checkpoint.dcp_folders import DcpFolder, DcpObject, DcpTensor, plan_dcp
from shardwise.checkpoint.foreign.dcp_training import KeyPath
from shardwise.checkpoint.outputs import Outputs
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.names import split_state_name
from shardwise.plan.saved_settings import stored_optimizers, take_over


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictNames:
    """Where a program has the model and the optimizer in what it saves."""

    model: KeyPath
    optimizer: str
    nested: bool
    """Whether it has the optimizer as torch's state dicts are, besides the flattened form."""


TORCH_NAMES = StateDictNames(model=("model",), optimizer="optim", nested=True)
TITAN_NAMES = StateDictNames(model=(), optimizer="optimizer", nested=False)

_IMPLEMENTATION = MappingProxyType({"foreach": None, "capturable": False, "differentiable": False, "fused": None})
"""Settings of torch's groups that choose between implementations. Saves have none; torch's loaders ask for them."""


def groups_of_torch(settings: Mapping[str, Any], *, idle: bool = False) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """The groups of all optimizers, with the settings that torch's optimizers have: parameters and settings.

    idle: with parameters that have no state.

    Raises CheckpointError for settings that are not understood.
    """
    found = []
    for each in (group for optimizer in stored_optimizers(settings) for group in optimizer.groups):
        group: dict[str, Any] = dict(_IMPLEMENTATION)
        take_over(group, each.settings)
        found.append(((*each.parameters, *each.idle) if idle else each.parameters, group))
    return found


def check_owners(outputs: Outputs) -> None:
    """Raise CheckpointError for state of parameters that are not written, which no program could load."""
    split = filter(None, map(split_state_name, outputs.tensors))
    if lost := sorted({parameter for parameter, _ in split} - outputs.tensors.keys()):
        raise CheckpointError(
            f"the optimizer has state of {few_of(lost)}, and no tensor is called so, so that no program could load it. "
            "If these are numbers, load it into TorchState(model, optimizer), whose order tells them, save that, "
            "and convert the save. For the weights alone, convert to hf first (--to hf), and then that folder"
        )


def dcp_folder(outputs: Outputs, names: StateDictNames, *, max_file_bytes: int) -> DcpFolder:
    """The folder of `torch.distributed.checkpoint` with what is written of a checkpoint. Raises CheckpointError."""
    check_owners(outputs)
    ties: dict[str, list[str]] = {}
    for alias, name in outputs.aliases.items():
        ties.setdefault(name, []).append(alias)
    tensors = []
    for name, each in outputs.tensors.items():
        if (split := split_state_name(name)) is not None:
            paths: list[KeyPath] = [(names.optimizer, "state", *split)]
            if not names.nested:
                paths = [(names.optimizer, ".".join(("state", *split)))]
        elif is_model_name(name, outputs.contents.format):
            paths = [(*names.model, called) for called in (name, *ties.get(name, ()))]
        else:
            paths = [(name,)]
        tensors.append(DcpTensor(each.whole, tuple(paths)))
    return plan_dcp(tensors, list(_objects(outputs, names)), max_file_bytes=max_file_bytes)


def _objects(outputs: Outputs, names: StateDictNames) -> Iterator[DcpObject]:
    contents = outputs.contents
    groups = groups_of_torch(outputs.settings, idle=True)
    if not groups:
        # State that no settings belong to: a group of its names makes it an optimizer for readers.
        split = filter(None, map(split_state_name, outputs.tensors))
        trained = list(dict.fromkeys(parameter for parameter, _ in split))
        groups = [(tuple(trained), {})] if trained else []
    taken = set()
    for number, (parameters, settings) in enumerate(groups if names.nested else ()):
        for key, value in {**settings, "params": list(parameters)}.items():
            taken.add(f"{number}.{key}")
            yield DcpObject(value, (names.optimizer, "param_groups", number, key))
    for parameters, settings in groups:
        for name in parameters:
            for key, value in settings.items():
                # A parameter may be called "0".
                if f"{name}.{key}" not in taken:
                    yield DcpObject(value, (names.optimizer, f"param_groups.{name}.{key}"))
    if contents.step is not None:
        yield DcpObject(contents.step, ("step",))
    if contents.extra:
        yield DcpObject(dict(contents.extra), ("extra",))
