"""The stages of a model as one rank sees them: where every module, parameter and buffer belongs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.pipeline.staged_calls import PlacedModule
from shardwise.plan.stages import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """A placed model, and the rank of its pipeline that looks at it."""

    model: nn.Module
    placement: Placement
    rank: int
    device: torch.device
    units: Sequence[PlacedModule]
    """The placed modules."""
    modules: Mapping[nn.Module, int]
    """The stage of every module that is placed, or inside a placed one."""
    parameters: Mapping[int, tuple[int, str]]
    """Stage and name of every parameter object by id, its first place first."""
    buffers: Sequence[tuple[nn.Module, str, int, str]]
    """Module, key, stage and name of the buffers of placed modules; forwards put other tensors there."""
    buffers_of_all: Sequence[tuple[str, nn.Module, str]]
    """Name of the module, module and key of the buffers of modules that every rank runs."""

    @classmethod
    def of(cls, model: nn.Module, placement: Placement, channel: Channel) -> Self:
        """Look at a model before its modules get the forwards of their stages."""
        structures: dict[Any, int] = {}
        units = [
            PlacedModule(name, model.get_submodule(name), stage, structures)
            for name, stage in placement.modules.items()
        ]
        modules = {each: unit.stage for unit in units for each in unit.module.modules()}
        parameters: dict[int, tuple[int, str]] = {}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    stage = modules.get(module, placement.parameters.get(name))
                    if stage is not None:
                        parameters.setdefault(id(parameter), (stage, name))
        return cls(
            model=model,
            placement=placement,
            rank=channel.rank,
            device=channel.device,
            units=units,
            modules=modules,
            parameters=parameters,
            buffers=[
                (each, key, unit.stage, f"{unit.name}.{key}")
                for unit in units
                for each in unit.module.modules()
                for key, buffer in each._buffers.items()
                if buffer is not None
            ],
            buffers_of_all=[
                (repr(name) if name else "the model", each, key)
                for name, each in model.named_modules()
                for key in each._buffers
                if each not in modules
            ],
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.placement.num_ranks

    @property
    def num_chunks(self) -> int:
        """Stages of each rank."""
        return self.placement.num_stages // self.placement.num_ranks

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that has a stage."""
        return self.placement.rank_of(stage)

    def is_local(self, stage: int) -> bool:
        """Whether this rank has a stage."""
        return self.placement.rank_of(stage) == self.rank

    def place_of(self, parameter: nn.Parameter) -> tuple[int, str] | None:
        """Stage and name of a parameter; None for one that is not the model's."""
        return self.parameters.get(id(parameter))

    def placed_buffers(self) -> list[tuple[torch.Tensor, int, str]]:
        """The buffers of placed modules, as they are now."""
        found = ((each._buffers.get(key), stage, name) for each, key, stage, name in self.buffers)
        return [(buffer, stage, name) for buffer, stage, name in found if buffer is not None]

    def is_buffer_of_all(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer of a module that every rank runs."""
        return any(module._buffers.get(key) is tensor for _, module, key in self.buffers_of_all)
