"""What a trainer cannot do under a plan: refused in words when it is made, with the way out."""

from types import CodeType
from typing import Any

from shardwise.errors import ConfigError

_ENGINE_DOES = "the engine does that; leave it out, and set sharding.stage, mesh.tp or mesh.pp of the plan"
_EVALUATES = "evaluation computes as the plan does; set --bf16, or precision.compute of the plan"

_ARGUMENTS = {
    "deepspeed": _ENGINE_DOES,
    "fsdp": _ENGINE_DOES,
    "parallelism_config": _ENGINE_DOES,
    "torch_compile": "compile the blocks of the model before the Trainer: block.compile() for each",
    "auto_find_batch_size": "ranks cannot change the batch in the middle of a step; `shardwise plan` says what fits",
    "fp16_full_eval": _EVALUATES,
    "bf16_full_eval": _EVALUATES,
    "eval_use_gather_object": "ranks take no pickles from each other; let the model output tensors",
}
"""Arguments that a plan refuses where they are set, and what to do instead."""

_ON_SEVERAL_RANKS = {
    "save_on_each_node": "rank 0 writes the files of a checkpoint; give a folder that all hosts share",
    "enable_jit_checkpoint": "a signal reaches one rank, and all have to save; save by --save_steps",
}
"""The same, where there are several ranks."""

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

_OPTIMIZERS = {
    "lomo": "it updates inside of backward",
    "adalomo": "it updates inside of backward",
    "schedule_free": "it swaps the weights between training and evaluation",
    "layerwise": "it updates inside of backward",
}


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


def check_arguments(args: Any, num_ranks: int) -> None:
    """Raise ConfigError, with every problem, for arguments that cannot hold under a plan."""
    problems = [f"--{name}: {why}" for name, why in _refused(args, num_ranks).items()]
    if problems:
        raise ConfigError(*problems)


def _refused(args: Any, num_ranks: int) -> dict[str, str]:
    found = {name: why for name, why in _ARGUMENTS.items() if getattr(args, name, None)}
    if num_ranks > 1:
        found |= {name: why for name, why in _ON_SEVERAL_RANKS.items() if getattr(args, name, None)}
    optim = str(getattr(args.optim, "value", args.optim))
    for part, why in _OPTIMIZERS.items():
        if part in optim:
            found["optim"] = (
                f"{optim} cannot train under a plan: {why}; take adamw_torch, adafactor, or one of your own"
            )
    config = getattr(args, "accelerator_config", None)
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            found[f"accelerator_config {name}"] = "each data rank reads its own batches; leave it out"
    return found
