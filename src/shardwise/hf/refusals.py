"""What a class of trainers cannot replace under a plan: refused in words when it is made, with the way out."""

import inspect
from types import CodeType
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan import Plan

_TRAINING = {
    "training_step": "and leave forward, backward and scaling to it; compute_loss is yours",
    "get_batch_samples": "which counts items over the data ranks",
    "train": "which begins a run",
    "_inner_training_loop": "or give what happens around steps as a TrainerCallback",
    "_run_epoch": "or give what happens around steps as a TrainerCallback",
    "_prepare_for_training": "which puts the model under the plan",
    "_maybe_log_save_evaluate": "which brings in the losses of all ranks",
    "_clip_grad_norm": "or set --max_grad_norm: the engine clips",
    "_get_grad_norm": "or set --max_grad_norm: the engine clips",
    "create_accelerator_and_postprocess": "which reads the plan",
    "evaluation_loop": "or override prediction_step, or give compute_metrics",
    "_save": "which writes the model of all ranks",
    "_save_checkpoint": "which gives a checkpoint its name when it is complete",
    "_save_optimizer_and_scheduler": "which saves what each rank owns",
    "_load_optimizer_and_scheduler": "which loads what each rank owns",
    "_load_from_checkpoint": "which loads what each rank owns",
    "_load_best_model": "which loads what each rank owns",
}
"""Methods that a subclass may extend, but not replace, and what to do about it."""


def check_overrides(trainer: type, last: type) -> None:
    """Raise ConfigError for methods of the classes before `last` that take the place of what the engine needs."""
    problems = []
    for each in trainer.__mro__[: trainer.__mro__.index(last)]:
        for name, instead in _TRAINING.items():
            own = vars(each).get(name)
            code = _code_of(own)
            named = set() if code is None else _names_in(code)
            # A method may name itself for another reason, as `train` does that calls model.train().
            asks_above = named & {"super", *(kind.__name__ for kind in each.__mro__[1:])}
            if code is not None and not (name in named and asks_above):
                problems.append(
                    f"{each.__name__}.{name} does not call super().{name}: nothing would train under a plan. Call it, "
                    f"{instead}"
                )
    if problems:
        raise ConfigError(*problems)


def generates(trainer: type, last: type) -> bool:
    """Whether a class before `last` generates while it prepares inputs."""
    for each in trainer.__mro__[: trainer.__mro__.index(last)]:
        seen: set[str] = set()
        ahead = {"_prepare_inputs"}
        while ahead:
            seen |= ahead
            codes = [_code_of(vars(each).get(name)) for name in ahead]
            ahead = {name for code in codes if code is not None for name in _names_in(code)} - seen
        if "_prepare_inputs" in vars(each) and "generate" in seen:
            return True
    return False


_OTHER_GENERATORS = {
    "use_vllm": "vLLM would be given this rank's parts of the weights",
    "use_transformers_continuous_batching": "generate_batch of the model would compute with this rank's parts",
}


def check_generation(trainer: Any, plan: Plan) -> None:
    """Raise ConfigError for what a trainer that generates what it trains on cannot do on the ranks of a plan."""
    name = type(trainer).__name__
    problems = []
    has_turns = getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None)
    if has_turns and (plan.mesh.pp > 1 or plan.mesh.tp > 1 or plan.sharding.stage == 3):
        problems.append(
            f"{name} with tools or environments under mesh.pp = {plan.mesh.pp}, mesh.tp = {plan.mesh.tp} and "
            f"sharding.stage = {plan.sharding.stage}: ranks would generate unlike numbers of turns. Use mesh.pp = 1, "
            "mesh.tp = 1 and a stage below 3"
        )
    for field, why in _OTHER_GENERATORS.items():
        if getattr(trainer.args, field, False):
            problems.append(
                f"{field} on {plan.mesh.size} ranks: {why}. Leave it out, and {name} generates by engine.generate with "
                "the live weights"
            )
    if problems:
        raise ConfigError(*problems)


def _code_of(method: Any) -> CodeType | None:
    # Of the method, where a decorator wraps it.
    return getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None


def _names_in(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names_in(each)
    return found
