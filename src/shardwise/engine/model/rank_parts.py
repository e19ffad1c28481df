"""What a rank has of a model under a plan, made once by `parallelize`; and what that costs it, by `plan.memory`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.device.sums import sums_of
from shardwise.engine.forward.batches import Batch, LossOfModel
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.forward.trained_parameters import GivenGroups, Groups
from shardwise.engine.guards.forward_writes import ModelBuffers
from shardwise.engine.guards.plain_calls import PlainCalls
from shardwise.engine.optimizers.known import KnownOptimizer, OptimizerSource
from shardwise.engine.optimizers.matrix_updates import MatrixUpdates
from shardwise.engine.pipeline.ties import StageTies
from shardwise.engine.step.channels import EngineChannels
from shardwise.engine.step.computation import Computation
from shardwise.engine.step.edges import StateEntry
from shardwise.engine.tensor.summed_gradients import SummedGradients
from shardwise.engine.tensor.tensor_decision import TensorDecision
from shardwise.engine.zero.flat_params import FlatParams, Owned
from shardwise.engine.zero.grad_buffers import HostGradients
from shardwise.engine.zero.reduce import GradReduce
from shardwise.engine.zero.unshard import Unshard
from shardwise.plan import Footprint, OwnedLayout, Parameter, Placement, Plan, Traffic, footprint, traffic
from shardwise.plan.memory import average_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What is known before `parallelize` looks at the model, on all ranks: of an engine that had it."""

    is_filled_later: bool = False
    """Values of what is on the meta device come afterwards; else they are initialised."""
    placement: Placement | None = None
    """None: it is decided, as is the `decision`."""
    decision: TensorDecision | None = None
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What `parallelize` was asked for."""

    loss: LossOfModel
    """With the model."""
    plan: Plan
    optimizer: OptimizerSource
    channel: Channel
    seed: int | None
    sample: Batch | None
    groups: GivenGroups | None
    settled: Settled = field(default_factory=Settled)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNames:
    """What every rank knows of the whole model, including the parts that other ranks hold."""

    trainable: dict[str, torch.dtype]
    """The parameters that are trained, in the order of the model, and the dtype of their masters."""
    ties: dict[str, str]
    """Other names of parameters: alias -> name."""
    specs: tuple[Parameter, ...]
    """All parameters, none of them cut."""
    groups: Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTensors:
    """What one rank keeps of a model, and where it is."""

    held: Inventory
    """The parameters with which it computes."""
    owned: Inventory
    """Those of them that it owns, or owns a part of: their gradients end on its stage."""
    layout: OwnedLayout
    buffers: FlatParams
    ties: StageTies
    model_buffers: ModelBuffers


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGradients:
    """How gradients get to their owners, and become whole."""

    reduced: GradReduce
    on_host: HostGradients | None
    """Where masters are on the host."""
    summed: SummedGradients
    """Along tp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUpdates:
    """What updates the masters of one rank."""

    optimizers: tuple[KnownOptimizer, ...]
    updated: Sequence[Owned]
    """What they have."""
    matrices: MatrixUpdates | None
    averages: StateEntry | None
    plain_calls: PlainCalls
    """What must not update them."""
    counters: Counters

    def name_of(self) -> dict[torch.Tensor, str]:
        """The names of the parameters that the optimizers have."""
        return {each.parameter: each.segment.name for each in self.updated}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """One rank of a model under a plan."""

    model: nn.Module
    plan: Plan
    names: ModelNames
    channels: EngineChannels
    tensors: RankTensors
    gradients: RankGradients
    updates: RankUpdates
    computation: Computation


def footprint_of(rank: RankParts, num_microbatches: int) -> Footprint:
    """Bytes that the buffers of a rank take."""
    plan, tensors, matrices = rank.plan, rank.tensors, rank.updates.matrices
    layout, ties, owner = tensors.layout, tensors.ties, rank.channels.owners.rank
    channel = rank.channels.world  # the others move tensors as it does
    is_offloaded = plan.sharding.offload is not None and channel.device.type != "cpu"
    owned = footprint(
        layout,
        owner,
        plan.precision,
        num_microbatches=num_microbatches,
        keeps=plan.sharding.keep_gathered,
        sums=sums_of(channel),
        goes_ahead=channel.progresses_alone,
        offload=plan.sharding.offload if is_offloaded else None,
    )
    if matrices is not None:
        whole, messages = matrices.held_bytes
        # Where masters are on the host, messages are put together there, and pass through the device.
        owned = replace(
            owned,
            owned_elements=owned.owned_elements + matrices.added_elements,
            updating_bytes=messages + (0 if is_offloaded else whole),
            host_bytes=owned.host_bytes + (whole + messages if is_offloaded else 0),
        )
    return replace(
        owned,
        working_bytes=owned.working_bytes + ties.replica_bytes(),
        gradient_bytes=owned.gradient_bytes + ties.gradient_bytes(num_microbatches),
        # What no flat buffer has.
        frozen_bytes=tensors.held.num_bytes(but=[tensors.buffers.holds, ties.held.parameters.__contains__]),
        average_bytes=0 if plan.average is None else average_bytes(layout.ownership, owner),
    )


def traffic_of(rank: RankParts, num_microbatches: int) -> Traffic:
    """Bytes of gradients and parameters that a rank sends per update.

    The number of gatherings is that of the last step, if it had as many microbatches. Else it follows from the order of
    units in the model.
    """
    layout, ties, matrices = rank.tensors.layout, rank.tensors.ties, rank.updates.matrices
    passes, runner = rank.computation.forwards.passes, rank.computation.runner
    schedule = None if runner is None else runner.schedule
    actions = None
    if runner is not None and schedule is not None and schedule.num_microbatches == num_microbatches:
        actions = [(each.kind, each.stage) for each in schedule.orders[runner.stages.rank]]
    owned = traffic(
        layout,
        rank.channels.owners.rank,
        rank.plan.precision,
        num_microbatches=num_microbatches,
        gathers=passes.gathers_in(num_microbatches, actions) if isinstance(passes, Unshard) else None,
    )
    sent_gradients, sent_values = (0, 0) if matrices is None else matrices.sent_bytes
    return Traffic(
        reduce_bytes=owned.reduce_bytes + ties.sent_gradient_bytes(num_microbatches) + sent_gradients,
        gather_bytes=owned.gather_bytes + ties.sent_value_bytes() + sent_values,
    )
