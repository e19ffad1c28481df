"""What is verified: a program of one process, and a plan that has to give the same numbers.

plan               one_process_plan          an update, 8 rows
2 data ranks,      one rank,                 rank 0: rows 0-3 as microbatches 0-1, 2-3;  rank 1: 4-5, 6-7
2 microbatches     4 microbatches            one process: 0-1, 2-3, 4-5, 6-7
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardwise.engine import Engine
from shardwise.engine.forward.batches import (
    Batch,
    BatchRows,
    LossFunction,
    RowDims,
    count_rows,
    rows_of,
    with_tensors,
)
from shardwise.engine.optimizers.known import OptimizerFunction
from shardwise.errors import BatchError, ModelError, PlanError
from shardwise.plan import Merge, Plan, Sharding
from shardwise.space import Mesh

Scheduler: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]
"""f(an optimizer) -> its learning-rate scheduler."""

Program: TypeAlias = Callable[[Callable[..., Engine[Any]]], object]
"""f(parallelize) trains: it makes a model, gives it to `parallelize`, and calls `engine.step` for each update.

`parallelize` is that of shardwise with the plan and the ranks filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A program and its layout."""

    program: Program
    """Called on every rank, and in the one process."""
    plan: Plan
    """The layout. Its microbatches are those of one data rank."""
    num_updates: int
    """So many are compared at most; the program is left after them."""
    left_out: tuple[str, ...] = field(init=False, default=())
    """Settings of the plan that the verification leaves out, or does not look at."""

    def __post_init__(self) -> None:
        if not callable(self.program):
            raise ModelError(
                f"program is a {type(self.program).__name__}; give a function of parallelize that trains a model"
            )
        if not isinstance(self.plan, Plan):
            raise PlanError(f"plan is a {type(self.plan).__name__}; give sw.Plan(mesh=sw.Mesh(..))")
        # Gradients are compared as they are before these clips, which would hide faults: a value at its limit is right
        # whatever it was. An average changes no update.
        without: dict[str, Any] = {}
        if isinstance(self.plan.clip_grad_norm, Mapping):
            without["clip_grad_norm"] = None
        for name in ("clip_grad_value", "average"):
            if getattr(self.plan, name) is not None:
                without[name] = None
        object.__setattr__(self, "left_out", tuple(without))
        object.__setattr__(self, "plan", replace(self.plan, **without))

    @property
    def layout_plan(self) -> Plan:
        """The plan of the ranks."""
        # What the proof of tensor.rules would refuse is to be found and named here, and its calls are no step's.
        return replace(self.plan, tensor=replace(self.plan.tensor, prove=False))

    @property
    def one_process_plan(self) -> Plan:
        """The same without ranks: one process goes through the microbatches of all data ranks, in their order."""
        return Plan(
            mesh=Mesh(),
            sharding=Sharding(stage=0),
            merge=Merge(
                microbatches=self.plan.mesh.num_data_ranks * self.plan.merge.microbatches,
                average=self.plan.merge.average,
            ),
            # Precision and clipping are arithmetic, and equal on both sides. Sharding, stages and tensor parallelism
            # are the layout: the one process has none of them.
            precision=self.plan.precision,
            clip_grad_norm=self.plan.clip_grad_norm,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainProgram:
    """The program that makes one update for each batch of a list."""

    make_model: Callable[[], nn.Module]
    """Called each time after `torch.manual_seed(seed)`."""
    batches: Sequence[Batch]
    """The rows of all data ranks, one batch per update."""
    optimizer_of: Callable[[nn.Module], OptimizerFunction]
    """f(the model) -> its optimizer function, which may have to know the names of parameters."""
    loss_of: Callable[[nn.Module], LossFunction | None]
    """f(the model) -> its loss function, which may call parts of it."""
    scheduler: Scheduler | None = None
    seed: int = 0
    turns_of: Callable[[nn.Module], Callable[[int], Mapping[str, Any]]] = lambda model: lambda update: {}
    """f(the model) -> f(an update, counted from 1) -> further arguments of its `engine.step`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `parallelize`."""

    def __call__(self, parallelize: Callable[..., Engine[Any]]) -> None:
        """Train."""
        torch.manual_seed(self.seed)
        model = self.make_model()
        turns = self.turns_of(model)
        engine = parallelize(
            model,
            optimizer=self.optimizer_of(model),
            loss=self.loss_of(model),
            seed=self.seed,
            sample=self._rows(self.batches[0]),
            **self.settings,
        )
        schedulers = [self.scheduler(each) for each in engine.optimizers] if self.scheduler else []
        ranks, own = engine.plan.mesh.num_data_ranks, engine.plan.mesh.data_rank(engine.channel.rank)
        for update, batch in enumerate(self.batches, 1):
            report = engine.step(self._rows(batch, own, ranks), **turns(update))
            for scheduler in schedulers if not report.skipped else ():
                scheduler.step()

    def _rows(self, batch: Batch, share: int = 0, shares: int = 1) -> Any:
        """The rows of one of so many shares, with tensors for arrays."""
        rows = self._row_dims
        size = count_rows(batch, rows) // shares
        return with_tensors(rows_of(batch, range(share * size, (share + 1) * size), rows))

    @property
    def _row_dims(self) -> BatchRows:
        dims: RowDims = self.settings.get("rows", 0)
        return BatchRows(dims)

    def check(self, plan: Plan) -> None:
        """Raise unless ranks and the one process can begin, and cut every batch into the same microbatches.

        BatchError, ModelError or PlanError.
        """
        # A module is callable too, and calling it would run its forward.
        if isinstance(self.make_model, nn.Module) or not callable(self.make_model):
            raise ModelError(
                f"make_model is a {type(self.make_model).__name__}; give a function that builds the model anew "
                "each time (its class, say, not an instance)"
            )
        if not isinstance(self.batches, Sequence) or not all(isinstance(each, Mapping) for each in self.batches):
            raise BatchError(
                "batches are no list of dicts of tensors; give one dict for each update, from data.collate in a "
                "configuration"
            )
        if not self.batches:
            raise BatchError("there is no batch to verify with; give one for each update")
        for step, batch in enumerate(self.batches):
            check_rows(step, count_rows(batch, self._row_dims), plan.merge.microbatches, plan.mesh.num_data_ranks)


def check_rows(step: int, num_rows: int, microbatches: int, ranks: int) -> None:
    """Raise BatchError for rows that make no equal microbatches on so many data ranks."""
    # Unequal microbatches would be cut at other rows in one process than on the data ranks.
    whole = microbatches * ranks
    if num_rows % whole or not num_rows:
        of_each = f" ({microbatches} for each of {ranks} data ranks)" if ranks > 1 else ""
        raise BatchError(
            f"batch {step} has {num_rows} rows, and cannot be cut into {whole} equal microbatches{of_each}; "
            f"give a multiple of {whole}"
        )
