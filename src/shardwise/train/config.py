"""From a TOML file and `--set` words to a checked configuration, before torch is imported or a process started.

    run.toml  -->  --set changes single keys  -->  tables (pydantic: types, unknown keys)  -->  plan  -->  RunConfig
                                                        every problem is collected, and all are raised at once

The trainer itself reads [model], [data], [train] and [checkpoint], whose classes are here. The other tables are the
strategies of a plan, and are read by `plan.specs`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from shardwise.errors import ConfigError, PlanError
from shardwise.plan import Merge, Plan
from shardwise.plan.schedule_check import check
from shardwise.plan.schedules import make_schedule
from shardwise.plan.specs import read_strategy, unknown_setting
from shardwise.space import Mesh

PYTHON_DOCS = "python-docs"
BYTES = "bytes"
Decay = Literal["cosine", "linear", "constant"]


# `strict`: "3" or true for a whole number is a slip, which pydantic would else take for 3 or 1.
class Table(BaseModel):
    """One table of the file: no key it does not know, no value of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelTable(Table):
    """[model]: what is trained."""

    factory: str
    """Where the model comes from: "package.module:name" or "file.py:name", a file being relative to the config."""
    config: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the factory; of its configuration class for a model class of transformers."""
    initialise: Literal["whole", "by module"] = "whole"
    """"whole": `factory` gives the initial parameters, drawn one after the other; "by module": each module draws its
    own (`reset_parameters`, `_init_weights`), from `train.seed` and its name, so that no rank needs the others'."""
    loss: str | None = None
    """A callable f(output, batch) -> scalar, named like `factory`; left out: the model's output carries `.loss`."""


class DataTable(Table):
    """[data]: what it is trained on."""

    source: str = PYTHON_DOCS
    """A text file, a directory, a glob such as "texts/**/*.md", or "python-docs": the documentation and the standard
    library that ship inside CPython. Paths are relative to the config."""
    tokenizer: str = BYTES
    """"bytes" (256 tokens), or the JSON file of a `tokenizers` tokenizer."""
    sequence_length: int = Field(default=256, ge=2)
    """Tokens in a row of a batch."""
    held_out: float = Field(default=0.05, gt=0, le=0.5)
    """Fraction of the text that is never trained on and serves for evaluation."""

    @property
    def unit(self) -> str:
        """What a token is called."""
        return "byte" if self.tokenizer == BYTES else "token"


class TrainTable(Table):
    """[train]: how long, how fast, and what is written down."""

    steps: int = Field(ge=1)
    """Number of updates."""
    global_batch: int = Field(default=32, ge=1)
    """Rows that make one update, on all ranks together; the layout does not change it."""
    microbatch: int = Field(default=4, ge=1)
    """Rows that one rank computes at a time."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the initial parameters and the order of the samples."""
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
    clip_grad_norm: float | None = None
    """Largest norm of the gradient of all parameters; left out: no clipping."""
    evaluate_every: int = Field(default=100, ge=1)
    """Updates between two evaluations on held-out text; there is always one at the end."""
    evaluate_batches: int = Field(default=4, ge=1)
    """Global batches of held-out rows that one evaluation reads, at most; always the same ones."""
    log_every: int = Field(default=10, ge=1)
    """Updates between two lines of progress where there is no terminal."""
    output: str | None = None
    """Folder of metrics and pictures, relative to where the command runs; they are replaced by the next run, unless it
    resumes this one. Left out: "runs/<name of the config>"."""
    trace: bool = False
    """Measure what each stage of the pipeline does and when; a picture of the last update, and a trace of the last 20
    for Perfetto or Chrome, are left in `output`."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """How long a rank waits for another before it gives up."""


class CheckpointTable(Table):
    """[checkpoint]: what is kept of a run, so that it can go on."""

    every: int | None = Field(default=None, ge=1)
    """Updates between two saves; there is one after the last update too. Left out: nothing is saved."""
    keep: int = Field(default=2, ge=1)
    """Newest saves that stay. While the next one is written there is one more."""
    layout: Literal["pieces", "whole"] = "pieces"
    """"pieces": each rank writes what it holds; "whole": every tensor lies whole in one file."""
    background: bool = True
    """Training goes on while a save is written, from a copy in memory of what this rank writes."""
    path: str | None = None
    """Folder of the saves, relative to where the command runs, or an address such as "s3://bucket/run"; all ranks see
    it. Left out: "checkpoints" in `train.output`."""


def file_problems(model: ModelTable | None, data: DataTable | None, folder: Path) -> list[str]:
    """Problems of files that the tables name and the disk does not have."""
    problems: list[str] = []
    if data is not None:
        if data.source != PYTHON_DOCS and "*" not in data.source and not (folder / data.source).exists():
            problems.append(f'data.source: no file or directory {folder / data.source}; "{PYTHON_DOCS}" needs none')
        if data.tokenizer != BYTES and not (folder / data.tokenizer).is_file():
            problems.append(
                f'data.tokenizer: no file {folder / data.tokenizer}; give the JSON of a tokenizer or "{BYTES}"'
            )
        # A smaller vocabulary would end in an index error of an embedding, on some rank in some batch.
        vocabulary = None if model is None else model.config.get("vocab_size")
        if data.tokenizer == BYTES and isinstance(vocabulary, int) and vocabulary < 256:
            problems.append(f"model.config.vocab_size: {vocabulary} given; bytes need at least 256")
    return problems


_TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "data": DataTable,
    "train": TrainTable,
    "checkpoint": CheckpointTable,
}
_KNOWN = [*_TABLES, "mesh", "sharding", "precision", "pipeline", "tensor"]

SomeTable = TypeVar("SomeTable", bound=Table)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A configuration in which everything holds that can be checked without importing the model."""

    path: Path
    """The file it was read from."""
    model: ModelTable
    data: DataTable
    train: TrainTable
    checkpoint: CheckpointTable
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
    def output(self) -> Path:
        """Where the run writes."""
        return Path(self.train.output) if self.train.output is not None else Path("runs") / self.name

    @property
    def saves(self) -> str:
        """The folder or address of the run's saves."""
        return self.checkpoint.path if self.checkpoint.path is not None else str(self.output / "checkpoints")


