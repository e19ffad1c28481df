"""The optimizer of Megatron: `common.pt` has its groups; which parameters they have, and what they are for torch's.

    {"optimizer": {"param_groups": [{"lr": 0.1, "wd_mult": 1.0, ...}, ...]}}                      distributed
    {"optimizer": {"param_groups": [...], "state": {"common_step": T}}, "fp32_from_fp16_params"}  in 16 bits
    {0: one of the above, 1: one of the above}                                                    chained

The files do not say which parameters a group has. Megatron makes groups by rules, and so does this: biases and
parameters of one dim are those without decay (`wd_mult`), and experts those of `is_expert_parallel`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpoint.formats.found_tensors import number_at
from shardwise.checkpoint.formats.optimizer_settings import optimizer_settings
from shardwise.checkpoint.formats.strided import TensorPlace
from shardwise.checkpoint.formats.torch_files.saved_values import UnknownObject
from shardwise.checkpoint.stores import OpenFile

_OWN = frozenset(
    {
        *("params", "step", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config"),
        *("max_lr", "min_lr", "start_wd", "end_wd"),
    }
)
"""Keys of the groups of the optimizer that Megatron's schedule of learning rates reads, and no optimizer."""
_EXPERT = re.compile(r".*\.experts\..*", re.DOTALL)
_ENDS = re.compile(r"(?:.*\.)?(?:word_embeddings|output_layer)\.weight", re.DOTALL)
_QK_NORM = re.compile(r".*\.[qk]_layernorm\..*", re.DOTALL)
_PLAIN_ADAM = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOptimizer:
    """What `common.pt` says of the optimizer."""

    groups: Sequence[Mapping[str, Any]]
    step: float | None
    """How often it was updated; None where it does not count."""
    scale: Mapping[str, Any]
    """The entry of the settings for the dynamic scale of losses."""
    arguments: Mapping[str, Any]
    """Those that the training was started with."""

    @classmethod
    def of(cls, common: Mapping[Any, Any], arguments: Mapping[str, Any], opened: OpenFile) -> "MegatronOptimizer":
        """Of the values of `common.pt`, which is open: counts may be tensors in it."""
        groups: list[Mapping[str, Any]] = []
        steps: list[float] = []
        scale: dict[str, Any] = {}
        for each in _inner(common.get("optimizer")):
            held = each.get("optimizer") if isinstance(each.get("optimizer"), dict) else each
            listed = held.get("param_groups") if isinstance(held, dict) else None
            mine = [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
            state = held.get("state") if isinstance(held, dict) else None
            counted = [state.get("common_step")] if isinstance(state, dict) else []
            counted += [group.get("step") for group in mine]
            steps += [count for count in (number_at(opened, value) for value in counted) if count is not None]
            groups += mine
            scale = scale or _scale_of(each.get("grad_scaler"), opened)
        return cls(groups=groups, step=max(steps, default=None), scale=scale, arguments=arguments)

    def settings(self, shapes: Mapping[str, tuple[int, ...]], notes: list[str]) -> dict[str, Any] | None:
        """The entry of the settings of a save, for the trained parameters; None where no rule says their groups."""
        if not self.groups or not shapes:
            return None
        names = self._members(shapes)
        if names is None:
            notes.append(
                f"the settings of the optimizer are left out. The files do not say which parameters each of its "
                f"{len(self.groups)} groups has, and no rule of Megatron leads to them"
            )
            return None
        if len(self.groups) > 1:
            notes.append(
                "the files do not say which parameters each group of the optimizer has. Taken is the rule of "
                "Megatron: biases and parameters of one dim have no decay (wd_mult 0)"
            )
        used = [(group, members) for group, members in zip(self.groups, names, strict=True) if members]
        groups = [{key: value for key, value in group.items() if key not in _OWN} for group, _ in used]
        config = _PLAIN_ADAM if self.arguments.get("decoupled_weight_decay") is False else {}
        return optimizer_settings(groups, [members for _, members in used], config)

    def _members(self, shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]] | None:
        """The parameters of each group."""
        made: list[list[str]] = [[] for _ in self.groups]
        keys = [_key(group) for group in self.groups]
        for name, shape in shapes.items():
            decayed = is_decayed(name, shape)
            if self.arguments.get("apply_wd_to_qk_layernorm") is True and _QK_NORM.fullmatch(name):
                decayed = True
            traits = (decayed, _EXPERT.fullmatch(name) is not None, _ENDS.fullmatch(name) is not None)
            # A trait that no group has does not count: experts are in the groups of all, unless ranks divide them.
            wanted = tuple(
                trait if len({key[at] for key in keys}) > 1 else keys[0][at] for at, trait in enumerate(traits)
            )
            fitting = [number for number, key in enumerate(keys) if key == wanted]
            if len(fitting) != 1:
                return None
            made[fitting[0]].append(name)
        return made


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Whether Megatron decays a parameter, by its rule."""
    return len(shape) != 1 and not name.endswith(".bias")


def group_of_megatron(settings: Mapping[str, Any], *, decayed: bool) -> dict[str, Any]:
    """The settings of a group of torch's optimizer, with what Megatron looks for in its groups."""
    own = {"wd_mult": 1.0 if decayed else 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {**settings, "bias_correction": True, "default_config": True, **own}


def _key(group: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """What tells the groups of Megatron apart: with decay, of experts, of embeddings with their own learning rate."""
    decoupled = group.get("is_decoupled_lr") is True
    return group.get("wd_mult", 1.0) != 0.0, group.get("is_expert_parallel") is True, decoupled


def _inner(optimizer: object) -> Iterator[Mapping[Any, Any]]:
    """The optimizers of a chain, or the one there is."""
    if not isinstance(optimizer, dict):
        return
    chained = [each for key, each in optimizer.items() if isinstance(key, int) and isinstance(each, dict)]
    yield from chained or [optimizer]


def _scale_of(scaler: object, opened: OpenFile) -> dict[str, Any]:
    """The entry of the settings for the scale of losses, of what Megatron's DynamicGradScaler saves."""
    if not isinstance(scaler, dict) or not isinstance(place := scaler.get("scale"), TensorPlace):
        return {}
    scale = number_at(opened, replace(place, shape=(), strides=())) if place.shape in ((), (1,)) else None
    tracker = scaler.get("growth_tracker")
    return {"loss_scale": {"scale": scale, "in_a_row": tracker}} if scale and type(tracker) is int else {}


def arguments_of(common: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The arguments that the training was started with, of a file that has them."""
    args = common.get("args")
    state = args.state if isinstance(args, UnknownObject) else args
    return state if isinstance(state, dict) else {}
