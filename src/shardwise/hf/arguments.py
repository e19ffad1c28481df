"""What a trainer under a plan does with each field of TrainingArguments: one table, which refuses and fills the page.

    honoured   as transformers does it, for the data ranks of the plan
    mapped     to a setting of the plan, or to what the engine does anyway
    refused    with the reason and the way out

`ARGUMENTS` has every field of `transformers.TrainingArguments` and `Seq2SeqTrainingArguments`. A field that
transformers adds later fails a test here. At run time it is refused where it has another value than its default.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal

import transformers

from shardwise.errors import ConfigError
from shardwise.space import Mesh

Kind = Literal["honoured", "mapped", "refused"]

KNOWN_CLASSES = (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments)
"""The classes whose fields are known; a class derived from them has fields for its own trainer besides."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What happens to some fields, or to some values of one field."""

    kind: Kind
    names: tuple[str, ...]
    text: str
    """What it means under a plan; for what is refused, the reason and the way out."""
    is_refused: Callable[[Any, Mesh], bool] | None = None
    """Whether a value is refused on a mesh, for `kind` "refused"."""
    values: str = ""
    """Which values of the field are meant, in words; "" for all."""


def _honoured(names: str, text: str) -> Treatment:
    return Treatment("honoured", tuple(names.split()), text)


def _mapped(names: str, text: str) -> Treatment:
    return Treatment("mapped", tuple(names.split()), text)


def _is_set(value: Any, mesh: Mesh) -> bool:
    return bool(value)


def _is_set_on_several(value: Any, mesh: Mesh) -> bool:
    return bool(value) and mesh.size > 1


def _refused(names: str, text: str, is_refused: Callable[[Any, Mesh], bool] = _is_set, values: str = "") -> Treatment:
    return Treatment("refused", tuple(names.split()), text, is_refused, values)


def _updates_in_backward(value: Any, mesh: Mesh) -> bool:
    name = str(getattr(value, "value", value))
    return "lomo" in name or name.endswith("layerwise")


def _swaps_weights(value: Any, mesh: Mesh) -> bool:
    return str(getattr(value, "value", value)).startswith("schedule_free")


def _reads_for_others(value: Any, mesh: Mesh) -> bool:
    return bool(getattr(value, "split_batches", False) or getattr(value, "dispatch_batches", False))


def _reads_stages(value: Any, mesh: Mesh) -> bool:
    return bool(value) and mesh.pp > 1


