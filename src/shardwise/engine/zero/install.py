"""What a sharding stage holds where: the layout that is planned, and the buffers and gradients that follow it.

stage   parameters                           gradients (`GradReduce`)   around microbatches (`Passes`)
0, 1    WholeBucket                          added before reduction     nothing
2       WholeBucket                          added after it             the same object: reduces in each
3       ShardedBucket; ties between stages   added after it             Unshard: gathers units too
        of the pipeline: WholeBucket
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from shardwise.comm import Channel
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.forward.layers import wrap
from shardwise.engine.forward.outline import outline_of
from shardwise.engine.forward.passes import Passes
from shardwise.engine.forward.transforms import see_transformations
from shardwise.engine.parameter_kinds import inner_by_path
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.grad_buffers import HostGradients
from shardwise.engine.zero.reduce import GradReduce, SmallGradients
from shardwise.engine.zero.unshard import GatheredUnit, Unshard
from shardwise.engine.zero.unshard_hooks import OutsideReads, UnshardHook
from shardwise.plan import OwnedLayout, Placement, Plan, plan_ownership
from shardwise.plan.units import Unit, plan_units, unit_of


def units_of(model: nn.Module, inventory: Inventory, plan: Plan, placement: Placement) -> tuple[Unit, ...]:
    """The units of a whole model; none below stage 3. Raises PlanError for names that mean nothing."""
    if plan.sharding.stage < 3:
        return ()
    first_names = {name: spec.name for spec in inventory.specs for name in (spec.name, *spec.aliases)}
    # A packed weight is a parameter of its module by the name of its place; what it is made of follows.
    first_names |= {place: each[0] for place, each in inventory.found_at.items()}
    units = plan_units(
        outline_of(model, asks="stage 3, which gathers the parameters of one block at a time,"),
        first_names=first_names,
        patterns=plan.sharding.units,
        placed=placement.modules if placement.num_stages > 1 else None,
    )
    belonging = {names[0]: names for names in inventory.found_at.values()}
    return tuple(
        replace(unit, parameters=tuple(each for name in unit.parameters for each in belonging.get(name, (name,))))
        for unit in units
    )


def plan_layout(
    inventory: Inventory,
    plan: Plan,
    units: Sequence[Unit],
    *,
    late: frozenset[str],
    stage_of: Mapping[str, int],
    owners: Channel,
    replicas: Channel,
    work: Mapping[str, int] | None = None,
    num_homes: int = 1,
) -> OwnedLayout:
    """The layout of what this rank owns. `inventory`: of that.

    late: what gets gradients from several stages of the pipeline. stage_of: the stage that owns each parameter. work,
    num_homes: see `plan_ownership`.
    """
    # Alone, an owner has all gradients and parameters anyway: stages 2 and 3 would only add copies and gathers. But not
    # where the parameters are on the host, from which units are gathered.
    is_offloaded = plan.sharding.offload == "parameters" and owners.device.type != "cpu"
    stage = plan.sharding.stage if owners.size > 1 or is_offloaded else min(plan.sharding.stage, 1)
    # A tie between stages of the pipeline stays whole: `StageTies` moves its values, and its gradient is complete only
    # at the end of the update.
    here = {spec.name for spec in inventory.specs if spec.num_elements} - late
    held = _restricted(units, here) if stage == 3 else ()
    # Buckets hold parameters of one label only. What is reduced per microbatch goes with the backward of one stage of
    # the pipeline: a bucket over two stages would be complete in neither.
    labels: dict[str, str] = {}
    if stage >= 2:
        for spec in inventory.specs:
            labels[spec.name] = "several stages" if spec.name in late else f"stage {stage_of[spec.name]}"
        labels |= unit_of(held)
    ownership = plan_ownership(
        inventory.specs,
        plan.sharding,
        num_owners=owners.size,
        num_replicas=replicas.size,
        units=labels,
        work=work,
        num_homes=num_homes,
    )
    return OwnedLayout(stage=stage, ownership=ownership, units=held, late=late, stage_of=stage_of)


def _restricted(units: Sequence[Unit], names: Collection[str]) -> tuple[Unit, ...]:
    parts = [replace(unit, parameters=tuple(name for name in unit.parameters if name in names)) for unit in units]
    return tuple(part for part in parts if part.parameters)


def install(
    model: nn.Module,
    layout: OwnedLayout,
    inventory: Inventory,
    plan: Plan,
    params: FlatParams,
    *,
    replicas: Channel,
    counters: Counters,
    microbatch: Callable[[], int],
    taker: HostGradients | None = None,
) -> tuple[GradReduce, Passes]:
    """How gradients are reduced, and what data ranks do around microbatches: chosen here, once, by the stage.

    microbatch: gives the one that this rank works on, where a schedule mixes several. taker: gets the owned part of
        each bucket as soon as it is reduced.
    """
    gradients = GradReduce(
        inventory.parameters,
        layout,
        plan.precision,
        owners=params.owners,
        replicas=replicas,
        counters=counters,
        taker=taker,
    )
    if layout.stage < 3:
        return gradients, gradients if gradients.moves_in_step else SmallGradients(gradients)
    unshard = Unshard(
        params,
        gradients,
        layout.units,
        inventory.parameters,
        counters=counters,
        stage_of=layout.stage_of,
        keeps=plan.sharding.keep_gathered,
        microbatch=microbatch,
    )
    # A tie: several modules need one unit, which is gathered around each; and one module may need several.
    needed: dict[nn.Module, list[GatheredUnit]] = {}
    for unit in unshard.units:
        for name in unit.plan.modules:
            needed.setdefault(model.get_submodule(name), []).append(unit)
    for module, units in needed.items():
        if (place := _place_in(module, units)) is not None:
            wrap(module, UnshardHook(unshard, units, place))
    see_transformations()
    OutsideReads(unshard, params)  # the parameters keep it, as their reader
    return gradients, unshard


def _place_in(module: nn.Module, units: list[GatheredUnit]) -> tuple[nn.Module, str, nn.Parameter] | None:
    """A place in the module that holds a parameter of the units."""
    members = {id(parameter) for unit in units for parameter, _, _ in unit.parameters}
    for each in module.modules():
        for key, parameter in each._parameters.items():
            if parameter is not None and not members.isdisjoint(
                map(id, (parameter, *inner_by_path(parameter).values()))
            ):
                return each, key, parameter
    return None
