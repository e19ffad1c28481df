"""The plan of a trainer: an object, or a file, with what TrainingArguments say of precision and clipping."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from shardwise.engine.forward.layers import is_compiled
from shardwise.engine.forward.outline import outline_of
from shardwise.errors import ConfigError, PlanError
from shardwise.plan import Merge, Plan
from shardwise.plan.units import repeated_blocks
from shardwise.space import Mesh


@dataclass
class PlanArguments:
    """The fields that a trainer under a plan adds to TrainingArguments, such as `--shardwise_plan`.

    For a class of arguments of another library: `@dataclass class Config(PlanArguments, trl.SFTConfig): ...`.
    """

    shardwise_plan: str | None = field(
        default=None,
        kw_only=True,
        metadata={"help": "TOML file with the plan; without one, the state is cut over all ranks (dp_shard)."},
    )
    shardwise_optimizer_pt: bool = field(
        default=True,
        kw_only=True,
        metadata={
            "help": "Also write optimizer.pt for the plain Trainer, tensor by tensor; it takes the state's bytes again."
        },
    )
    shardwise_replicas: int | None = field(
        default=None,
        kw_only=True,
        metadata={"help": "Copy the run to the memory of its hosts every so many updates; without it, never."},
    )
    shardwise_trace: bool = field(
        default=False,
        kw_only=True,
        metadata={"help": "Leave a trace of the last updates on all ranks in output_dir: trace.json and timeline.png."},
    )


@dataclass
class TrainingArguments(PlanArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments` with `--shardwise_plan FILE`."""


@dataclass
class Seq2SeqTrainingArguments(PlanArguments, transformers.Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with `--shardwise_plan FILE`."""


def plan_of(given: Plan | str | Path | None, args: Any, num_ranks: int) -> Plan:
    """The plan of a trainer, with the precision and the clip of its arguments.

    given: a plan, or the path of a TOML file with one; None: that of `args.shardwise_plan`, else dp_shard over all
    ranks. Raises PlanError, with every problem, for arguments that contradict the plan.
    """
    of_args = getattr(args, "shardwise_plan", None)
    if given is not None and of_args is not None:
        raise PlanError(f"two plans: plan= of the trainer, and --shardwise_plan {of_args}; give one of them")
    plan = _read(given if given is not None else of_args, num_ranks)
    plan.mesh.check_world(num_ranks)
    problems = [*_merge_problems(plan, args), *_clip_problems(plan, args), *_precision_problems(plan, args)]
    if problems:
        raise PlanError(*problems)
    if plan.clip_grad_norm is None and args.max_grad_norm and args.max_grad_norm > 0:
        plan = replace(plan, clip_grad_norm=float(args.max_grad_norm))
    if args.bf16 or args.fp16:
        precision = replace(plan.precision, compute="bfloat16" if args.bf16 else "float16")
        if args.fp16 and precision.loss_scale is None:
            precision = replace(precision, loss_scale="dynamic")
        plan = replace(plan, precision=precision)
    # The losses come as the Trainer scales them, for a mean over all microbatches.
    return replace(plan, merge=Merge())


def compile_blocks(model: nn.Module, args: Any) -> None:
    """Compile the repeated blocks of a model in place, where `args` ask for a compiler: before the plan cuts them.

    Raises ConfigError for a model without any, and ModelError for one that is compiled as a whole.
    """
    if not args.torch_compile:
        return
    # Not the model: stages 3 and pp run their own code between blocks, and a compiled whole would have none of it.
    blocks = [model.get_submodule(name) for name in repeated_blocks(outline_of(model, asks="--torch_compile"))]
    if not blocks:
        raise ConfigError(
            f"--torch_compile: blocks are compiled, and a {type(model).__name__} has no list of modules of one class. "
            "Leave it out, and compile modules of the model before the Trainer: module.compile()"
        )
    for block in blocks:
        if not is_compiled(block):
            block.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def _read(given: Plan | str | Path | None, num_ranks: int) -> Plan:
    if isinstance(given, Plan):
        return given
    if given is None:
        return Plan(mesh=Mesh(dp_shard=num_ranks))
    if not isinstance(given, str | Path):
        raise PlanError(f"plan: {given!r} is neither a Plan nor the path of a TOML file")
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--shardwise_plan {given} cannot be read: {error}; give a TOML file with a plan") from error
    return Plan.parse(text)


def _merge_problems(plan: Plan, args: Any) -> list[str]:
    asked = plan.merge.microbatches
    problems = []
    if asked not in (1, args.gradient_accumulation_steps):
        problems.append(
            f"merge.microbatches = {asked}, and --gradient_accumulation_steps {args.gradient_accumulation_steps} says "
            f"how many microbatches make an update. Leave merge out; for {asked} microbatches of the same rows set "
            f"gradient_accumulation_steps={asked} and a per_device_train_batch_size {asked} times smaller"
        )
    if not plan.merge.average:
        problems.append("merge.average = false: a Trainer scales its losses itself; leave merge out")
    return problems


def _clip_problems(plan: Plan, args: Any) -> list[str]:
    clip, asked = plan.clip_grad_norm, args.max_grad_norm
    default = transformers.TrainingArguments.__dataclass_fields__["max_grad_norm"].default
    if clip is None or asked in (clip, default):
        return []
    return [
        f"clip_grad_norm = {clip} of the plan and --max_grad_norm {asked} say two things; set max_grad_norm alone, or "
        f"leave it at {default} for the plan's"
    ]


def _precision_problems(plan: Plan, args: Any) -> list[str]:
    asked = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    if asked is None or plan.precision.compute in (None, asked):
        return []
    flag = "--bf16" if args.bf16 else "--fp16"
    return [f'{flag} and precision.compute = "{plan.precision.compute}" say two things; leave one of them out']
