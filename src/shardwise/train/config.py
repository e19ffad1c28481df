"""From a TOML file and `--set` words to a checked configuration, before torch is imported or a process started.

    run.toml  -->  --set changes single keys  -->  tables (pydantic: types, unknown keys)  -->  plan  -->  RunConfig
                                                        every problem is collected, and all are raised at once

The trainer itself reads [model], [data], [train], [checkpoint] and [generate], whose classes are here and in
`data_settings`. The other tables are the strategies of a plan, and are read by `plan.specs`.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from shardwise.errors import ConfigError, PlanError, few_of
from shardwise.plan import Merge, Plan
from shardwise.plan.names import nearest
from shardwise.plan.schedule_check import check
from shardwise.plan.schedules import make_schedule
from shardwise.plan.specs import read_strategy, unknown_setting
from shardwise.space import Mesh
from shardwise.train.data_settings import BYTES, DataTable, dataset_problems, source_problems
from shardwise.train.strict_tables import Table, read_table

_SHIPPED = Path(__file__).parents[1] / "configs"
Decay = Literal["cosine", "linear", "constant"]


class ModelTable(Table):
    """[model]: what is trained."""

    factory: str
    """Where the model comes from: "package.module:name" or "file.py:name", a file being relative to the config."""
    config: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the factory; of its configuration class for a model class of transformers."""
    initialise: Literal["whole", "by module"] = "whole"
    """"whole": `factory` gives the initial parameters, drawn one after the other. "by module": each module draws its
    own (`reset_parameters`, `_init_weights`), from `train.seed` and its name, so that no rank needs those of others.
    """
    pretrained: str | None = None
    """A folder that `save_pretrained` wrote, relative to the config: `factory.from_pretrained(folder, **config)` makes
    the model. Only safetensors are read, and nothing is downloaded."""
    loss: str | None = None
    """A callable f(output, batch) -> scalar, named like `factory`, or a class of such callables. Left out: the model's
    output carries `.loss`."""
    loss_options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of `loss`; of the constructor, where it is a class. One that takes a `model` gets the
    model."""
    loss_weight: str | None = None
    """A callable f(batch) -> by what a microbatch counts in the mean, such as its target tokens, named like `factory`.
    Left out: its rows."""
    groups: dict[str, str | list[str]] = Field(default_factory=dict)
    """Name -> names or globs of parameters, or of modules that contain them: groups that `train.turns` train alone, and
    that `train.clip_grad_norm` may name. They may overlap."""


class TurnTable(Table):
    """[[train.turns]]: a kind of update. They take turns, in their order and from the beginning again."""

    only: str | list[str] | None = None
    """The group of `model.groups` that is updated, or several; left out: all parameters."""
    loss: str | None = None
    """Its loss function, named like `model.loss`; left out: that of [model]."""
    loss_options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of `loss`, as `model.loss_options`."""
    steps: int = Field(default=1, ge=1)
    """Updates of this kind in a row. Each takes the next rows, and counts as one of `train.steps`."""


class GroupTable(Table):
    """[[train.groups]]: parameters whose optimizer has other settings. The first group that names one wins."""

    parameters: list[str] = Field(min_length=1)
    """Names or globs of parameters, or of modules that contain them, such as ["*.bias", "*norm*"]."""
    learning_rate: float | None = Field(default=None, ge=0)
    """In the place of `train.learning_rate`; schedules multiply it."""
    weight_decay: float | None = Field(default=None, ge=0)
    """In the place of `train.weight_decay`, whatever the dims."""
    frozen: bool = False
    """Not trained at all: no gradient, no optimizer state."""


class CallbackTable(Table):
    """[[train.callbacks]]: something that happens around updates."""

    factory: str
    """A callable f(**options) -> a callback, named like `model.factory`; "shardwise.train:EarlyStopping"."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of `factory`."""


