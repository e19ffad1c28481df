"""What a stage of sharding holds where: the layout that is planned, and the buffers and gradients that follow it."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.comm import Channel
from shardwise.engine.counters import Counters
from shardwise.engine.gradient_runs import GradientRuns
from shardwise.engine.gradients import Gradients
from shardwise.engine.inventory import Inventory
from shardwise.engine.pipeline.stage_parameters import StageParameters
from shardwise.plan import Ownership, Placement, Plan, plan_ownership


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where one rank's parameters and gradients are."""

    stage: int
    """As it is carried out: where there is one owner, nothing is cut."""
    ownership: Ownership
    late: frozenset[str]
    """Parameters whose gradients are complete only at the end of an update, because several stages use them."""
    stage_of: Mapping[str, int]
    """Stage of the pipeline whose backward finishes a parameter."""


def plan_layout(
    inventory: Inventory, parameters: StageParameters, plan: Plan, *, owners: Channel, replicas: Channel
) -> Layout:
    """The layout of what this rank owns. `inventory`: of that."""
    stage = plan.sharding.stage if owners.size > 1 else min(plan.sharding.stage, 1)
    late = frozenset(parameters.of_several_stages())
    units: dict[str, str] = {}
    if stage >= 2:
        for spec in inventory.specs:
            units[spec.name] = (
                "several stages" if spec.name in late else f"stage {parameters.first_stage[spec.name]}"
            )
    ownership = plan_ownership(
        inventory.specs, plan.sharding, num_owners=owners.size, num_replicas=replicas.size, units=units
    )
    return Layout(stage=stage, ownership=ownership, late=late, stage_of=parameters.first_stage)


def make_gradients(
    layout: Layout, inventory: Inventory, plan: Plan, *, owners: Channel, replicas: Channel, counters: Counters
) -> Gradients | GradientRuns:
    """The gradients of a layout."""
    if layout.stage < 2:
        return Gradients(
            inventory.parameters,
            layout.ownership,
            plan.precision,
            owners=owners,
            replicas=replicas,
            counters=counters,
            late=layout.late,
        )
    return GradientRuns(
        inventory.parameters,
        layout.ownership,
        plan.precision,
        owners=owners,
        replicas=replicas,
        counters=counters,
        late=layout.late,
        stage_of=layout.stage_of,
    )
