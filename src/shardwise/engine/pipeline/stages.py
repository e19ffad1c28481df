"""The modules, parameters and buffers of each stage, and how a rank drops those of other stages.

`StageParameters` says of every parameter of the whole model which ranks compute with it and which one owns it. It is
known before anything is dropped, alike on all ranks. `Stages` is a rank's view of the placed model, for its forwards.

    head.weight is embed.weight; embed on stage 0, head on stage 3, two ranks with stages 0 2 and 1 3
    stages       (0, 3)        the stages whose modules hold it
    first_stage  0             by its first name: the rank of stage 0 owns it
    users        {0: 0, 1: 3}  rank along pp -> the last of its stages that computes with it

All ranks agree on a placement first: a pure function (`plan.stages.place`) of the tree of modules, their work, and the
order of their first calls.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, json_as, understood
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.forward.aside import items_set
from shardwise.engine.forward.batches import Batch, LossOfModel, first_microbatch
from shardwise.engine.forward.inventory import Inventory, exchange, named_places, take_over, with_values
from shardwise.engine.forward.outline import outline_of
from shardwise.engine.forward.trial_runs import count_work
from shardwise.engine.parameter_kinds import is_shell
from shardwise.engine.pipeline.staged_calls import PlacedModule
from shardwise.engine.torch_private import change_tensors, storage_of
from shardwise.errors import PlanError
from shardwise.plan import Parameter, Placement, Plan
from shardwise.plan.stages import place


class Stages:
    """A placed model, and the rank of its pipeline that looks at it."""

    def __init__(self, model: nn.Module, placement: Placement, channel: Channel) -> None:
        """Look at a model before its modules get the forwards of their stages."""
        self.model, self.placement = model, placement
        self.rank, self.device = channel.rank, channel.device
        structures: dict[Any, int] = {}
        self.units = [
            PlacedModule(name, model.get_submodule(name), stage, structures)
            for name, stage in placement.modules.items()
        ]
        """The placed modules."""
        self.modules = {each: unit.stage for unit in self.units for each in unit.module.modules()}
        """The stage of every module that is placed, or inside a placed one."""
        self._parameters: dict[int, tuple[int, str]] = {}
        """Stage and name of every parameter object by id, its first place first."""
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    stage = self.modules.get(module, placement.parameters.get(name))
                    if stage is not None:
                        # By id: operations between modules are given the object. Its first name is the owner's.
                        self._parameters.setdefault(id(parameter), (stage, name))
        self.ranks_of_stages = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        """The rank of each stage: asked for with every call."""
        self._buffers = [
            (each, key, unit.stage, f"{unit.name}.{key}")
            for unit in self.units
            for each in unit.module.modules()
            for key, buffer in each._buffers.items()
            if buffer is not None
        ]
        """Module, key, stage and name of the buffers of placed modules; forwards put other tensors there."""
        self.buffers_of_all = [
            (repr(name) if name else "the model", each, key)
            for name, each in model.named_modules()
            for key in each._buffers
            if each not in self.modules
        ]
        """Name of the module, module and key of the buffers of modules that every rank runs."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.placement.num_ranks

    @property
    def num_chunks(self) -> int:
        """Stages of each rank."""
        return self.placement.num_stages // self.placement.num_ranks

    @property
    def last_local(self) -> int:
        """The last stage of this rank."""
        return self.placement.num_stages - self.num_ranks + self.rank

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that has a stage."""
        return self.ranks_of_stages[stage]

    def is_local(self, stage: int) -> bool:
        """Whether this rank has a stage."""
        return self.ranks_of_stages[stage] == self.rank

    def place_of(self, tensor: torch.Tensor) -> tuple[int, str] | None:
        """Stage and name of a parameter; None for what is no parameter of the model."""
        return self._parameters.get(id(tensor))

    def stage_in(self, module: nn.Module, held: torch.Tensor | None) -> int | None:
        """The stage of a parameter or buffer that a module holds; None where all ranks have it."""
        if held is None:
            return None
        place = self._parameters.get(id(held))
        return self.modules.get(module, None if place is None else place[0])

    def placed_buffers(self) -> list[tuple[torch.Tensor, int, str]]:
        """The buffers of placed modules, as they are now."""
        found = ((each._buffers.get(key), stage, name) for each, key, stage, name in self._buffers)
        return [(buffer, stage, name) for buffer, stage, name in found if buffer is not None]

    def of_storages(self) -> dict[int, set[int]]:
        """The stages of all parameters and buffers that have one, by `storage_of`."""
        found: dict[int, set[int]] = {}
        tensors = [
            (tensor, unit.stage)
            for unit in self.units
            for tensor in (*unit.module.parameters(), *unit.module.buffers())
        ]
        tensors += [(self.model.get_parameter(name), stage) for name, stage in self.placement.parameters.items()]
        for tensor, stage in tensors:
            found.setdefault(storage_of(tensor), set()).add(stage)
        return found

    def is_buffer_of_all(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer of a module that every rank runs."""
        return any(module._buffers.get(key) is tensor for _, module, key in self.buffers_of_all)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageParameters:
    """Every parameter of a model, and the stages that compute with it; ties are one parameter."""

    placement: Placement
    stages: Mapping[str, tuple[int, ...]]
    """Name -> the stages whose modules hold it, from the first to the last."""
    first_stage: Mapping[str, int]
    """Name -> the stage that holds it by that name; the rank of that stage owns it."""

    def owner(self, name: str) -> int:
        """The coordinate along `pp` of the rank that updates a parameter."""
        return self.placement.rank_of(self.first_stage[name])

    def users(self, name: str) -> dict[int, int]:
        """The coordinates along `pp` of the ranks that compute with it -> the last of their stages that does."""
        return {self.placement.rank_of(stage): stage for stage in self.stages[name]}

    def owned_by(self, coordinate: int) -> list[str]:
        """The parameters that the rank at `coordinate` updates, in the order of the model."""
        return [name for name in self.stages if self.owner(name) == coordinate]

    def held_by(self, coordinate: int) -> set[str]:
        """The parameters that the rank at `coordinate` computes with."""
        return {name for name in self.stages if coordinate in self.users(name)}

    def of_several_stages(self) -> set[str]:
        """The parameters that get gradients from the backwards of several stages."""
        return {name for name, stages in self.stages.items() if len(stages) > 1}


