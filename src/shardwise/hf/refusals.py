"""What a class of trainers cannot replace under a plan: refused in words when it is made, with the way out."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
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
            tree = _tree_of(vars(each).get(name))
            if tree is not None and not _asks_above(tree, name, [kind.__name__ for kind in each.__mro__[1:]]):
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
            trees = [_tree_of(vars(each).get(name)) for name in ahead]
            ahead = {name for tree in trees if tree is not None for name in _names_in(tree)} - seen
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


def _tree_of(method: Any) -> ast.AST | None:
    """What is written in a method; None where there is none, or no text of it."""
    try:
        # Of the method, where a decorator wraps it.
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))) if callable(method) else None
    except (OSError, TypeError, SyntaxError):
        return None


def _asks_above(tree: ast.AST, name: str, bases: list[str]) -> bool:
    """Whether it has `super().name` in it, or `Base.name`: a method may name itself for another reason."""
    above = {"super", *bases}
    # `parent = super()` is looked through.
    for each in ast.walk(tree):
        if not isinstance(each, ast.Assign | ast.AnnAssign | ast.NamedExpr) or each.value is None:
            continue
        if above & set(_last_names_in(each.value)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            above |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = [each.value for each in ast.walk(tree) if isinstance(each, ast.Attribute) and each.attr == name]
    return any(above & set(_last_names_in(each)) for each in found)


def _last_names_in(value: ast.expr) -> Iterator[str]:
    """Of `super()` super, of `library.Base` Base."""
    if isinstance(value, ast.Call):
        yield from _last_names_in(value.func)
    elif isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.Attribute):
        yield value.attr


def _names_in(tree: ast.AST) -> set[str]:
    names = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    return names | {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