class TrainTable(Table):
    """[train]: how long, how fast, and what is written down."""

    steps: int = Field(ge=1)
    """Number of updates."""
    global_batch: int = Field(default=32, ge=1)
    """Rows that make one update, on all ranks together; the layout does not change it."""
    microbatch: int = Field(default=4, ge=1)
    """Rows that one rank computes at a time."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the initial parameters, and the order of the samples if `data.seed` is left out."""
    optimizer: str = "torch.optim:AdamW"
    """A callable f(parameter groups, lr=..., **optimizer_options) -> optimizer, named like `model.factory`."""
    optimizer_options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the optimizer, such as betas = [0.9, 0.95]."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from 0."""
    decay: Decay = "cosine"
    """How the learning rate falls after the warm-up."""
    min_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """Where the decay ends, as a fraction of `learning_rate`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of parameters with two dims or more; the others (biases, norms) have none."""
    clip_grad_norm: float | dict[str, float] | None = None
    """Largest norm of the gradient of all parameters, or of some: {"head.*" = 1.0}; left out: no clipping."""
    clip_grad_value: float | None = None
    """Largest absolute value of an element of the gradient, after the clip by norm; left out: no clipping."""
    evaluate_every: int = Field(default=100, ge=1)
    """Updates between two evaluations on held-out text; there is always one at the end."""
    evaluate_batches: int = Field(default=4, ge=1)
    """Global batches of held-out rows that one evaluation reads, at most; always the same ones."""
    evaluate_first: bool = False
    """Evaluate before the first update too."""
    evaluate_average: bool = True
    """Evaluate with the averages of the weights, where [average] asks for some, from the first one on."""
    callbacks: list[CallbackTable] = Field(default_factory=list)
    """What happens around updates: a [[train.callbacks]] for each, with a `factory` and `options`. The factory is a
    callable f(**options) -> a callback, named like `model.factory`, such as "shardwise.train:EarlyStopping"."""
    log_every: int = Field(default=10, ge=1)
    """Updates between two lines of progress where there is no terminal."""
    device: str = "auto"
    """Where ranks compute: "auto" (the accelerator of the host, else the CPU), "cpu", or a kind of device as torch
    names it, such as "cuda" or "xpu": each rank takes the one of its number on its host, or the only one that it sees.
    One process may name a device by number, such as "cuda:1".
    """
    output: str | None = None
    """Folder of metrics and pictures, relative to where the command runs. They are replaced by the next run, unless it
    resumes this one. Left out: "runs/<name of the config>"."""
    trace: bool = False
    """Measure the timeline of each rank. A picture of the last update, and a trace of the last 20 for Perfetto or
    Chrome, are left in `output`.
    """
    timeout_seconds: float = Field(default=120.0, gt=0)
    """How long a rank waits for another before it gives up."""
    interface: str | None = None
    """Name or address of the network interface on which ranks listen, such as "ib0". SHARDWISE_INTERFACE of the
    environment comes first. Left out: the one on the way to the store.
    """
    ports: str | None = Field(default=None, pattern=r"^\d{1,5}(-\d{1,5})?$")
    """Ports on which ranks listen, such as "20000-20100". SHARDWISE_PORTS of the environment comes first. Left out:
    free ones that the kernel chooses.
    """
    turns: list[TurnTable] = Field(default_factory=list)
    """Several losses in turns, each for a group of parameters, as [[train.turns]]: see below."""
    groups: list[GroupTable] = Field(default_factory=list)
    """Learning rate and weight decay by name, as [[train.groups]]: see below."""
    schedule: str | None = None
    """In the place of `decay`: a name of transformers' `get_scheduler`; a scheduler class of torch; or a callable
    f(optimizer, steps) -> scheduler, named like `model.factory`."""
    schedule_options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of `schedule`."""
    metrics: dict[str, str] = Field(default_factory=dict)
    """Name -> a callable f(output, batch) -> tensor, or a class of torchmetrics, named like `model.factory`: computed
    in evaluations."""
    metric_options: dict[str, dict[str, object]] = Field(default_factory=dict)
    """Name of a metric -> its further keyword arguments; of the constructor, where it is a class."""
    metric_inputs: dict[str, str] = Field(default_factory=dict)
    """Name of a torchmetrics metric -> a callable f(output, batch) -> what its `update` takes. Left out: the output, or
    its `.logits`, and the batch's `labels`."""


