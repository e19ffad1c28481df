"""What a stage of sharding holds where: the layout that is planned, and the buffers and gradients that follow it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from shardwise.comm import Channel
from shardwise.engine.counters import Counters
from shardwise.engine.inventory import Inventory
from shardwise.engine.pipeline.outline import outline_of
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.stage_parameters import StageParameters
from shardwise.engine.wrapping import wrap
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.grad_per_microbatch import GradPerMicrobatch
from shardwise.engine.zero.grad_per_update import GradPerUpdate
from shardwise.engine.zero.outside_reads import OutsideReads
from shardwise.engine.zero.sharded_params import ShardedParams
from shardwise.engine.zero.uneven_microbatches import Sharded
from shardwise.engine.zero.unit_calls import GatheredUnit
from shardwise.engine.zero.unshard import Unshard
from shardwise.engine.zero.unshard_hooks import UnshardHook
from shardwise.plan import Ownership, Placement, Plan, plan_ownership
from shardwise.plan.units import Units, plan_units


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where one rank's parameters and gradients are."""

    stage: int
    """As it is carried out: where there is one owner, nothing is cut."""
    ownership: Ownership
    units: Units
    """Of what is gathered by units (stage 3)."""
    late: frozenset[str]
    """Parameters whose gradients are complete only at the end of an update, because several stages use them."""
    stage_of: Mapping[str, int]
    """Stage of the pipeline whose backward finishes a parameter."""


def units_of(model: nn.Module, inventory: Inventory, plan: Plan, placement: Placement) -> Units:
    """The units of a whole model; none below stage 3. Raises PlanError for names that mean nothing."""
    if plan.sharding.stage < 3:
        return Units()
    first_names = {name: spec.name for spec in inventory.specs for name in (spec.name, *spec.aliases)}
    return plan_units(
        outline_of(model, asks="stage 3, which gathers the parameters of one block at a time,"),
        first_names=first_names,
        patterns=plan.sharding.units,
        placed=placement.modules if placement.num_stages > 1 else None,
    )


def plan_layout(
    inventory: Inventory, parameters: StageParameters, plan: Plan, units: Units, *, owners: Channel, replicas: Channel
) -> Layout:
    """The layout of what this rank owns. `inventory`: of that."""
    stage = plan.sharding.stage if owners.size > 1 else min(plan.sharding.stage, 1)
    late = frozenset(parameters.of_several_stages())
    here = {spec.name for spec in inventory.specs if spec.num_elements} - late
    held = _restricted(units, here) if stage == 3 else Units()
    labels: dict[str, str] = {}
    if stage >= 2:
        for spec in inventory.specs:
            labels[spec.name] = "several stages" if spec.name in late else f"stage {parameters.first_stage[spec.name]}"
        labels |= held.unit_of()
    ownership = plan_ownership(
        inventory.specs, plan.sharding, num_owners=owners.size, num_replicas=replicas.size, units=labels
    )
    return Layout(stage=stage, ownership=ownership, units=held, late=late, stage_of=parameters.first_stage)


def _restricted(units: Units, names: Collection[str]) -> Units:
    parts = [replace(unit, parameters=tuple(name for name in unit.parameters if name in names)) for unit in units.units]
    return Units(units=tuple(part for part in parts if part.parameters))


def make_buffers(
    layout: Layout, inventory: Inventory, owners: Channel, *, keep_shapes: bool, waiting: Collection[str] = ()
) -> FlatParams:
    """The working copies and masters of a layout."""
    if layout.stage < 3:
        return FlatParams(inventory, layout.ownership, owners, keep_shapes=keep_shapes, waiting=waiting)
    return ShardedParams(
        inventory,
        layout.ownership,
        owners,
        unit_of=layout.units.unit_of(),
        keep_shapes=keep_shapes,
        waiting=waiting,
    )


def make_gradients(
    layout: Layout, inventory: Inventory, plan: Plan, *, owners: Channel, replicas: Channel, counters: Counters
) -> GradPerUpdate | GradPerMicrobatch:
    """The gradients of a layout."""
    if layout.stage < 2:
        return GradPerUpdate(
            inventory.parameters,
            layout.ownership,
            plan.precision,
            owners=owners,
            replicas=replicas,
            counters=counters,
            late=layout.late,
        )
    return GradPerMicrobatch(
        inventory.parameters,
        layout.ownership,
        plan.precision,
        owners=owners,
        replicas=replicas,
        counters=counters,
        late=layout.late,
        stage_of=layout.stage_of,
        starts_when_complete=layout.stage == 2,
    )


def install_unshard_hooks(
    model: nn.Module,
    layout: Layout,
    inventory: Inventory,
    plan: Plan,
    buffers: FlatParams,
    gradients: GradPerUpdate | GradPerMicrobatch,
    *,
    owners: Channel,
    counters: Counters,
) -> Sharded | None:
    """What gathers and reduces around microbatches; under stage 3 it is put around the forwards of the model."""
    if not isinstance(gradients, GradPerMicrobatch):
        return None
    if not isinstance(buffers, ShardedParams):
        return gradients
    gathering = Unshard(
        buffers,
        gradients,
        layout.units.units,
        inventory.parameters,
        owners=owners,
        counters=counters,
        stage_of=layout.stage_of,
        keeps=plan.sharding.keep_gathered,
    )
    needed: dict[nn.Module, list[GatheredUnit]] = {}
    for unit in gathering.units:
        for name in unit.plan.modules:
            needed.setdefault(model.get_submodule(name), []).append(unit)
    for module, units in needed.items():
        if (place := _place_in(module, units)) is not None:
            wrap(module, UnshardHook(gathering, units, place))
    OutsideReads(gathering, buffers)
    return gathering


def number_microbatches(sharded: Sharded | None, runner: PipelineRunner) -> None:
    """Let calls be told apart by the microbatch that the schedule has them belong to."""
    if isinstance(sharded, Unshard):
        sharded.microbatch = lambda: -1 if runner.flow is None else runner.flow.number


def _place_in(module: nn.Module, units: list[GatheredUnit]) -> tuple[nn.Module, str, nn.Parameter] | None:
    """A place in the module that holds a parameter of the units."""
    members = {id(parameter) for unit in units for parameter, _, _ in unit.parameters}
    for each in module.modules():
        for key, parameter in each._parameters.items():
            if parameter is not None and id(parameter) in members:
                return each, key, parameter
    return None