def read_config(path: Path, *, overrides: Sequence[str] = (), num_processes: int = 1) -> RunConfig:
    """The configuration in `path`, changed by `overrides` ("train.steps=5"), for `num_processes` processes.

    Without a [mesh] table the mesh is `dp_shard = num_processes`. Raises `ConfigError` with every problem found.
    """
    problems: list[str] = []
    tables = _with_overrides(_read_toml(path), overrides, problems)
    problems += [unknown_setting(name, _KNOWN) for name in tables if name not in _KNOWN]
    model = _table(ModelTable, "model", tables, problems)
    data = _table(DataTable, "data", tables, problems)
    train = _table(TrainTable, "train", tables, problems)
    checkpoint = _table(CheckpointTable, "checkpoint", tables, problems)
    plan = _plan(tables, train, num_processes, problems)
    # Files are looked for here, so that a wrong path is known before processes start and import torch on every rank.
    problems += file_problems(model, data, path.parent)
    if train is not None and train.warmup_steps > train.steps:
        problems.append(f"train.warmup_steps: {train.warmup_steps} given; train.steps is only {train.steps}")
    if plan is not None and train is not None:
        # Only a plan that holds has a schedule to check: its faults would be explained twice otherwise.
        problems += _pipeline_problems(plan, train)
    if problems or model is None or data is None or train is None or checkpoint is None or plan is None:
        raise ConfigError(*problems)
    return RunConfig(path=path, model=model, data=data, train=train, checkpoint=checkpoint, plan=plan)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config {path} is not UTF-8 text, as TOML must be") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config {path} is not TOML: {error}") from error


def _with_overrides(tables: dict[str, Any], overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
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
    """The value `text` has in TOML; a bare word is a string, so that the shell's quotes are not needed twice."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _table(kind: type[SomeTable], name: str, tables: Mapping[str, Any], problems: list[str]) -> SomeTable | None:
    given = tables.get(name, {})
    if not isinstance(given, dict):
        problems.append(f"{name}: {given!r} is not a table of settings; write [{name}]")
        return None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems += [_explained(kind, name, detail) for detail in error.errors()]
        return None


def _explained(kind: type[Table], name: str, detail: ErrorDetails) -> str:
    key = ".".join([name, *map(str, detail["loc"])])
    if detail["type"] == "extra_forbidden":
        return unknown_setting(key, [f"{name}.{each}" for each in kind.model_fields])
    if detail["type"] == "missing":
        wanted = kind.model_fields[str(detail["loc"][0])].description or ""
        return f"{key}: missing; {' '.join(wanted.split())}"
    # Pydantic speaks of "input" and of types of its own; the message is to say what the key takes.
    needed = (
        detail["msg"]
        .removeprefix("Input should be ")
        .replace("a valid integer", "a whole number")
        .replace("valid ", "")
    )
    return f"{key}: {detail['input']!r} given; it must be {needed}"


def _spec(name: str, tables: Mapping[str, Any], problems: list[str]) -> Any:
    try:
        return read_strategy(name, tables.get(name, {}))
    except PlanError as error:
        problems += error.problems
        return None


def _plan(tables: Mapping[str, Any], train: TrainTable | None, num_processes: int, problems: list[str]) -> Plan | None:
    """The plan, or None when some part of it, already among `problems`, does not hold."""
    # Ranks without a word on their use share the parameters: the least memory per rank, and the same results.
    mesh = _spec("mesh", tables, problems) if "mesh" in tables else Mesh(dp_shard=num_processes)
    if mesh is not None:
        try:
            mesh.check_world(num_processes)
        except PlanError as error:
            problems += error.problems
    sharding, precision, pipeline, tensor = (
        _spec(name, tables, problems) for name in ("sharding", "precision", "pipeline", "tensor")
    )
    # The rest depends on both. What is wrong with them is among the problems already.
    if mesh is None or train is None:
        return None
    microbatches = _microbatches(train, mesh.num_data_ranks, problems)
    if sharding is None or precision is None or pipeline is None or tensor is None or microbatches is None:
        return None
    try:
        return Plan(
            mesh=mesh,
            sharding=sharding,
            precision=precision,
            pipeline=pipeline,
            tensor=tensor,
            merge=Merge(microbatches=microbatches),
            clip_grad_norm=train.clip_grad_norm,
        )
    except PlanError as error:
        # A plan calls it by its own name; in the file the key is in [train].
        problems += [f"train.{each}" if each.startswith("clip_grad_norm") else each for each in error.problems]
        return None


def _pipeline_problems(plan: Plan, train: TrainTable) -> list[str]:
    """Problems of the schedule that do not depend on the values that cross between stages."""
    if plan.mesh.pp * plan.pipeline.num_chunks == 1:
        wanted = "train.trace: true given, but the model is not cut into stages to measure; give mesh.pp ranks"
        return [wanted] if train.trace else []
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
        f"{num_data_ranks} data rank{'s' if num_data_ranks > 1 else ''}, which take {rows} at a time; "
        f"{near} can, or another train.microbatch"
    )
    return None
