"""Callbacks that unfreeze layers during a run, where groups of optimizers have the masters of an engine.

`BaseFinetuning` names the parameters of groups, and takes out of what it adds what is in a group already. It looks for
parameters by identity and by value, and would find no master.
"""

from functools import partial
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn, optim

from shardwise.lightning.held_modules import StandIns


def name_groups(trainer: Any, module: Any, stand_ins: StandIns) -> None:
    """Let the callbacks of a run name the parameters in groups, before an engine puts its masters there."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for each in trainer.callbacks:
        if isinstance(each, BaseFinetuning):
            if each._restarting:  # with the groups of the run before
                BaseFinetuning.on_fit_start(each, trainer, module)
            for at, optimizer in enumerate(trainer.optimizers):
                groups = each._apply_mapping_to_param_groups(optimizer.param_groups, names)
                each._internal_optimizer_metadata[at] = groups
            stand_ins.put(each, unfreeze_and_add_param_group=partial(_unfreeze, each, names))


def _unfreeze(
    callback: Any,
    names: dict[nn.Parameter, str],
    modules: Any,
    optimizer: optim.Optimizer,
    lr: float | None = None,
    initial_denom_lr: float = 10.0,
    train_bn: bool = True,
) -> None:
    """In the place of the callback's own: what is in a group is known by name."""
    BaseFinetuning.make_trainable(modules)
    known = {
        name for groups in callback._internal_optimizer_metadata.values() for each in groups for name in each["params"]
    }
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
    added = [each for each in found if id(each) not in present and names.get(each) not in known]
    if added:
        rate = optimizer.param_groups[0]["lr"] if lr is None else float(lr)
        optimizer.add_param_group({"params": added, "lr": rate / (initial_denom_lr if lr is None else 1.0)})
