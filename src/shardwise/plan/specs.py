"""What a user asks for: the plan and its strategies, as frozen values with a text form (TOML) that parses back.

Each value checks itself when it is made and reports all problems at once. Ranks compare the text, a save keeps it, and
a configuration file may hold it. Fields appear in their order here, so a new one goes last.
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, get_args

from shardwise.errors import PlanError, plural
from shardwise.plan.dtypes import COMPUTE_DTYPES
from shardwise.plan.schedules import SCHEDULES, Schedule
from shardwise.plan.tensor_rules import rule_problems
from shardwise.space import Mesh

Partition = Literal["slice", "whole"]
Owners = Literal["all", "dp_shard"]
Offload = Literal["state", "parameters"]
Balance = Literal["parameters", "flops", "seconds"]
Sums = Literal["exact", "backend"]
Modules = tuple[str, ...] | Literal["blocks"]
"""Names or globs of modules; "blocks": the repeated ones."""

_OPERATOR = re.compile(r"\w+\.\w+(\.\w+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Who holds which part of the training state (ZeRO stages; Rajbhandari et al., 2020, arXiv:1910.02054)."""

    stage: int = 1
    """What owners have alone. 0: nothing; 1: masters and optimizer state; 2: gradients too; 3: working copies too."""
    partition: Partition = "slice"
    """`slice`: equal element runs of each flat buffer, but for parameters that their optimizer must see whole; `whole`:
    whole parameters to owners, balanced by bytes, and by the work of such updates."""
    bucket_bytes: int = 64 << 20
    """Bytes of working copy fused into one buffer and one collective; a larger parameter has a bucket to itself."""
    owners: Owners = "all"
    """`all`: masters are cut over all data ranks; `dp_shard`: over that axis only, and held once per replica."""
    units: tuple[str, ...] | None = None
    """Stage 3: names or globs of the modules whose parameters are gathered together, "." for the model itself; None:
    each repeated block."""
    keep_gathered: bool = False
    """Stage 3: gather each unit once per update and keep it for all microbatches; False: anew for each use."""
    offload: Offload | None = None
    """What is in the host's memory where ranks have devices. `state`: masters and optimizer state, which are updated
    there; `parameters`: owned parts of working copies too (stage 3); None: nothing."""

    def __post_init__(self) -> None:
        _make_tuples(self, "units")
        _raise(_sharding_problems(self))

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """The mesh axes over which masters are cut."""
        if self.stage == 0:
            return ()
        return ("dp_shard",) if self.owners == "dp_shard" else ("dp_replicate", "dp_shard")

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The data axes along which the same masters are held again."""
        return tuple(axis for axis in ("dp_replicate", "dp_shard") if axis not in self.owner_axes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """Gradient merge: gradients of several microbatches make one update."""

    microbatches: int = 1
    """Into how many microbatches a rank's batch is split (k)."""
    average: bool = True
    """Mean over the microbatches (before the norm and the clip); False: their sum."""

    def __post_init__(self) -> None:
        _raise(_at_least_one("merge.microbatches", self.microbatches) + _is_bool("merge.average", self.average))


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Which dtype each value of a step has."""

    compute: str | None = None
    """Dtype of the working copies that forward and backward read; None: each parameter's own."""
    master: str = "float32"
    """Dtype in which owners hold and update parameters; never narrower than the working copy."""
    accumulate: str = "float32"
    """Dtype in which the gradients of several microbatches are added; never narrower than the gradient."""
    reduce: str = "float32"
    """Widest dtype in which gradients travel; they are summed in `master`."""
    keep: tuple[str, ...] = ()
    """Names or globs of parameters (or of modules) that compute in master precision."""
    sums: Sums = "exact"
    """Who adds over ranks on accelerators. `exact`: the ranks, in their order, as on the CPU; `backend`: the devices'
    library (NCCL), in its own order and in the dtype that travels."""
    loss_scale: float | Literal["dynamic"] | None = None
    """A factor on losses that is taken off the gradients again; "dynamic": as in `torch.amp.GradScaler`; None: none."""

    def __post_init__(self) -> None:
        problems = [
            f"precision.{name}: {value!r} is not one of {', '.join(COMPUTE_DTYPES)}"
            for name in ("compute", "master", "accumulate", "reduce")
            if (value := getattr(self, name)) not in COMPUTE_DTYPES and not (name == "compute" and value is None)
        ]
        if not isinstance(self.keep, tuple | list) or not all(isinstance(pattern, str) for pattern in self.keep):
            problems.append(f"precision.keep: {self.keep!r} is not a tuple of names; write keep=('*norm*',)")
        problems += _one_of("precision.sums", self.sums, Sums)
        scale = self.loss_scale
        if isinstance(scale, int | float) and not isinstance(scale, bool) and 1e-30 <= scale <= 1e30:
            object.__setattr__(self, "loss_scale", float(scale))
        elif scale is not None and scale != "dynamic":
            problems.append(
                f'precision.loss_scale: {scale!r} is neither "dynamic" nor a number from 1e-30 to 1e30; leave it '
                "out, and losses are not scaled"
            )
        _raise(problems)
        object.__setattr__(self, "keep", tuple(self.keep))


