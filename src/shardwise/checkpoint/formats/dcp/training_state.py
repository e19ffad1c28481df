"""Training state: what another program goes on from, out of a checkpoint: weights, moments, groups of the optimizer.

    here                              in a state dict of torch, as torch.distributed.checkpoint.state_dict has it
    w, optimizer/w/master             model.w                     the master, where there is one
    optimizer/w/exp_avg               optim.state.w.exp_avg
    settings: groups                  optim.param_groups.0.lr     and optim.param_groups.w.lr, for both of its forms
    step, extra                       step, extra

The second form is that of flatten_optimizer_state_dict=True. torchtitan has it alone, and the weights without a prefix:
w, optimizer.state.w.exp_avg, optimizer.param_groups.w.lr.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.checkpoint.contents import is_model_name
from shardwise.checkpoint.formats.dcp.training_names import KeyPath
from shardwise.checkpoint.formats.dcp.writing import DcpObject, DcpTensor, plan_dcp
from shardwise.checkpoint.formats.format import FolderPlan, FolderRequest
from shardwise.checkpoint.formats.optimizer_settings import check_owners, groups_of_torch
from shardwise.checkpoint.outputs import Outputs
from shardwise.plan.names import split_state_name


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictNames:
    """Where a program has the model and the optimizer in what it saves."""

    model: KeyPath
    optimizer: str
    nested: bool
    """Whether it has the optimizer as torch's state dicts are, besides the flattened form."""


TORCH_NAMES = StateDictNames(model=("model",), optimizer="optim", nested=True)
TITAN_NAMES = StateDictNames(model=(), optimizer="optimizer", nested=False)


def plan_folder(outputs: Outputs, request: FolderRequest, *, names: StateDictNames) -> FolderPlan:
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
    return plan_dcp(tensors, list(_objects(outputs, names)), max_file_bytes=request.max_file_bytes)


def _objects(outputs: Outputs, names: StateDictNames) -> Iterator[DcpObject]:
    contents = outputs.contents
    groups = groups_of_torch(outputs.contents.settings, idle=True)
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
