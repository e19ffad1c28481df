"""From a TOML file and `--set` words to a checked configuration, before torch is imported or a process started."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.errors import ConfigError, PlanError
from shardwise.plan import Merge, Plan
from shardwise.plan.schedule_check import check
from shardwise.plan.schedules import make_schedule
from shardwise.plan.specs import read_strategy, unknown_setting
from shardwise.space import Mesh
from shardwise.train.tables import CheckpointTable, DataTable, ModelTable, Table, TrainTable, file_problems

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
    problems += file_problems(model, data, path.parent)
    if train is not None and train.warmup_steps > train.steps:
        problems.append(f"train.warmup_steps: {train.warmup_steps} given; train.steps is only {train.steps}")
    if plan is not None and train is not None:
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
    mesh = _spec("mesh", tables, problems) if "mesh" in tables else Mesh(dp_shard=num_processes)
    if mesh is not None:
        try:
            mesh.check_world(num_processes)
        except PlanError as error:
            problems += error.problems
    sharding, precision, pipeline, tensor = (
        _spec(name, tables, problems) for name in ("sharding", "precision", "pipeline", "tensor")
    )
    if mesh is None or train is None:
        return None
    microbatches = _microbatches(train, mesh.dp_replicate * mesh.dp_shard, problems)
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
        problems += [f"train.{each}" if each.startswith("clip_grad_norm") else each for each in error.problems]
        return None


def _pipeline_problems(plan: Plan, train: TrainTable) -> list[str]:
    """What is wrong with the schedule, as far as it does not depend on what the model moves between stages."""
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