Value = TypeVar("Value")


class ByName(Mapping[str, Value]):
    """Names with a value each: a mapping that does not change, equal and hashed by content, in the order given."""

    # Why not a dict: a frozen dataclass with one cannot be hashed, and the caller could change it afterwards. Equality
    # is Mapping's: two orders of the same entries are equal, so the hash must not depend on the order.

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """In what order the stages of the model run, and which module belongs to which stage.

    A mesh with `pp` ranks along that axis has `pp * num_chunks` stages. Stage s is run by the rank at `s % pp`.
    """

    schedule: str = "1f1b"
    """`fthenb`, `1f1b` or `interleaved`, or the text of a schedule, which is recognised by its line ends."""
    stages: Mapping[str, int] | None = None
    """{name or glob of modules (or of parameters outside them): stage}; None: balanced by `balance`."""
    chunks: int | None = None
    """Stages per rank; None: 2 for `interleaved`, what the text of a schedule has, else 1."""
    balance: Balance = "parameters"
    """What a balanced placement makes even: elements of parameters, counted or measured work of the forward."""

    def __post_init__(self) -> None:
        _raise(_pipeline_problems(self))
        if self.stages is not None:
            object.__setattr__(self, "stages", ByName(self.stages))

    @property
    def num_chunks(self) -> int:
        """Stages per rank, also where `chunks` is left to the schedule."""
        if self.chunks is not None:
            return self.chunks
        # A written schedule has its chunks in its heading: to ask for the number again could only contradict it.
        if "\n" in self.schedule:
            return Schedule.parse(self.schedule).num_chunks
        return 2 if self.schedule == "interleaved" else 1

    def foreign_stages(self, num_ranks: int) -> list[str]:
        """One finding for each key of `stages` with a stage that `num_ranks` ranks do not have."""
        num_stages = num_ranks * self.num_chunks
        return [
            f"pipeline.stages: {key!r} is given stage {stage}, but pp={num_ranks} with "
            f"{plural(self.num_chunks, 'stage')} per rank has the stages 0 to {num_stages - 1}"
            for key, stage in (self.stages or {}).items()
            if stage >= num_stages
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Tensor parallelism: how single parameters are cut over the ranks along `tp`, and what moves between them."""

    rules: Mapping[str, str] | Literal["auto"] | None = None
    """{name or glob of modules or parameters: rule}; "auto": the model's own plan, or one inferred from a run on a
    sample; None: no cuts.
    """
    prove: bool = True
    """Whether the first forward of each module with cuts is compared with the uncut module."""

    def __post_init__(self) -> None:
        rules = self.rules
        if not isinstance(self.prove, bool):
            raise PlanError(f"tensor.prove: {self.prove!r} is neither true nor false")
        if rules is None or rules == "auto":
            return
        if not isinstance(rules, Mapping) or not all(isinstance(each, str) for pair in rules.items() for each in pair):
            raise PlanError(
                f'tensor.rules: {rules!r} is neither "auto" nor a mapping of names to rules; write '
                "rules={'layers.*.up': 'column'}"
            )
        _raise([f"tensor.rules: {problem}" for problem in rule_problems(rules)])
        object.__setattr__(self, "rules", ByName(rules))


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """A running average of the weights: EMA, or their mean (SWA; Izmailov et al., 2018, arXiv:1803.05407)."""

    decay: float | None = None
    """The part of the average that each update keeps; the rest comes from the weights. None: the mean of all that were
    averaged."""
    every: int = 1
    """The weights are averaged after each `every`-th step, unless its update was skipped."""
    start: int = 0
    """Steps before that: the first average is taken after `start + every` of them."""
    warmup: bool = False
    """Whether the n-th update of the average keeps no more than n / (9 + n), so that it soon forgets where it began."""

    def __post_init__(self) -> None:
        decay = self.decay
        problems = _at_least_one("average.every", self.every) + _is_bool("average.warmup", self.warmup)
        if not isinstance(self.start, int) or isinstance(self.start, bool) or self.start < 0:
            problems.append(f"average.start: {self.start!r} is not a whole number of at least 0")
        if decay is None:
            if self.warmup is True:
                problems.append("average.warmup: there is no decay to warm up; give average.decay, or leave it out")
        elif isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            problems.append(
                f"average.decay: {decay!r} is not a number from 0 to below 1; leave it out for the mean of all weights"
            )
        else:
            object.__setattr__(self, "decay", float(decay))
        _raise(problems)

    def averages(self, step: int) -> bool:
        """Whether the weights are averaged after this step, counted from 1."""
        return step > self.start and (step - self.start) % self.every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What becomes of the tensors that forwards save for backward. The numbers are those without."""

    checkpoint: Modules | None = None
    """Names or globs of the modules whose inputs alone are kept: backward runs them again (Chen et al., 2016,
    arXiv:1604.06174). "blocks": each repeated block; None: no module."""
    save: tuple[str, ...] | None = None
    """Operators whose outputs checkpointed modules keep, with or without the overload: ("aten.mm",); None: none."""
    offload: Modules | None = None
    """Names or globs of the modules whose saved tensors wait in host memory; "blocks": each repeated block."""
    budget_bytes: int | None = None
    """Most bytes of saved tensors that a rank holds at a time. The first step measures, and the cheapest modules to run
    again or to offload are chosen: among those that the other fields name, without them among blocks."""

    def __post_init__(self) -> None:
        _make_tuples(self, "checkpoint", "offload", "save")
        problems = [
            f'activations.{name}: {value!r} is neither "blocks" nor a tuple of names; write {name}=("layers.*",)'
            for name in ("checkpoint", "offload")
            if (value := getattr(self, name)) is not None and value != "blocks" and not _are_names(value)
        ]
        if self.save is not None and not (
            _are_names(self.save) and all(_OPERATOR.fullmatch(each) for each in self.save)
        ):
            problems.append(
                f'activations.save: {self.save!r} is not a tuple of operators of torch; write save=("aten.mm",)'
            )
        elif self.save and self.checkpoint is None and self.budget_bytes is None:
            problems.append(
                "activations.save: given without activations.checkpoint: no module is run again, and all are saved; "
                'give checkpoint="blocks" too'
            )
        if self.budget_bytes is not None:
            problems += _at_least_one("activations.budget_bytes", self.budget_bytes)
        _raise(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A mesh and its strategies: everything that decides how a model is trained, and nothing that needs a process.

    Raises PlanError, with every problem in it, for strategies that do not fit each other.
    """

    mesh: Mesh = field(default_factory=Mesh)
    """How many ranks there are along each axis; default: one rank."""
    sharding: Sharding = field(default_factory=Sharding)
    """Who holds which part of the training state; default: stage 1."""
    merge: Merge = field(default_factory=Merge)
    """Of how many microbatches an update is made; default: one."""
    precision: Precision = field(default_factory=Precision)
    """Which dtype each value has; default: each parameter's own, with float32 masters."""
    pipeline: Pipeline = field(default_factory=Pipeline)
    """Which module is on which stage, and the order of work, where `mesh.pp` is above 1."""
    tensor: Tensor = field(default_factory=Tensor)
    """Which parameters are cut along `tp`, where `mesh.tp` is above 1."""
    clip_grad_norm: float | Mapping[str, float] | None = None
    """Largest 2-norm of the averaged gradient of all parameters; or {name of a group of `parallelize`, or name or glob
    of parameters or modules: largest 2-norm of these}; None: no clipping."""
    average: Average | None = None
    """The running average of the weights that is kept next to them; None: there is none."""
    activations: Activations = field(default_factory=Activations)
    """Which activations are kept for backward; default: all that modules save."""
    clip_grad_value: float | None = None
    """Largest absolute value of an element of the averaged gradient, after the clip by norm; None: no clipping."""

    def __post_init__(self) -> None:
        # Each strategy has checked itself. Only what needs two of them is checked here.
        problems = [
            f"{name}: {value!r} is not a {kind.__name__}"
            for name, kind in _STRATEGIES.items()
            if not isinstance(value := getattr(self, name), kind) and not (name in _OPTIONAL and value is None)
        ]
        clip = self.clip_grad_norm
        if isinstance(clip, Mapping):
            wrong = _clip_problems(clip)
            problems += wrong
            limits = clip if wrong else {name: float(most) for name, most in clip.items()}
            object.__setattr__(self, "clip_grad_norm", ByName(limits))
        for name, most in (("clip_grad_norm", clip), ("clip_grad_value", self.clip_grad_value)):
            if not (most is None or isinstance(most, Mapping) or _is_above_0(most)):
                problems.append(f"{name}: {most!r} is not a number above 0; None switches clipping off")
        # Guarded: with a value of another type the findings above are the ones that help.
        if isinstance(self.mesh, Mesh) and isinstance(self.pipeline, Pipeline):
            problems += self.pipeline.foreign_stages(self.mesh.pp)
        _raise(problems)

    def text(self) -> str:
        """The plan as TOML, one line per setting in a fixed order; `Plan.parse` gives an equal plan."""
        lines = []
        if (clip := self.clip_grad_norm) is not None:
            lines.append(f"clip_grad_norm = {toml_text(clip) if isinstance(clip, Mapping) else repr(float(clip))}")
        if self.clip_grad_value is not None:
            lines.append(f"clip_grad_value = {float(self.clip_grad_value)!r}")
        for name in _STRATEGIES:
            lines += [f"{name}.{key} = {toml_text(value)}" for key, value in _settings(getattr(self, name))]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The plan written in `text`; settings left out take their defaults. Raises PlanError with every problem."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the plan is not TOML: {error}") from None
        problems: list[str] = []
        arguments: dict[str, Any] = {}
        for name, table in tables.items():
            if name in _CLIPS:
                arguments[name] = table
            elif name not in _STRATEGIES:
                problems.append(unknown_setting(name, [*_CLIPS, *_STRATEGIES]))
            else:
                try:
                    arguments[name] = read_strategy(name, table)
                except PlanError as error:
                    problems += error.problems
        # A plan is made even after problems, for those that only show in it; `_raise` then refuses it.
        try:
            plan = cls(**arguments)
        except PlanError as error:
            raise PlanError(*problems, *error.problems) from None
        _raise(problems)
        return plan


_CLIPS = ("clip_grad_norm", "clip_grad_value")

_STRATEGIES: dict[str, type] = {
    "mesh": Mesh,
    "sharding": Sharding,
    "merge": Merge,
    "precision": Precision,
    "pipeline": Pipeline,
    "tensor": Tensor,
    "average": Average,
    "activations": Activations,
}

_OPTIONAL = frozenset({"average"})
"""Strategies that a plan may be without."""


def read_strategy(name: str, table: object) -> Any:
    """The strategy `name` (a field of `Plan`, such as "sharding") from a table of its settings, as TOML gives it.

    Raises PlanError with every problem: unknown settings, with the nearest known one, and values that cannot hold.
    """
    if not isinstance(table, dict):
        raise PlanError(f"{name}: {table!r} is not a table of settings; write [{name}]")
    kind = _STRATEGIES[name]
    # From the fields of the dataclass: a new setting can be read as soon as it exists.
    known = [spec.name for spec in dataclasses.fields(kind)]
    problems = [
        unknown_setting(f"{name}.{key}", [f"{name}.{each}" for each in known]) for key in table if key not in known
    ]
    settings = {key: value for key, value in table.items() if key in known}
    try:
        value: object = kind(**settings)
    except PlanError as error:
        raise PlanError(*problems, *error.problems) from None
    _raise(problems)
    return value


def _settings(strategy: Any) -> Iterator[tuple[str, object]]:
    for spec in () if strategy is None else dataclasses.fields(strategy):
        value = getattr(strategy, spec.name)
        if value is not None:  # TOML has no null: a setting left out is None
            yield spec.name, value


def unknown_setting(key: str, known: Sequence[str]) -> str:
    """The finding about an unknown setting, with the nearest known one."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"{key}: unknown setting" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}")


def _sharding_problems(sharding: Sharding) -> list[str]:
    problems = []
    # True equals 1: without the second test `stage=True` would be stage 1.
    if sharding.stage not in (0, 1, 2, 3) or isinstance(sharding.stage, bool):
        problems.append(f"sharding.stage: {sharding.stage!r} asked; the stages are 0, 1, 2 and 3")
    problems += _one_of("sharding.partition", sharding.partition, Partition)
    problems += _one_of("sharding.owners", sharding.owners, Owners)
    units = sharding.units
    if units is not None and not _are_names(units):
        problems.append(f"sharding.units: {units!r} is not a tuple of names of modules; write units=('layers.*',)")
    for name, given in (("units", units is not None), ("keep_gathered", sharding.keep_gathered)):
        if given and sharding.stage != 3:
            problems.append(
                f"sharding.{name}: given with stage {sharding.stage!r}, which holds all working copies all the time; "
                "give stage=3, or leave it out"
            )
    if sharding.offload is not None:
        problems += _one_of("sharding.offload", sharding.offload, Offload)
    if sharding.offload == "parameters" and sharding.stage != 3:
        problems.append(
            f"sharding.offload: 'parameters' asked with stage {sharding.stage!r}, where forwards read the working copy "
            "of the device; give stage=3, or offload='state'"
        )
    problems += _is_bool("sharding.keep_gathered", sharding.keep_gathered)
    return problems + _at_least_one("sharding.bucket_bytes", sharding.bucket_bytes)


def _pipeline_problems(pipeline: Pipeline) -> list[str]:
    problems = _schedule_problems(pipeline.schedule)
    if pipeline.chunks is not None:
        wrong = _at_least_one("pipeline.chunks", pipeline.chunks)
        if not wrong and pipeline.schedule == "1f1b" and pipeline.chunks > 1:
            wrong = [
                f"pipeline.chunks: {pipeline.chunks} asked of the schedule '1f1b', which runs one stage per rank; "
                "'interleaved' runs several"
            ]
        problems += wrong
    stages = pipeline.stages
    if wrong := _one_of("pipeline.balance", pipeline.balance, Balance):
        problems += wrong
    elif stages is not None and pipeline.balance != "parameters":
        problems.append(
            f"pipeline.balance: {pipeline.balance!r} asked, but pipeline.stages gives each module its stage; leave "
            "one of them out"
        )
    return problems + ([] if stages is None else _stages_problems(stages))


def _schedule_problems(schedule: object) -> list[str]:
    if not isinstance(schedule, str) or (schedule not in SCHEDULES and "\n" not in schedule):
        names = ", ".join(map(repr, SCHEDULES))
        return [f"pipeline.schedule: {schedule!r} is not one of {names}, nor the text of a schedule"]
    if "\n" in schedule:
        try:
            Schedule.parse(schedule)
        except PlanError as error:
            return [f"pipeline.{problem}" for problem in error.problems]
    return []


def _stages_problems(stages: object) -> list[str]:
    if not isinstance(stages, Mapping) or not all(isinstance(key, str) for key in stages):
        return [f"pipeline.stages: {stages!r} is not a mapping of names to stages; write stages={{'layers.0': 0}}"]
    if not stages:
        return ["pipeline.stages: places no module; leave it out for a balanced placement"]
    return [
        f"pipeline.stages: {key!r} is given {stage!r}, which is not a whole number of at least 0"
        + ("; in TOML a name with dots is written in quotes" if isinstance(stage, Mapping) else "")
        for key, stage in stages.items()
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0
    ]


def _clip_problems(clip: Mapping[Any, Any]) -> list[str]:
    if not clip:
        return ["clip_grad_norm: names nothing to clip; leave it out, and nothing is clipped"]
    return [
        f"clip_grad_norm: {name!r} is given {most!r}, which is not a number above 0"
        + ("; in TOML a name with dots is written in quotes" if isinstance(most, Mapping) else "")
        for name, most in clip.items()
        if not (isinstance(name, str) and _is_above_0(most))
    ]


def _is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _make_tuples(strategy: object, *names: str) -> None:
    # TOML gives lists. A frozen value needs a tuple to be hashable, and to equal the one that was written.
    for name in names:
        if isinstance(value := getattr(strategy, name), list):
            object.__setattr__(strategy, name, tuple(value))


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, str) for each in value)


def _at_least_one(name: str, value: object) -> list[str]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return []
    return [f"{name}: {value!r} is not a whole number of at least 1"]


def _one_of(name: str, value: object, choices: object) -> list[str]:
    known = get_args(choices)
    return [] if value in known else [f"{name}: {value!r} is not one of {', '.join(map(repr, known))}"]


def _is_bool(name: str, value: object) -> list[str]:
    return [] if isinstance(value, bool) else [f"{name}: {value!r} is neither True nor False"]


def _raise(problems: list[str]) -> None:
    if problems:
        raise PlanError(*problems)


def toml_text(value: object) -> str:
    """The value in TOML, on one line; a mapping becomes an inline table, sorted, as its order means nothing."""
    # Before numbers: True is an int in Python, and its repr is not TOML.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_text(each) for each in value) + "]"
    if isinstance(value, Mapping):
        entries = (f"{toml_text(name)} = {toml_text(value[name])}" for name in sorted(value))
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, str):
        # A TOML basic string: JSON's escapes are among its own, but it wants control characters escaped too.
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)
