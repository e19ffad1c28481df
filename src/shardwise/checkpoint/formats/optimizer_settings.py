"""Settings of optimizers of other programs in the words of torch, and of ours in theirs: groups.

DeepSpeed and Megatron do not save the class of the optimizer. It follows from the settings of the groups, and from the
`type` in the configuration, which the files have. DeepSpeed's own Adams compute what torch's do.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.outputs import Outputs
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.names import split_state_name
from shardwise.plan.saved_settings import settings_to_json, stored_optimizers, take_over
from shardwise.space import Piece

_OWN_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "bias_correction"})
_AS_TORCH: Mapping[str, Any] = MappingProxyType({"amsgrad": False, "maximize": False})
"""What torch's Adam has in its groups, and DeepSpeed's does not know."""


def optimizer_settings(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a save for the optimizer with these groups: see `plan.saved_settings`.

    names: the parameters of each group. config: the configuration of DeepSpeed.
    """
    kind = _kind(groups, config)
    return {
        "kind": kind,
        "groups": [
            {"parameters": list(held), "settings": settings_to_json(_as_torch(group, kind))}
            for group, held in zip(groups, names, strict=True)
        ],
        "plain": {},
        "none": {},
    }


def _kind(groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str:
    """The class of torch that has these groups; "" where nothing says it."""
    for decoupled, kind in ((True, "AdamW"), (False, "Adam")):
        if groups and all(group.get("decoupled_weight_decay") is decoupled for group in groups):
            return kind
    if all(_is_own_adam(group) or _is_older_adam(group) for group in groups):
        chosen = config.get("optimizer")
        chosen = chosen if isinstance(chosen, Mapping) else {}
        # torch before 2.7 did not note which of its two Adams it was. Without decay they are one.
        decays = any(group["weight_decay"] for group in groups)
        if not chosen and decays and not all(_is_own_adam(group) for group in groups):
            return ""
        parameters = chosen.get("params")
        # An "Adam" of DeepSpeed decays as AdamW does unless it is told otherwise.
        is_plain = isinstance(parameters, Mapping) and parameters.get("adam_w_mode") is False
        return "Adam" if is_plain and str(chosen.get("type")).lower() == "adam" else "AdamW"
    return ""


def _is_own_adam(group: Mapping[str, Any]) -> bool:
    return group.keys() >= _OWN_ADAM and group["bias_correction"] is True


def _is_older_adam(group: Mapping[str, Any]) -> bool:
    return group.keys() >= {"betas", "eps", "weight_decay", "amsgrad"} and "bias_correction" not in group


def _as_torch(group: Mapping[str, Any], kind: str) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key != "params"}
    # Without the correction it is no optimizer of torch; the setting stays, and a load says that it does not fit.
    if kind and (_is_own_adam(group) or _is_older_adam(group)):
        settings.pop("bias_correction", None)
        return {**_AS_TORCH, "decoupled_weight_decay": kind == "AdamW", **settings}
    return settings


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


def trained_names(outputs: Outputs) -> list[str]:
    """The parameters that have state of an optimizer."""
    split = filter(None, map(split_state_name, outputs.tensors))
    return list(dict.fromkeys(parameter for parameter, _ in split))


def counts_of(outputs: Outputs) -> list[Piece]:
    """How often parameters were updated: a number for each."""
    splits = ((each, split_state_name(name)) for name, each in outputs.tensors.items())
    return [each.whole for each, split in splits if split is not None and split[1] == "step"]


def check_owners(outputs: Outputs) -> None:
    """Raise CheckpointError for state of parameters that are not written, which no program could load."""
    if lost := sorted({*trained_names(outputs)} - outputs.tensors.keys()):
        raise CheckpointError(
            f"the optimizer has state of {few_of(lost)}, and no tensor is called so, so that no program could load it. "
            "If these are numbers, load it into TorchState(model, optimizer), whose order tells them, save that, "
            "and convert the save. For the weights alone, convert to hf first (--to hf), and then that folder"
        )
