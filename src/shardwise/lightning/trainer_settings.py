"""What a Trainer, its callbacks and a module ask for that goes into a plan, or that an engine cannot do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from shardwise.errors import PlanError
from shardwise.plan import Plan

_OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks between the forward and the update, which an engine runs in one call."""

_COPIES = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
"""Callbacks of Lightning that keep a copy of the module."""


def plan_for(trainer: Any, module: Any, plan: Plan) -> Plan:
    """The plan with the Trainer's clip. Raises PlanError with all that an engine does not do."""
    problems = []
    for each in (module, *trainer.callbacks):
        parent = Callback if isinstance(each, Callback) else None
        hooks = _OF_GRADIENTS if parent else (*_OF_GRADIENTS, "configure_gradient_clipping", "backward")
        problems += [
            f"{type(each).__name__}.{hook} would find no gradients: an engine runs forward, backward, clip and update "
            "in one call. Read trainer.strategy.report in on_train_batch_end (report.grad_norm); clip by "
            "gradient_clip_val or the plan"
            for hook in hooks
            if is_overridden(hook, each, parent=parent)
        ]
        if any(kind.__name__ in _COPIES for kind in type(each).__mro__):
            problems.append(
                f"{type(each).__name__} copies the module, which ranks hold in parts: give "
                "Plan(average=sw.Average(...)), the table [average] in TOML"
            )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        problems.append("training_step(dataloader_iter) takes its batches itself; take (batch, batch_idx)")
    if plan.pipeline.num_chunks > 1 and not module.automatic_optimization:
        problems.append(
            "manual optimisation stops inside of forwards. Stages of a rank cannot take turns then; give it one: "
            "Pipeline(schedule='1f1b'), pipeline.schedule in TOML"
        )
    if trainer.strategy._layer_sync is not None:
        problems.append(
            "Trainer(sync_batchnorm=True) sums statistics over a process group: leave it out, and give a model of "
            "SyncBatchNorm layers (torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        problems.append(
            "Trainer(precision='16-mixed') scales losses itself: leave it out, and give Plan(precision=sw.Precision("
            "compute='float16', loss_scale='dynamic')), precision.loss_scale in TOML"
        )
    if (value := trainer.gradient_clip_val) and not module.automatic_optimization:
        problems.append("gradient_clip_val is for automatic optimisation; give Plan(clip_grad_norm=...)")
    elif value:
        name = clip_setting(trainer.gradient_clip_algorithm)
        if getattr(plan, name) not in (None, float(value)):
            problems.append(f"gradient_clip_val={value} and Plan({name}={getattr(plan, name)}) differ; give one")
        else:
            plan = replace(plan, **{name: float(value)})  # type: ignore[arg-type]
    if problems:
        raise PlanError(*problems)
    return plan


def clip_setting(algorithm: Any) -> str:
    """The setting of a plan that clips by Lightning's algorithm: "norm" or "value"; None: by norm."""
    return "clip_grad_value" if str(getattr(algorithm, "value", algorithm)) == "value" else "clip_grad_norm"


def check_clip(plan: Plan, value: float | None, algorithm: Any, *, group: str, is_alone: bool) -> None:
    """Raise PlanError for a `clip_gradients` of a program that the plan does not do.

    group: the name of the optimizer's parameters. is_alone: whether no others are updated with them.
    """
    name = clip_setting(algorithm)
    found: Any = getattr(plan, name)
    given: Any = value
    if name == "clip_grad_norm" and (isinstance(found, Mapping) or not is_alone):
        # By a norm of their own, not by that of all that are updated together.
        found, given = found.get(group) if isinstance(found, Mapping) else None, {group: value}
    if value and found != value:
        raise PlanError(
            f"clip_gradients(opt, {value}) would clip nothing: the gradients are inside of the engine's step. Give "
            f"Plan({name}={given}), {name} in TOML; this call then stays as it is"
        )
