"""Which parameters are whose under a placement, and how a rank lets go of what is not its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import Inventory, named_places
from shardwise.engine.meta_init import with_values
from shardwise.plan import Parameter, Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class StageParameters:
    """Every parameter of a model, and the stages that compute with it; ties are one parameter."""

    placement: Placement
    stages: Mapping[str, tuple[int, ...]]
    """Name -> the stages in whose modules it lies, from the first to the last."""
    first_stage: Mapping[str, int]
    """Name -> the stage where it lies by that name; the rank of that stage owns it."""

    def owner(self, name: str) -> int:
        """The coordinate along `pp` of the rank that updates a parameter."""
        return self.placement.rank_of(self.first_stage[name])

    def users(self, name: str) -> dict[int, int]:
        """The coordinates along `pp` of the ranks that compute with it -> the last of their stages that does."""
        return {self.placement.rank_of(stage): stage for stage in self.stages[name]}

    def owned_by(self, coordinate: int) -> list[str]:
        """What the rank at `coordinate` updates, in the order of the model."""
        return [name for name in self.stages if self.owner(name) == coordinate]

    def held_by(self, coordinate: int) -> set[str]:
        """What the rank at `coordinate` computes with."""
        return {name for name in self.stages if coordinate in self.users(name)}

    def of_several_stages(self) -> set[str]:
        """What gets its gradient in parts, from the backwards of several stages."""
        return {name for name, stages in self.stages.items() if len(stages) > 1}


def assign_parameters(model: nn.Module, inventory: Inventory, placement: Placement) -> StageParameters:
    """Find the stages of every parameter, by the modules that hold it."""
    stages_of = stages_of_modules(model, placement)
    found: dict[str, list[int]] = {spec.name: [] for spec in inventory.specs}
    for module, _, place, parameter in named_places(model):
        name = inventory.name_of[parameter]
        if module in stages_of:
            found[name] += stages_of[module]
        elif place in placement.parameters:
            found[name].append(placement.parameters[place])
    assert all(found.values()), "a placement has a stage for every parameter"
    return StageParameters(
        placement=placement,
        stages={name: tuple(sorted(set(stages))) for name, stages in found.items()},
        first_stage={name: stages[0] for name, stages in found.items()},
    )


def stages_of_modules(model: nn.Module, placement: Placement) -> dict[nn.Module, list[int]]:
    """Every module that is placed or inside a placed one, and its stages: several where stages share it."""
    stages_of: dict[nn.Module, list[int]] = {}
    for name, stage in placement.modules.items():
        for module in model.get_submodule(name).modules():
            stages = stages_of.setdefault(module, [])
            if stage not in stages:
                stages.append(stage)
    return stages_of


@torch.no_grad()
def drop_foreign(
    model: nn.Module, inventory: Inventory, parameters: StageParameters, coordinate: int
) -> list[tuple[nn.Module, str]]:
    """Put tensors without memory in the place of parameters and buffers that the rank at `coordinate` has no use for.

    Ties stay ties. Buffers outside of placed modules stay, for the code between modules runs on every rank.
    Returns every place of a buffer that stays: (module, attribute).
    """
    held = parameters.held_by(coordinate)
    spec_of = {spec.name: spec for spec in inventory.specs}
    empty: dict[str, nn.Parameter] = {}
    for module, attribute, name in inventory.places:
        if name not in held:
            if name not in empty:
                empty[name] = _without_memory(inventory.parameters[name], spec_of[name])
            setattr(module, attribute, empty[name])  # not register_parameter: recurrent modules keep lists of theirs
    placement = parameters.placement
    foreign: list[tuple[nn.Module, str, torch.Tensor]] = []
    local: dict[tuple[nn.Module, str], torch.Tensor] = {}
    stages_of = stages_of_modules(model, placement)
    for module in model.modules():
        stages = stages_of.get(module)
        is_local = stages is None or any(placement.rank_of(stage) == coordinate for stage in stages)
        for attribute, buffer in module.named_buffers(recurse=False):
            if is_local:
                local[module, attribute] = buffer
            else:
                foreign.append((module, attribute, buffer))
    without_memory: dict[torch.Tensor, torch.Tensor] = {}
    kept = set(local.values())
    for module, attribute, buffer in foreign:
        if buffer in kept:
            local[module, attribute] = buffer
        else:
            module._buffers[attribute] = without_memory.setdefault(buffer, torch.empty_like(buffer, device="meta"))
    return list(local)


def move_to(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)`, but for what has no memory."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(not tensor.is_meta and tensor.device != device for tensor in tensors):
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _without_memory(parameter: nn.Parameter, spec: Parameter) -> nn.Parameter:
    """A parameter as the ranks that compute with it have it, with what the user noted on it."""
    dtype = torch_dtype(spec.working)
    if spec.fused or spec.portion is not None:
        return with_values(parameter, torch.empty(spec.shape, device="meta", dtype=dtype))
    return with_values(parameter, torch.empty_like(parameter, device="meta", dtype=dtype))  # with its own strides
