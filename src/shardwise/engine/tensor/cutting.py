"""From whole parameters to the portions that a rank along `tp` computes with."""

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, compare
from shardwise.comm.local_tensors import is_dtensor
from shardwise.engine.batches import Batch, LossOfModel
from shardwise.engine.inventory import Inventory
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.deciding import TensorDecision, decide
from shardwise.engine.tensor.movements import taken
from shardwise.errors import PlanError
from shardwise.plan import Plan
from shardwise.plan.tensor_matching import match_rules
from shardwise.plan.tensor_plan import TensorPlan
from shardwise.plan.tensor_rules import read_rule
from shardwise.space import Portion

NO_CUTS = TensorPlan(num_ranks=1)
"""Of a model that is whole on every rank."""


def agree_on_tensor_plan(
    model: nn.Module,
    plan: Plan,
    channel: Channel,
    *,
    given: Mapping[str, Portion],
    loss: LossOfModel,
    sample: Batch | None,
) -> TensorDecision:
    """Decide how the parameters of `model` are cut. Raises PlanError, the same on all ranks.

    given: what is cut already, because it came as DTensors. Their modules know what to do; nothing is planned then.
    loss, sample: of a model that carries no plan, "auto" infers one from a run on the sample.
    """
    if plan.mesh.tp == 1:
        _check_names(model, plan, channel)
        return TensorDecision(plan=NO_CUTS)
    decision = TensorDecision(plan=NO_CUTS)
    with agreed(channel, purpose="verdict on tensor parallelism"):
        rules = plan.tensor.rules
        if rules is not None and given:
            raise PlanError(
                f"tensor.rules: given for a model of which {len(given)} parameters are cut DTensors already, such as "
                f"{next(iter(given))!r}; leave the rules out, or give the model as it was built"
            )
        if rules is None and not given:
            raise PlanError(
                f"mesh.tp={plan.mesh.tp}: tensor.rules does not say what is cut over these ranks, and no parameter is "
                'a DTensor; give rules="auto" for a model that carries a plan, or {name: rule}'
            )
        if rules is not None:
            decision = decide(model, plan, loss=loss, sample=sample)
    compare(
        channel,
        decision.plan.text().splitlines(),
        subject="plans of tensor parallelism",
        hint="Build the same model on every rank, and give all samples of the same entries.",
    )
    return decision


def _check_names(model: nn.Module, plan: Plan, channel: Channel) -> None:
    """Rules that cut nothing over one rank mean something in the model all the same; raises PlanError."""
    rules = plan.tensor.rules
    if rules is None or rules == "auto":
        return
    # A plan that carries nothing may be asked for on one rank: it is the plan of all models then.
    named = {name: rule for name, rule in rules.items() if read_rule(rule).kind != "auto"}
    _, findings = match_rules(tensor_outline(model), named)
    with agreed(channel, purpose="verdict on tensor parallelism"):
        if findings:
            raise PlanError(*(f"tensor.rules: {finding}" for finding in findings))


def portion_of(tensor: torch.Tensor, portion: Portion) -> torch.Tensor:
    """The local tensor of a global one: a view where it is one range, else a copy."""
    return taken(tensor, portion.dim, portion.ranges)


@torch.no_grad()
def keep_portions(inventory: Inventory) -> None:
    """Leave each parameter with the portion that this rank has of it.

    What moves to a flat buffer is a view until it is copied there; the rest lets go of the whole at once. What has no
    values yet stays whole, for those who make them.
    """
    for spec in inventory.specs:
        parameter = inventory.parameters[spec.name]
        if spec.portion is not None and not parameter.is_meta and not is_dtensor(parameter):
            local = portion_of(parameter.detach(), spec.portion)
            parameter.grad = None
            parameter.data = local if spec.fused else local.contiguous().clone()
