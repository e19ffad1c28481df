"""What a rank has of a model under a plan: made once by `parallelize`, shared by all that an engine does with it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.averages.weight_averages import WeightAverages
from shardwise.engine.forward.batches import Batch, LossOfModel, LossWeight
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.forward.trained_parameters import GivenGroups, Groups
from shardwise.engine.guards.forward_writes import ModelBuffers
from shardwise.engine.guards.plain_calls import PlainCalls
from shardwise.engine.optimizers.known import KnownOptimizer, OptimizerSource
from shardwise.engine.pipeline.ties import StageTies
from shardwise.engine.step.channels import EngineChannels, RankGroups
from shardwise.engine.step.computation import Computation
from shardwise.engine.tensor.rule_inference import TensorDecision
from shardwise.engine.tensor.summed_gradients import SummedGradients
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.host_gradients import HostGradients
from shardwise.engine.zero.reduce import GradReduce
from shardwise.plan import Parameter, Placement, Plan


class ValueSource(Protocol):
    """Where the values of waiting tensors come from: the initialisers of the model, or a load."""

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and whole values of `wanted`, one after the other, in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What `parallelize` was asked for, and what is known already, on all ranks."""

    model: nn.Module
    plan: Plan
    optimizer: OptimizerSource
    loss: LossOfModel
    loss_weight: LossWeight | None
    channel: Channel
    seed: int | None
    sample: Batch | None
    groups: GivenGroups | None
    values: ValueSource | None = None
    """Of what is on the meta device; None: they are initialised."""
    placement: Placement | None = None
    """None: it is decided, as is the `decision`."""
    decision: TensorDecision | None = None
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNames:
    """What every rank knows of the whole model, including the parts that other ranks hold."""

    trainable: dict[str, torch.dtype]
    """The parameters that are trained, in the order of the model, and the dtype of their masters."""
    ties: dict[str, str]
    """Other names of parameters: alias -> name."""
    specs: tuple[Parameter, ...]
    """All parameters, none of them cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """The parts of one rank."""

    model: nn.Module
    plan: Plan
    names: ModelNames
    inventory: Inventory
    """Of what this rank owns, or owns a part of."""
    channels: EngineChannels
    ranks: RankGroups
    computation: Computation
    loss_weight: LossWeight | None
    """As `parallelize` was given it."""
    buffers: FlatParams
    gradients: GradReduce
    host_gradients: HostGradients | None
    """Where masters are on the host."""
    ties: StageTies
    model_buffers: ModelBuffers
    optimizers: tuple[KnownOptimizer, ...]
    averages: WeightAverages | None
    summed: SummedGradients
    plain_calls: PlainCalls
    tensor_decision: TensorDecision
    groups: Groups
    counters: Counters