_TREATMENTS = (
    # What is trained, for how long, how fast.
    _mapped(
        "per_device_train_batch_size gradient_accumulation_steps",
        "rows of a microbatch, and microbatches of an update of a data rank. D data ranks do what one process does "
        "with D times the accumulation steps. Ranks along pp and tp have the same rows",
    ),
    _honoured("num_train_epochs max_steps", "counted in updates of all data ranks together"),
    _honoured(
        "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps",
        "the scheduler of transformers, on the engine's optimizer",
    ),
    _honoured(
        "optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon",
        "the optimizer of transformers, over what a rank owns; one that needs whole matrices has them",
    ),
    _refused(
        "optim",
        "it updates inside of backward; take adamw_torch, or give optimizer_cls_and_kwargs",
        _updates_in_backward,
        values="lomo, adalomo, *_layerwise",
    ),
    _refused(
        "optim",
        "it swaps the weights between training and evaluation; take adamw_torch, or average of the plan",
        _swaps_weights,
        values="schedule_free_*",
    ),
    _honoured(
        "average_tokens_across_devices",
        "true: a token counts alike on all data ranks. False: each data rank divides by its own tokens, and their mean "
        "counts",
    ),
    _mapped("max_grad_norm", "clip_grad_norm of the plan, unless the plan has one"),
    _honoured("label_smoothing_factor", "in the loss, as in one process"),
    # Precision.
    _mapped(
        "bf16 fp16",
        'precision.compute = "bfloat16" or "float16": working copies of float32 masters, where the plain Trainer casts '
        'in each operation. fp16 also sets precision.loss_scale = "dynamic"',
    ),
    _refused(
        "bf16_full_eval fp16_full_eval",
        "evaluation computes as training does; set --bf16, or precision.compute of the plan",
    ),
    _honoured("tf32", "a switch of torch"),
    # Memory and speed.
    _honoured(
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs",
        "the checkpoints of the model, with use_reentrant=False under tp. activations.checkpoint of the plan does the "
        "same for any model",
    ),
    _mapped(
        "torch_compile torch_compile_backend torch_compile_mode",
        "each repeated block of the model is compiled, and the code between them is not. Under any plan they are the "
        "blocks of one process; a module that is compiled already stays as it is",
    ),
    _honoured("use_liger_kernel liger_kernel_config use_cache", "set on the model before the plan cuts it"),
    _honoured("neftune_noise_alpha", "in the forward; its random numbers follow from the engine's seed"),
    _honoured("torch_empty_cache_steps", "after a step of the engine"),
    _refused(
        "auto_find_batch_size",
        "ranks cannot take another batch size in the middle of a step; set per_device_train_batch_size. "
        "engine.footprint() says what a plan needs",
    ),
    # Logs.
    _honoured(
        "logging_strategy logging_steps logging_first_step logging_nan_inf_filter",
        "the loss of all data ranks, the same on every rank",
    ),
    _honoured("log_on_each_node log_level log_level_replica disable_tqdm", "by rank and host"),
    _honoured("include_num_input_tokens_seen", "over the data ranks"),
    _honoured(
        "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id", "rank 0 reports"
    ),
    # Evaluation.
    _honoured(
        "eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size",
        "each data rank evaluates its batches; the loss is that of all rows, none twice",
    ),
    _honoured(
        "prediction_loss_only eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics",
        "every rank gets the rows of all, in the order of the dataset",
    ),
    _refused("eval_use_gather_object", "ranks take no pickles from each other; let the model output tensors"),
    # Checkpoints.
    _honoured("output_dir", "a folder that all ranks can write to"),
    _honoured(
        "save_strategy save_steps save_total_limit save_only_model",
        "folders of the plain Trainer, with what each rank owns in shardwise/",
    ),
    _refused(
        "save_on_each_node",
        "all ranks write into one checkpoint; give an output_dir that all hosts share",
        _is_set_on_several,
    ),
    _honoured(
        "enable_jit_checkpoint",
        "SIGTERM or SIGUSR1 on any rank: all ranks save after the step under way, and train() returns",
    ),
    _honoured(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", "rank 0 pushes"
    ),
    _honoured(
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "metrics are the same on every rank; the best weights go to the ranks that own them",
    ),
    _honoured(
        "resume_from_checkpoint restore_callback_states_from_checkpoint",
        "a checkpoint of any plan, or of the plain Trainer",
    ),
    _honoured("ignore_data_skip", "rows are counted over all data ranks, so another number of them goes on"),
    # Random numbers and devices.
    _honoured(
        "seed data_seed full_determinism", "seed is also that of the engine: forwards draw the same under any plan"
    ),
    _honoured("use_cpu local_rank", "where the ranks compute"),
    _honoured("ddp_backend ddp_timeout", "of the process group that the ranks join"),
    # Other ways to distribute.
    _mapped(
        "ddp_find_unused_parameters ddp_static_graph ddp_broadcast_buffers",
        "the engine finds parameters without a gradient, and brings buffers together, in every step",
    ),
    _mapped("ddp_bucket_cap_mb", "sharding.bucket_bytes of the plan holds"),
    _refused(
        "fsdp deepspeed parallelism_config",
        "a plan says how the model is cut; leave it out, and set sharding.stage, mesh.tp or mesh.pp of the plan",
    ),
    _honoured("fsdp_config", "read with fsdp only, which is refused"),
    _honoured("accelerator_config", "as in accelerate; even_batches gives no row twice"),
    _refused(
        "accelerator_config",
        "each data rank reads its own batches; leave it out, and give per_device_train_batch_size for a data rank",
        _reads_for_others,
        values="split_batches, dispatch_batches",
    ),
    # Data.
    _honoured(
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
        "the loader of transformers, with the batches of the data rank",
    ),
    _honoured("dataloader_drop_last", "also batches that not every data rank would have"),
    _honoured("remove_unused_columns label_names", "as in one process"),
    _honoured("train_sampling_strategy length_column_name", "the order of one process, shared among the data ranks"),
    # The rest.
    _honoured("debug", "hooks on the modules"),
    _refused(
        "debug",
        "it reads the values of all stages between modules; debug with mesh.pp = 1",
        _reads_stages,
        values="underflow_overflow with stages",
    ),
    _honoured("skip_memory_metrics", "of rank 0"),
    _honoured("do_train do_eval do_predict", "read by scripts"),
    _honoured("predict_with_generate generation_max_length generation_num_beams generation_config", "engine.generate"),
    _honoured("sortish_sampler", "transformers reads it nowhere"),
)

ARGUMENTS: dict[str, tuple[Treatment, ...]] = {
    name: tuple(each for each in _TREATMENTS if name in each.names)
    for treatment in _TREATMENTS
    for name in treatment.names
}
"""By the name of a field: what happens to it, and then to single values of it."""


def known_fields() -> Iterator[Field[Any]]:
    """Every field of the classes of arguments of transformers, in their order."""
    found = {each.name: each for kind in KNOWN_CLASSES for each in fields(kind)}
    yield from found.values()


def check_arguments(args: Any, mesh: Mesh) -> None:
    """Raise ConfigError, with every problem, for arguments that cannot hold under a plan."""
    values = {each.name: getattr(args, each.name) for each in known_fields() if hasattr(args, each.name)}
    problems = []
    for treatment in _TREATMENTS:
        refused = treatment.is_refused
        if refused is None:
            continue
        given = [
            f"--{name} {_shown(values[name], treatment)}"
            for name in treatment.names
            if name in values and refused(values[name], mesh)
        ]
        if given:
            problems.append(f"{' '.join(given)}: {treatment.text}")
    if (every := getattr(args, "shardwise_replicas", None)) is not None and every < 1:
        problems.append(f"--shardwise_replicas {every}: a copy is made every so many updates; give 1 or more")
    problems += [
        f"--{each.name} {values[each.name]}: this shardwise does not know what transformers {transformers.__version__} "
        "does with it; leave it out, or install a newer shardwise"
        for each in known_fields()
        if each.name not in ARGUMENTS and each.name in values and values[each.name] != _default(each)
    ]
    if problems:
        raise ConfigError(*problems)


def _shown(value: Any, treatment: Treatment) -> Any:
    value = getattr(value, "value", value)
    return value if isinstance(value, str | int) else treatment.values or value


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
