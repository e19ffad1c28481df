"""Settings of DeepSpeed in the words of torch: groups of optimizers, and the scale of losses.

DeepSpeed does not save the class of the optimizer. It follows from the settings of the groups, and from the `type` in
the configuration, which the files have. Its own Adams (FusedAdam, DeepSpeedCPUAdam) compute what torch's do.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.foreign.torch_files import UnknownObject
from shardwise.plan.saved_settings import settings_to_json

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


def loss_scale_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the settings for the dynamic scale of losses; none where the scale is fixed."""
    scaler = optimizer.get("loss_scaler")
    state = scaler.state if isinstance(scaler, UnknownObject) else optimizer
    if not (isinstance(state, Mapping) and (optimizer.get("dynamic_loss_scale") is True)):
        return {}
    scale, window = state.get("cur_scale"), state.get("scale_window")
    at, last = state.get("cur_iter"), state.get("last_overflow_iter")
    if not (isinstance(scale, int | float) and scale > 0 and type(at) is type(last) is type(window) is int):
        return {}
    return {"loss_scale": {"scale": float(scale), "in_a_row": max(0, at - last - 1) % max(1, window)}}