class CheckpointTable(Table):
    """[checkpoint]: what is kept of a run, so that it can go on."""

    every: int | None = Field(default=None, ge=1)
    """Updates between two saves; there is one after the last update too. Left out: nothing is saved."""
    keep: int = Field(default=2, ge=1)
    """Newest saves that stay. While the next one is written there is one more."""
    keep_every: int | None = Field(default=None, ge=1)
    """Saves after a multiple of so many updates stay as well. Left out: only the newest stay."""
    layout: Literal["pieces", "whole"] = "pieces"
    """"pieces": each rank writes its own elements; "whole": every tensor is whole in one file."""
    background: bool = True
    """Training goes on while a save is written, from a copy in memory of what this rank writes."""
    replicas: int | None = Field(default=None, ge=1)
    """Updates between two copies of the run in memory of its hosts, which survive the loss of one; `--resume auto` goes
    on from the newer of copy and save. On a single host they survive the loss of ranks alone. Left out: no copies."""
    path: str | None = None
    """Folder of the saves, relative to where the command runs, or an address such as "s3://bucket/run". All ranks see
    it. Left out: "checkpoints" in `train.output`."""


class GenerateTable(Table):
    """[generate]: texts that the model goes on with, which are printed, and recorded in `samples.jsonl`."""

    every: int | None = Field(default=None, ge=1)
    """Updates between two samples; there is one at the end too. Left out: only that one."""
    prompts: list[str] = Field(default_factory=list)
    """Texts to go on with; left out: the beginning of a held-out row."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the model adds, at most. Left out: 160, or what is left of `data.sequence_length` without prompts,
    and of the model's `max_position_embeddings`."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Decides what is drawn, the same in each sample; left out: `train.seed`."""
    options: dict[str, object] = Field(default_factory=dict)
    """Further arguments of the model's `generate`, such as { do_sample = true, top_k = 50 }. Left out: sampling at
    temperature 0.7."""


def file_problems(model: ModelTable | None, data: DataTable | None, folder: Path) -> list[str]:
    """Problems of files that the tables name and the disk does not have, or that show at their beginning."""
    problems: list[str] = []
    if model is not None and model.pretrained is not None and not (folder / model.pretrained / "config.json").is_file():
        problems.append(
            f"model.pretrained: no config.json in {folder / model.pretrained}; give a folder that save_pretrained wrote"
        )
    if data is None:
        return problems
    problems += source_problems(data, folder)
    if data.reads_tokens:
        if data.tokenizer != BYTES and not (folder / data.tokenizer).exists():
            problems.append(
                f'data.tokenizer: no file {folder / data.tokenizer}; give the JSON of a tokenizer or "{BYTES}"'
            )
        # A smaller vocabulary would end in an index error of an embedding, on some rank in some batch.
        vocabulary = None if model is None else model.config.get("vocab_size")
        if data.tokenizer == BYTES and isinstance(vocabulary, int) and vocabulary < 256:
            problems.append(f"model.config.vocab_size: {vocabulary} given; bytes need at least 256")
    return problems


def turn_problems(model: ModelTable | None, train: TrainTable | None) -> list[str]:
    """Turns of groups that there are not, or of no group."""
    if model is None or train is None:
        return []
    problems = []
    for at, turn in enumerate(train.turns):
        only = [turn.only] if isinstance(turn.only, str) else turn.only
        for name in (each for each in only or () if each not in model.groups):
            near = nearest(name, list(model.groups))
            known = "has none" if near is None else f"has {few_of(list(model.groups))}; the nearest is {near!r}"
            problems.append(f"train.turns.{at}.only: {name!r} is no group; model.groups {known}")
        if only == []:
            problems.append(f"train.turns.{at}.only: [] trains nothing; name a group, or leave it out")
        if turn.loss_options and turn.loss is None:
            problems.append(f"train.turns.{at}.loss_options: given without train.turns.{at}.loss")
    return problems


