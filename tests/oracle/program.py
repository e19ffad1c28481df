"""A program: what a user would run in one process. `programs.py` has the table of them, and says how to use them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import nn

import shardwise as sw
from tests.oracle.batches import Batch

Loss = Callable[[Any, Batch], torch.Tensor]
LossOfBatch = Callable[[Batch], torch.Tensor]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Module = TypeVar("Module", bound=nn.Module)

WIDE = " in float64"
"""What the name of `Program.in_float64` ends in."""


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, weight decay and a step count per parameter: what an update too many or too few would show in."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def seeded(make: Callable[[], Module]) -> Callable[[], Module]:
    """`make` with the same random numbers at every call."""

    def build() -> Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return build


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A model, the batches that it trains on, and where a plan may cut it."""

    make: Callable[[], nn.Module]
    """The same values at every call."""
    batches: Sequence[Batch]
    """One update each; the first is evaluated at the end."""
    loss: Loss | None = None
    """None: the model is called with the whole microbatch and gives its own."""
    loss_with: Callable[[nn.Module], LossOfBatch] | None = None
    """Instead of `loss`: of the model, a loss that is given the microbatch alone."""
    loss_weight: Callable[[Batch], float] | None = None
    rows: Any = 0
    """Which dims of a batch's tensors have its rows, as `parallelize` is told it."""
    counts: Sequence[int] | None = None
    """How many microbatches each update has on a rank; None: what the plan says."""
    optimizer: Optimizers = adamw
    stages: Mapping[str, int] | None = None
    """The cut into `num_stages`; fewer stages take neighbours together. None: balanced."""
    num_stages: int = 4
    rules: Mapping[str, str] | Literal["auto"] | None = None
    """The cut along tp; None: there is none."""
    make_plain: Callable[[], nn.Module] | None = None
    """The same model as masters are: in row-major memory, with dense gradients; None: it is so."""
    make_oracle: Callable[[], nn.Module] | None = None
    """The same model, written so that one process adds gradients in the order of stages; None: it does anyway."""
    has_order: bool = True
    """Whether stages add the gradients of values in an order that one process has."""
    keep: tuple[str, ...] = ()
    """What computes in float32 under a precision that says nothing of it."""
    rounds_by_hand: bool = False
    """Whether the oracle's model itself casts around what `keep` keeps."""
    draws: bool = False
    """Whether it draws random numbers: one process in plain torch draws in another order than an engine."""
    of_whole_batches: bool = False
    """Whether data ranks compute as one, as a batch norm of all ranks does: one process has all rows at once."""
    relative: float = 1e-10
    """How near the float64 of another order of sums has to be, of the largest element of a tensor: see `comparison.py`.
    More where a model computes its loss in float32 whatever it is in."""
    noise: tuple[str, ...] = ()
    """Endings of parameters whose gradient is nothing but rounding."""
    name: str = ""
    """In the table."""

    def stages_for(self, num_stages: int) -> Mapping[str, int] | None:
        """The cut into `num_stages`."""
        if self.stages is None:
            return None
        return {name: stage * num_stages // self.num_stages for name, stage in self.stages.items()}

    def oracle(self, *, has_stages: bool = True) -> nn.Module:
        """The model for one process, which is compared with stages or not."""
        of_stages = self.make_oracle if has_stages else None
        return (of_stages or self.make_plain or self.make)()

    def loss_of(self, model: nn.Module, part: Batch, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The loss of one microbatch in one process; `dtype`: of what the model is given, if it computes in another."""
        if self.loss_with is not None:
            return self.loss_with(model)(part)
        given = part if dtype is None else {name: _as(dtype, value) for name, value in part.items()}
        if self.loss is not None:
            whose: nn.Module = getattr(model, "module", model)  # where another library wraps it
            names = inspect.signature(whose.forward).parameters
            return self.loss(model(**{name: value for name, value in given.items() if name in names}), part)
        output = model(**given)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output["loss"]
        return loss

    def engine(self, plan: sw.Plan, channel: sw.Channel, **settings: Any) -> sw.Engine:
        """An engine of a model of its own; `settings` are further arguments of `parallelize`."""
        model = self.make()
        given: dict[str, Any] = {
            "optimizer": self.optimizer,
            "loss": self.loss if self.loss_with is None else self.loss_with(model),
            "loss_weight": self.loss_weight,
            "rows": self.rows,
            "channel": channel,
            "seed": 7 if self.draws else None,
        }
        return sw.parallelize(model, plan, **{**given, **settings})

    def in_float64(self) -> "Program":
        """The same in float64, where another order of sums is the only difference that is left, and a tiny one."""

        def double(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            return lambda: make().double()

        return replace(
            self,
            make=double(self.make),
            make_plain=double(self.make_plain) if self.make_plain else None,
            make_oracle=double(self.make_oracle) if self.make_oracle else None,
            batches=[{name: _as(torch.float64, value) for name, value in batch.items()} for batch in self.batches],
            name=f"{self.name}{WIDE}" if self.name else "",
        )

    @cache  # noqa: B019, as many as the table has
    def is_wide(self) -> bool:
        """Whether it is in float64 by itself."""
        return any(each.dtype == torch.float64 for each in self.make().parameters())

    @cache  # noqa: B019, as many as the table has
    def is_tied(self) -> bool:
        """Whether a parameter has several names."""
        names = [id(each) for _, each in self.make().named_parameters(remove_duplicate=False)]
        return len(names) > len(set(names))


def _as(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def plan_of(
    program: Program,
    mesh: sw.Mesh | str = "single",
    *,
    k: int = 1,
    schedule: str = "1f1b",
    chunks: int | None = None,
    clip: float | None = None,
    sharding: sw.Sharding | None = None,
    merge: sw.Merge | None = None,
    **settings: Any,
) -> sw.Plan:
    """A plan that cuts `program` where it says. `settings`: fields of `Plan`, and of `Sharding` (stage=3).

    Buckets are so small that there are several.
    """
    mesh = sw.Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    of_sharding = {name: settings.pop(name) for name in list(settings) if name in sw.Sharding.__dataclass_fields__}
    pipeline = sw.Pipeline()
    if mesh.pp > 1:
        num_stages = mesh.pp * sw.Pipeline(schedule=schedule, chunks=chunks).num_chunks
        pipeline = sw.Pipeline(schedule=schedule, chunks=chunks, stages=program.stages_for(num_stages))
    precision = settings.pop("precision", sw.Precision())
    if precision.compute and not precision.keep:
        precision = replace(precision, keep=program.keep)
    if mesh.tp > 1:
        settings.setdefault("tensor", sw.Tensor(rules=program.rules))
    return sw.Plan(
        mesh=mesh,
        sharding=sharding or sw.Sharding(**{"bucket_bytes": 600, **of_sharding}),
        merge=merge or sw.Merge(microbatches=k),
        pipeline=pipeline,
        clip_grad_norm=clip,
        precision=precision,
        **settings,
    )
