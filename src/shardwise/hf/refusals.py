"""What a class of trainers cannot replace under a plan: refused in words when it is made, with the way out."""

import inspect
from types import CodeType
from typing import Any

from shardwise.errors import ConfigError

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
            if code is not None and name not in _names_in(code):
                problems.append(
                    f"{each.__name__}.{name} does not call super().{name}: nothing would train under a plan. Call it, "
                    f"{instead}"
                )
    if problems:
        raise ConfigError(*problems)


def check_generation(trainer: type, last: type, num_ranks: int) -> None:
    """Raise ConfigError, on several ranks, for a class before `last` that generates while it prepares inputs."""
    if num_ranks == 1:
        return
    for each in trainer.__mro__[: trainer.__mro__.index(last)]:
        seen: set[str] = set()
        ahead = {"_prepare_inputs"}
        while ahead:
            seen |= ahead
            codes = [_code_of(vars(each).get(name)) for name in ahead]
            ahead = {name for code in codes if code is not None for name in _names_in(code)} - seen
        if "_prepare_inputs" in vars(each) and "generate" in seen:
            raise ConfigError(
                f"{each.__name__}._prepare_inputs generates with the model of one process, and gathers rewards past "
                f"the plan; {num_ranks} ranks would train on wrong ones. Train in one process, or write the loop with "
                "engine.generate: docs/guides/reinforcement.md and examples/grpo.py"
            )


def _code_of(method: Any) -> CodeType | None:
    # Of the method, where a decorator wraps it.
    return getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None


def _names_in(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names_in(each)
    return found