def schedule_problems(train: TrainTable | None) -> list[str]:
    """Settings of [train] that another one makes meaningless, or that say nothing."""
    if train is None:
        return []
    given, problems = train.model_fields_set, []
    if train.warmup_steps > train.steps:
        problems.append(
            f"train.warmup_steps: {train.warmup_steps} given; train.steps is only {train.steps}; give at most that"
        )
    if train.schedule is not None:
        has_warmup = ":" not in train.schedule and train.schedule not in ("constant", "reduce_lr_on_plateau")
        others = ("decay", "min_learning_rate", *(() if has_warmup else ("warmup_steps",)))
        problems += [f"train.{key}: given with train.schedule; leave one out" for key in others if key in given]
    elif "schedule_options" in given:
        problems.append("train.schedule_options: given without train.schedule, which they belong to")
    problems += [
        unknown_setting(f"train.{key}.{name}", [f"train.{key}.{each}" for each in train.metrics])
        for key in ("metric_options", "metric_inputs")
        for name in getattr(train, key)
        if train.metrics and name not in train.metrics
    ]
    problems += [
        f"train.{key}: given without train.metrics, which it belongs to"
        for key in ("metric_options", "metric_inputs")
        if getattr(train, key) and not train.metrics
    ]
    if "loss" in train.metrics:
        problems.append("train.metrics.loss: evaluations have a loss already; give the metric another name")
    for number, group in enumerate(train.groups):
        settings = [name for name in ("learning_rate", "weight_decay") if getattr(group, name) is not None]
        if group.frozen and settings:
            problems.append(f"train.groups.{number}.{settings[0]}: given with frozen = true; leave one out")
        elif not group.frozen and not settings:
            problems.append(
                f"train.groups.{number}: says nothing of its parameters; give learning_rate, weight_decay or frozen"
            )
    return problems


_TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "data": DataTable,
    "train": TrainTable,
    "checkpoint": CheckpointTable,
    "generate": GenerateTable,
}
_KNOWN = [*_TABLES, "mesh", "sharding", "precision", "pipeline", "tensor", "average", "activations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A configuration in which everything holds that can be checked without importing the model."""

    path: Path
    """The file it was read from."""
    model: ModelTable
    data: DataTable
    train: TrainTable
    checkpoint: CheckpointTable
    generate: GenerateTable
    plan: Plan
    """The layout, with the microbatches per rank that `train.global_batch` asks for."""

    @property
    def folder(self) -> Path:
        """The folder to which files named in the configuration are relative."""
        return self.path.parent

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.stem

    @property
    def order_seed(self) -> int:
        """The seed that decides the order of the samples."""
        return self.train.seed if self.data.seed is None else self.data.seed

    @property
    def output(self) -> Path:
        """Where the run writes."""
        return Path(self.train.output) if self.train.output is not None else Path("runs") / self.name

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, as JSON values; the layout as text."""
        tables = {name: getattr(self, name).model_dump(mode="json") for name in _TABLES}
        return {**tables, "plan": self.plan.text()}

    @property
    def saves(self) -> str:
        """The folder or address of the run's saves."""
        return self.checkpoint.path if self.checkpoint.path is not None else str(self.output / "checkpoints")


def find_config(path: Path) -> Path:
    """`path`, or the configuration of this name that comes with the library: `demo`.

    >>> find_config(Path("demo")).name, find_config(Path("my.toml")).name
    ('demo.toml', 'my.toml')
    """
    # A folder of that name hides none: no configuration is a folder.
    return _SHIPPED / f"{path}.toml" if is_shipped(path) and not path.is_file() else path


def is_shipped(path: Path) -> bool:
    """Whether `path` is the name of a configuration that comes with the library."""
    # A name has no folder and no suffix, so that a slip in the path of a file is never taken for one.
    return path.name == str(path) and (_SHIPPED / f"{path}.toml").is_file()


def read_config(path: Path, *, overrides: Sequence[str] = (), num_processes: int | None = 1) -> RunConfig:
    """The configuration in `path`, changed by `overrides` ("train.steps=5"), for `num_processes` processes.

    path: see `find_config`. num_processes: None for as many as the mesh has ranks, where none are started. Without a
    [mesh] table the mesh is `dp_shard = num_processes`. Raises `ConfigError` with every problem found.
    """
    path = find_config(path)
    problems: list[str] = []
    tables = overridden(_read_toml(path), overrides, problems)
    problems += [unknown_setting(name, _KNOWN) for name in tables if name not in _KNOWN]
    found: dict[str, Any] = {name: read_table(kind, name, tables, problems) for name, kind in _TABLES.items()}
    model, data, train = found["model"], found["data"], found["train"]
    plan = _plan(tables, train, num_processes, problems)
    # Files are looked for here, so that a wrong path is known before processes start and import torch on every rank.
    clashes = dataset_problems(data)
    # What the files have is asked only where it is clear which are meant.
    problems += clashes + file_problems(model, None if clashes else data, path.parent)
    problems += schedule_problems(train) + turn_problems(model, train)
    if data is not None and found["generate"] is not None and "generate" in tables:
        problems += _generation_problems(data, found["generate"])
    problems += _device_problems(train, num_processes or 1)
    if plan is not None and train is not None:
        # Only a plan that holds has a schedule to check: its faults would be explained twice otherwise.
        problems += _pipeline_problems(plan)
    if problems or plan is None:  # what does not hold is None, and among the problems
        raise ConfigError(*problems)
    return RunConfig(path=path, plan=plan, **found)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the config {path} cannot be read: {error.strerror}; give a TOML file, or demo, which comes with shardwise"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config {path} is not UTF-8 text, as TOML must be") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config {path} is not TOML: {error}") from error


