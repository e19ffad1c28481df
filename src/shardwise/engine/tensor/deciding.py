"""How the parameters of a model are cut: by rules that are given, that it carries, or that a run of it allows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.engine.batches import Batch, LossOfModel, count_rows, split_batch
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.rehearsal import RehearsalError, rehearse
from shardwise.engine.tensor.rule_inference import infer_plan
from shardwise.engine.tensor.samples import sample_for
from shardwise.errors import PlanError
from shardwise.plan import Plan
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_plan import TensorPlan
from shardwise.plan.tensor_rules import read_rule


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDecision:
    """How a model is cut, and where that comes from."""

    plan: TensorPlan
    inferred: Mapping[str, str] = field(default_factory=dict)
    """The rules that "auto" inferred; they may be given as `tensor.rules` as they are."""
    left: Mapping[str, str] = field(default_factory=dict)
    """What "auto" left whole -> why."""

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
        return TensorDecision(plan=plan_tensor(outline, rules, num_ranks=num_ranks))
    call = _call(model, plan, loss, sample)
    inferred = infer_plan(model, outline, call, num_ranks=num_ranks)
    if rules == "auto":
        return TensorDecision(plan=inferred.plan, inferred=inferred.rules, left=inferred.left)
    mixed = plan_tensor(replace(outline, carried=inferred.rules), rules, num_ranks=num_ranks)
    try:
        rehearse(model, outline, mixed, call)
    except RehearsalError as wrong:
        raise PlanError(
            'tensor.rules: with these rules and what "auto" infers for the rest, '
            f"{wrong.module or 'the model itself'!r} computes something else: {wrong.why}; leave rules of yours out, "
            f"or give all of them. Inferred: {dict(inferred.rules)}"
        ) from wrong
    return TensorDecision(plan=mixed, inferred=inferred.rules, left=inferred.left)


def _call(model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch | None) -> Callable[[], Any]:
    tensors = [*model.parameters(), *model.buffers()]
    if any(each.is_meta for each in tensors):
        raise PlanError(
            'tensor.rules: "auto" asks for the plan that the model carries, and it carries none; to infer one, it is '
            "run, and it has no values (it is on the meta device). Build it with values, or give {name: rule}, "
            "as engine.tensor_decision.inferred shows them for a smaller model of this kind"
        )
    device = next((each.device for each in tensors), torch.device("cpu"))
    if sample is not None:
        part = split_batch(sample, min(plan.merge.microbatches, count_rows(sample)), device)[0]
        return lambda: loss(part)
    made = sample_for(model)
    if made is None:
        raise PlanError(
            'tensor.rules: "auto" asks for the plan that the model carries, and it carries none; to infer one, the '
            "model is run on a batch: give one, parallelize(..., sample=batch), or give {name: rule}"
        )
    return lambda: model(**made)
