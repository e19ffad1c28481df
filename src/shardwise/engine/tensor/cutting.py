"""From whole parameters to the portions that a rank along `tp` computes with."""

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import agree, compare
from shardwise.engine.inventory import Inventory
from shardwise.engine.tensor.outline import tensor_outline
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.plan.tensor import TensorPlan, plan_tensor
from shardwise.space import Portion

NO_CUTS = TensorPlan(num_ranks=1)
"""Of a model that is whole on every rank."""


def agree_on_tensor_plan(model: nn.Module, plan: Plan, channel: Channel) -> TensorPlan:
    """Plan how the parameters of `model` are cut. Raises PlanError, the same on all ranks."""
    if plan.mesh.tp == 1:
        return NO_CUTS
    refusal: ShardwiseError | None = None
    tensor_plan = NO_CUTS
    try:
        assert plan.tensor.rules is not None, "a plan with ranks along tp has rules"
        outline, _ = tensor_outline(model)
        tensor_plan = plan_tensor(outline, plan.tensor.rules, num_ranks=plan.mesh.tp)
    except ShardwiseError as error:
        refusal = error
    agree(channel, refusal, purpose="verdict on tensor parallelism")
    compare(
        channel,
        tensor_plan.text().splitlines(),
        subject="plans of tensor parallelism",
        hint="Build the same model on every rank.",
    )
    return tensor_plan


def portion_of(tensor: torch.Tensor, portion: Portion) -> torch.Tensor:
    """The local tensor of a global one: a view where it is one range, else a copy."""
    parts = [tensor.narrow(portion.dim, start, stop - start) for start, stop in portion.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=portion.dim)


@torch.no_grad()
def keep_portions(inventory: Inventory) -> None:
    """Leave each parameter with the portion that this rank has of it.

    What moves to a flat buffer is a view until it is copied there; the rest lets go of the whole at once.
    """
    for spec in inventory.specs:
        if spec.portion is not None:
            parameter = inventory.parameters[spec.name]
            local = portion_of(parameter.detach(), spec.portion)
            parameter.grad = None
            parameter.data = local if spec.fused else local.contiguous().clone()