def overridden(tables: dict[str, Any], overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """`tables`, changed by overrides of the form "table.key=value"; those that are not are added to `problems`."""
    for override in overrides:
        key, equals, text = override.partition("=")
        *parents, last = key.strip().split(".")
        if not equals or not parents or not all([*parents, last]):
            problems.append(f"--set {override}: not of the form table.key=value, such as train.steps=100")
            continue
        table = tables
        for depth, parent in enumerate(parents):
            # An override may open a table that the file does not have: a configuration needs no empty [mesh] for
            # `mesh.tp=2`.
            inner = table.setdefault(parent, {})
            if not isinstance(inner, dict):
                problems.append(f"--set {override}: {'.'.join(parents[: depth + 1])} is {inner!r}, not a table")
                break
            table = inner
        else:
            if text.strip() == "null":  # TOML has no word for it
                table.pop(last, None)
            else:
                table[last] = _toml_value(text.strip())
    return tables


def _toml_value(text: str) -> object:
    """The value `text` has in TOML. A bare word is a string, so that the shell's quotes are not needed twice."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _spec(name: str, tables: Mapping[str, Any], problems: list[str]) -> Any:
    try:
        return read_strategy(name, tables.get(name, {}))
    except PlanError as error:
        problems += error.problems
        return None


def _plan(
    tables: Mapping[str, Any], train: TrainTable | None, num_processes: int | None, problems: list[str]
) -> Plan | None:
    """The plan, or None when some part of it, already among `problems`, does not hold."""
    # Ranks without a word on their use share the parameters: the least memory per rank, and the same results.
    mesh = _spec("mesh", tables, problems) if "mesh" in tables else Mesh(dp_shard=num_processes or 1)
    if mesh is not None and num_processes is not None:
        try:
            mesh.check_world(num_processes)
        except PlanError as error:
            problems += error.problems
    names = ("sharding", "precision", "pipeline", "tensor", "activations")
    strategies = {name: _spec(name, tables, problems) for name in names}
    average = _spec("average", tables, problems) if "average" in tables else None
    # The rest depends on both. What is wrong with them is among the problems already.
    if mesh is None or train is None:
        return None
    microbatches = _microbatches(train, mesh.num_data_ranks, problems)
    if None in strategies.values() or microbatches is None:
        return None
    try:
        return Plan(
            mesh=mesh,
            merge=Merge(microbatches=microbatches),
            clip_grad_norm=train.clip_grad_norm,
            clip_grad_value=train.clip_grad_value,
            average=average,
            **strategies,
        )
    except PlanError as error:
        # A plan calls it by its own name; in the file the key is in [train].
        problems += [
            f"train.{each}".replace("None switches clipping off", "leave it out, and nothing is clipped")
            if each.startswith("clip_grad_")
            else each
            for each in error.problems
        ]
        return None


def _generation_problems(data: DataTable, generate: GenerateTable) -> list[str]:
    problems = [
        f"generate.options.{key}: given twice; give generate.{key}"
        for key in ("max_new_tokens", "seed")
        if key in generate.options
    ]
    if not data.reads_tokens:
        problems.append("generate: the data are no text, so there is nothing to go on with; leave the table out")
    elif not data.is_text and not generate.prompts:
        problems.append("generate.prompts: missing; rows have no text that is held out, so give texts to go on with")
    return problems


def _device_problems(train: TrainTable | None, num_processes: int) -> list[str]:
    """Problems of `train.device` that do not depend on the host."""
    if train is None:
        return []
    kind, colon, number = train.device.partition(":")
    if not re.fullmatch(r"[a-z][a-z0-9_]*(:[0-9]+)?", train.device) or (kind == "auto" and colon):
        return [
            f"train.device: {train.device!r} given; it must be auto, cpu, or a kind of device as torch names it, "
            "which a colon and a number may follow"
        ]
    if number and kind != "cpu" and num_processes > 1:
        # Two ranks on one device hang in the first collective of most backends, or are refused by it.
        return [
            f"train.device: {train.device} given for {num_processes} processes, and no two can share a device. Give "
            f"{kind}, and each takes the one of its number on its host"
        ]
    return []


def _pipeline_problems(plan: Plan) -> list[str]:
    """Problems of the schedule that do not depend on the values that cross between stages."""
    if plan.mesh.pp * plan.pipeline.num_chunks == 1:
        return []
    try:
        schedule = make_schedule(
            plan.pipeline.schedule,
            num_ranks=plan.mesh.pp,
            num_chunks=plan.pipeline.num_chunks,
            num_microbatches=plan.merge.microbatches,
        )
    except PlanError as error:
        return [f"pipeline.{each}" for each in error.problems]
    # Without transfers: what crosses between stages is seen in the first forward, and checked again then.
    return [f"pipeline.schedule: {each}" for each in check(schedule, ())]


def _microbatches(train: TrainTable, num_data_ranks: int, problems: list[str]) -> int | None:
    """Microbatches per rank and update."""
    rows = num_data_ranks * train.microbatch
    if train.global_batch % rows == 0:
        return train.global_batch // rows
    below, above = train.global_batch // rows * rows, (train.global_batch // rows + 1) * rows
    near = f"{below} or {above}" if below else str(above)
    problems.append(
        f"train.global_batch: {train.global_batch} rows cannot be cut into microbatches of {train.microbatch} rows on "
        f"{num_data_ranks} data rank{'s' if num_data_ranks > 1 else ''}, {rows} at a time; give {near}, or another "
        "train.microbatch"
    )
    return None
