"""The decision how the parameters of a model are cut over the ranks along `tp`, and what it leaves each rank with.

    rules given           plan_tensor
    "auto"                the plan that the model carries; for a model without one, `auto` infers it
    both, {"*": "auto"}   what is given beats the rest, and the mixture is rehearsed

Every rank decides for itself from the same model and compares the plan with the others. Then `keep_portions` takes the
whole parameters away, and each rank holds its portions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, compare
from shardwise.engine.forward.batches import Batch, LossOfModel, first_microbatch
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.tp_collectives import taken
from shardwise.errors import PlanError
from shardwise.plan import Plan
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_matching import match_rules
from shardwise.plan.tensor_plan import TensorPlan
from shardwise.plan.tensor_rules import read_rule
from shardwise.space import Portion

NO_CUTS = TensorPlan(num_ranks=1)
"""Of a model that is whole on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDecision:
    """How a model is cut, and where that comes from."""

    plan: TensorPlan
    inferred: Mapping[str, str] = field(default_factory=dict)
    """The rules that "auto" inferred; they may be given as `tensor.rules` as they are."""
    left: Mapping[str, str] = field(default_factory=dict)
    """What "auto" left whole, and modules whose adapters cannot be cut as a rule says -> why."""

    def text(self) -> str:
        """What "auto" inferred and what it left whole, a line each; "" where it inferred nothing."""
        lines = [f"{name}: {rule}" for name, rule in self.inferred.items()]
        return "\n".join([*lines, *(f"{name}: whole, {why}" for name, why in self.left.items())])


def decide(model: nn.Module, plan: Plan, *, loss: LossOfModel, sample: Batch | None) -> TensorDecision:
    """How `plan.tensor.rules` cut `model`, which is as it was built. Raises PlanError.

    loss, sample: what a model that carries no plan is run on; None: inputs that its configuration says it takes.
    """
    rules = plan.tensor.rules
    assert rules is not None
    outline = tensor_outline(model)
    num_ranks = plan.mesh.tp
    is_automatic = rules == "auto" or any(read_rule(rule).kind == "auto" for rule in rules.values())
    if outline.carried or not is_automatic:
        plan_of_rules = plan_tensor(outline, rules, num_ranks=num_ranks)
        return TensorDecision(plan=plan_of_rules, left=plan_of_rules.left)
    from shardwise.engine.tensor.auto.rule_inference import infer_plan

    found, inferred, left = infer_plan(model, outline, rules, _call(model, plan, loss, sample), num_ranks=num_ranks)
    return TensorDecision(plan=found, inferred=inferred, left={**left, **found.left})


def _call(model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch | None) -> Callable[[], Any]:
    tensors = [*model.parameters(), *model.buffers()]
    if any(each.is_meta for each in tensors):
        raise PlanError(
            'tensor.rules: "auto" takes the plan that the model carries, and it carries none. To infer one shardwise '
            "runs it, but it has no values (it is on the meta device). Build it with values, or give {name: rule}, "
            "as engine.tensor_decision.inferred shows them for a smaller model of this kind"
        )
    device = next((each.device for each in tensors), torch.device("cpu"))
    if sample is not None:
        part = first_microbatch(sample, plan, device, loss.rows)
        return lambda: loss(part)
    from shardwise.engine.samples import sample_for

    made = sample_for(model)
    if made is None:
        raise PlanError(
            'tensor.rules: "auto" takes the plan that the model carries, and it carries none. To infer one shardwise '
            "runs the model on a batch: give parallelize(..., sample=batch), or {name: rule}"
        )
    return lambda: model(**made)


def agree_on_tensor_plan(
    model: nn.Module,
    plan: Plan,
    channel: Channel,
    *,
    loss: LossOfModel,
    sample: Batch | None,
) -> TensorDecision:
    """Decide how the parameters of `model` are cut. Raises PlanError, the same on all ranks.

    loss, sample: of a model that carries no plan, "auto" infers one from a run on the sample.
    """
    if plan.mesh.tp == 1:
        _check_names(model, plan, channel)
        return TensorDecision(plan=NO_CUTS)
    with agreed(channel, purpose="verdict on tensor parallelism"):
        rules = plan.tensor.rules
        if rules is None:
            raise PlanError(
                f"mesh.tp={plan.mesh.tp}: tensor.rules cuts nothing over these ranks. "
                'Give rules="auto" for a model that carries a plan, or {name: rule}'
            )
        decision = decide(model, plan, loss=loss, sample=sample)
    # The plans themselves, not the verdicts alone: under "auto" a sample with other entries may infer other rules on
    # one rank, and its collectives would match those of no other.
    compare(
        channel,
        decision.plan.text().splitlines(),
        subject="plans of tensor parallelism",
        hint="Build the same model on every rank, and give all samples of the same entries.",
    )
    return decision


def _check_names(model: nn.Module, plan: Plan, channel: Channel) -> None:
    """Raise PlanError for rules that name nothing in the model: one rank cuts nothing, and a wrong name is wrong."""
    rules = plan.tensor.rules
    if rules is None or rules == "auto":
        return
    # "auto" is no name of a module. A model that carries no plan is right under it on one rank.
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

    Parameters on the meta device stay whole: their initial values are made whole, and cut then.
    """
    for spec in inventory.specs:
        parameter = inventory.parameters[spec.name]
        if spec.portion is not None and not parameter.is_meta:
            local = portion_of(parameter.detach(), spec.portion)
            # A gradient from before would have the shape of the whole.
            parameter.grad = None
            # A fused parameter is copied to its flat buffer next, and a view is enough until then. Others keep this
            # tensor for good: a view would keep the memory of the whole.
            # A graph that the program still holds has the old shape. Another dtype lets autograd forget that.
            other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
            parameter.data = torch.empty(0, dtype=other, device=parameter.device)
            parameter.data = local if spec.fused else local.contiguous().clone()
