"""What a class of trainers cannot replace under a plan: refused in words when it is made, with the way out."""

from types import CodeType

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
    "_save": "which gathers the model",
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
            code = getattr(own, "__code__", None)
            if code is not None and name not in _names_in(code):
                problems.append(
                    f"{each.__name__}.{name} does not call super().{name}: nothing would train under a plan. Call it, "
                    f"{instead}"
                )
    if problems:
        raise ConfigError(*problems)


def _names_in(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names_in(each)
    return found
