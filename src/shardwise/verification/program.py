"""The subject of a verification: a program of one process, and a plan that has to give the same numbers.

plan               one_process_plan          the batch of an update, 8 rows
2 data ranks,      one rank,                 rank 0: rows 0-3 as microbatches 0-1, 2-3;  rank 1: 4-5, 6-7
2 microbatches     4 microbatches            one process: 0-1, 2-3, 4-5, 6-7
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardwise.comm import Channel
from shardwise.engine import Engine, parallelize
from shardwise.engine.forward.batches import (
    Batch,
    BatchRows,
    LossFunction,
    LossWeight,
    RowDims,
    count_rows,
    moved_to,
    rows_of,
    split_batch,
    with_tensors,
)
from shardwise.engine.optimizers.known import OptimizerFunction
from shardwise.errors import BatchError, ModelError, PlanError
from shardwise.plan import Merge, Plan, Sharding
from shardwise.space import Mesh
from shardwise.verification.run_recording import NotedLosses

Scheduler: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]
"""f(an optimizer) -> its learning-rate scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model, its data and its optimizer."""

    make_model: Callable[[], nn.Module]
    """Called on every rank and for the one process, each time after `torch.manual_seed(seed)`."""
    plan: Plan
    """The layout. Its microbatches are those of one data rank."""
    batches: Sequence[Batch]
    """The rows of all data ranks, one batch per update."""
    optimizer_of: Callable[[nn.Module], OptimizerFunction]
    """f(the model) -> its optimizer function, which may have to know the names of parameters."""
    loss_of: Callable[[nn.Module], LossFunction | None]
    """f(the model) -> its loss function, which may call parts of it."""
    loss_weight: LossWeight | None = None
    scheduler: Scheduler | None = None
    seed: int = 0
    turns_of: Callable[[nn.Module], Callable[[int], Mapping[str, Any]]] = lambda model: lambda update: {}
    """f(the model) -> f(an update, counted from 1) -> further arguments of its `engine.step`."""
    groups: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    row_dims: RowDims = 0
    """Where rows are, as `rows` of `parallelize`."""
    left_out: tuple[str, ...] = field(init=False, default=())
    """Settings of the plan that the verification leaves out, or does not look at."""

    def parallelized(
        self, model: nn.Module, plan: Plan, channel: Channel, noted: NotedLosses, sample: Batch | None = None
    ) -> Engine[nn.Module]:
        """A model that `make_model` has made, under a plan; its losses are noted."""
        return parallelize(
            model,
            plan,
            optimizer=self.optimizer_of(model),
            loss=noted.of(self.loss_of(model)),
            loss_weight=self._weighs_on_host(),
            channel=channel,
            seed=self.seed,
            sample=sample,
            rows=self.row_dims,
            groups=self.groups,
        )

    def _weighs_on_host(self) -> LossWeight | None:
        # The host has to know what has no weight: an engine computes nothing of it, and numbers the others.
        weight, host = self.loss_weight, torch.device("cpu")
        return None if weight is None else lambda microbatch: weight(moved_to(microbatch, host))

    @property
    def rows(self) -> BatchRows:
        """Where rows are."""
        return BatchRows(self.row_dims)

    def __post_init__(self) -> None:
        # Gradients are compared as they are before these clips, which would hide faults: a value at its limit is right
        # whatever it was. An average changes no update.
        if not isinstance(self.plan, Plan):
            return
        without: dict[str, Any] = {}
        if isinstance(self.plan.clip_grad_norm, Mapping):
            without["clip_grad_norm"] = None
        for name in ("clip_grad_value", "average"):
            if getattr(self.plan, name) is not None:
                without[name] = None
        object.__setattr__(self, "left_out", tuple(without))
        object.__setattr__(self, "plan", replace(self.plan, **without))

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see other samples."""
        return self.plan.mesh.num_data_ranks

    @property
    def num_microbatches(self) -> int:
        """Of all data ranks together, per update."""
        return self.num_data_ranks * self.plan.merge.microbatches

    @property
    def one_process_plan(self) -> Plan:
        """The same without ranks: one process goes through the microbatches of all data ranks, in their order."""
        return Plan(
            mesh=Mesh(),
            sharding=Sharding(stage=0),
            merge=Merge(microbatches=self.num_microbatches, average=self.plan.merge.average),
            # Precision and clipping are arithmetic, and equal on both sides. Sharding, stages and tensor parallelism
            # are the layout: the one process has none of them.
            precision=self.plan.precision,
            clip_grad_norm=self.plan.clip_grad_norm,
        )

    def check(self) -> None:
        """Raise unless ranks and the one process can begin, and cut every batch into the same microbatches.

        BatchError, ModelError or PlanError.
        """
        # A module is callable too, and calling it would run its forward.
        if isinstance(self.make_model, nn.Module) or not callable(self.make_model):
            raise ModelError(
                f"make_model is a {type(self.make_model).__name__}; give a function that builds the model anew "
                "each time (its class, say, not an instance)"
            )
        if not isinstance(self.plan, Plan):
            raise PlanError(f"plan is a {type(self.plan).__name__}; give sw.Plan(mesh=sw.Mesh(..))")
        if not isinstance(self.batches, Sequence) or not all(isinstance(each, Mapping) for each in self.batches):
            raise BatchError(
                "batches are no list of dicts of tensors; give one dict for each update, from data.collate in a "
                "configuration"
            )
        if not self.batches:
            raise BatchError("there is no batch to verify with; give one for each update")
        for step, batch in enumerate(self.batches):
            # Unequal microbatches would be cut at other rows in one process than on the data ranks.
            if (num_rows := count_rows(batch, self.rows)) % self.num_microbatches or not num_rows:
                raise BatchError(
                    f"batch {step} has {num_rows} rows, and cannot be cut into {self.num_microbatches} equal "
                    f"microbatches ({self.plan.merge.microbatches} for each of {self.num_data_ranks} data ranks); "
                    f"give a multiple of {self.num_microbatches}"
                )

    def share(self, batch: Batch, data_rank: int) -> dict[str, Any]:
        """The rows of a batch that a data rank sees, with tensors for arrays."""
        num_rows = count_rows(batch, self.rows) // self.num_data_ranks
        start = data_rank * num_rows
        share: dict[str, Any] = with_tensors(rows_of(batch, range(start, start + num_rows), self.rows))
        return share

    def as_ranks_have_it(self, batch: Batch, device: torch.device) -> Any:
        """A batch for the one process: on a device each microbatch lies in memory as on its rank."""
        # Kernels round by the alignment of what they read, and a device gets a copy of each share.
        if device.type == "cpu":
            return batch
        shares = (self.share(batch, each) for each in range(self.num_data_ranks))
        parts = (split_batch(each, self.plan.merge.microbatches, device, self.rows) for each in shares)
        return [*chain.from_iterable(parts)]

    def build(self) -> nn.Module:
        """The model, with the same initial parameters each time."""
        torch.manual_seed(self.seed)
        return self.make_model()