def assign_parameters(model: nn.Module, inventory: Inventory, placement: Placement) -> StageParameters:
    """Find the stages of every parameter, by the modules that hold it."""
    stages_of = stages_of_modules(model, placement)
    found: dict[str, list[int]] = {spec.name: [] for spec in inventory.specs}
    for module, _, at, parameter in named_places(model):
        for name in inventory.names_at(at, parameter):
            if module in stages_of:
                found[name] += stages_of[module]
            elif at in placement.parameters:
                found[name].append(placement.parameters[at])
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
    model: nn.Module,
    inventory: Inventory,
    parameters: StageParameters,
    coordinate: int,
    *,
    keeps_objects: bool,
) -> list[tuple[nn.Module, str]]:
    """Put tensors without memory in the place of parameters and buffers that the rank at `coordinate` has no use for.

    Ties stay ties. Buffers outside of placed modules stay, for the code between modules runs on every rank.
    keeps_objects: parameters stay the objects that they are, where torch lets them.
    Returns every place of a buffer that stays: (module, attribute).
    """
    held = parameters.held_by(coordinate)
    spec_of = {spec.name: spec for spec in inventory.specs}
    empty: dict[str, nn.Parameter] = {}
    for module, attribute, name in inventory.places:
        if name not in held:
            if name not in empty:
                parameter = inventory.parameters[name]
                made = _without_memory(parameter, spec_of[name])
                empty[name] = take_over(parameter, made) if keeps_objects else made
            setattr(module, attribute, empty[name])  # not register_parameter: recurrent modules keep lists of theirs
    for name, tensor in inventory.carried().items():
        if name not in held:
            exchange(tensor, _without_memory(tensor, spec_of[name]))
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
    # A buffer that a local module shares with a module of another stage stays in both, as the one tensor that it is.
    kept = set(local.values())
    for module, attribute, buffer in foreign:
        if buffer in kept:
            local[module, attribute] = buffer
        else:
            module._buffers[attribute] = without_memory.setdefault(buffer, torch.empty_like(buffer, device="meta"))
    return list(local)


