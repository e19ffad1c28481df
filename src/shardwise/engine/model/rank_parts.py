"""What a rank has of a model under a plan: made once by `parallelize`, shared by all that an engine does with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.comm import Channel
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
from shardwise.engine.zero.host_gradients import HostGradients
from shardwise.engine.zero.reduce import GradReduce
from shardwise.plan import OwnedLayout, Parameter, Placement, Plan


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