def move_to(model: nn.Module, device: torch.device, *, but: Collection[nn.Parameter] = ()) -> None:
    """`model.to(device)`, without the tensors that have no memory, and without the parameters in `but`."""
    left = {id(each) for each in but}
    for each in but:
        each.grad = None  # from before: it would move without its parameter
    tensors = [each for each in (*model.parameters(), *model.buffers()) if id(each) not in left and not is_shell(each)]
    if any(not tensor.is_meta and tensor.device != device for tensor in tensors):
        # Through `_apply`, in which modules move what they hold otherwise. Shells follow what is inside of them.
        with items_set(
            (module._parameters, key, None)
            for module in model.modules()
            for key, each in module._parameters.items()
            if each is not None and is_shell(each)
        ):
            change_tensors(model, lambda tensor: tensor if tensor.is_meta or id(tensor) in left else tensor.to(device))


def _without_memory(parameter: nn.Parameter, spec: Parameter) -> nn.Parameter:
    """A parameter as the ranks that compute with it have it, with the attributes that the user set on it."""
    dtype = torch_dtype(spec.working)
    if spec.fused or spec.portion is not None:
        return with_values(parameter, torch.empty(spec.shape, device="meta", dtype=dtype))
    return with_values(parameter, torch.empty_like(parameter, device="meta", dtype=dtype))  # with its own strides


WHOLE = Placement(num_ranks=1, num_stages=1, modules={"": 0}, parameters={})
"""Of a model that is not cut."""


def agree_on_placement(
    model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch | None, channel: Channel
) -> Placement:
    """Place the modules of `model`, in the order in which `sample` runs through them where there is one.

    Where work decides, it is what rank 0 counts or measures on the sample.

    Raises PlanError, the same on all ranks.
    """
    if plan.mesh.pp * plan.pipeline.num_chunks == 1:
        return WHOLE
    purpose = "work of modules"
    with agreed(channel, purpose=purpose) as counted:
        measured: Any = [None, None]
        if plan.pipeline.stages is None:
            if sample is None and plan.pipeline.balance != "parameters":
                raise PlanError(
                    f"pipeline.balance: {plan.pipeline.balance!r} asked, which runs the model on a batch; give one: "
                    'parallelize(..., sample=batch), or balance by "parameters"'
                )
            if sample is not None and channel.rank == 0:
                measured = _measure(model, plan, loss, sample)
        counted.value = json.dumps(measured).encode()
    # Times differ from rank to rank: those of rank 0 hold.
    form = json_as(tuple[dict[str, float] | None, list[str] | None])
    ((work, order),) = understood(counted.values[:1], form, purpose=purpose)
    with agreed(channel, purpose="verdict on the placement"):
        return place(outline_of(model), plan.pipeline, num_ranks=plan.mesh.pp, work=work, order=order)


def _measure(
    model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch
) -> tuple[dict[str, float] | None, list[str]]:
    """Work and order of the modules, on one microbatch of the sample, on the device where the model was built."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    part = first_microbatch(sample, plan, device, loss.rows)
    balance = plan.pipeline.balance
    work, order = count_work(model, lambda: loss(part), kind="flops" if balance == "parameters" else balance)
    return None if balance == "parameters" else work, order
