"""What an engine knows of the whole model, and what it hands over to the engine of another plan."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.batches import LossOfModel, LossWeight
from shardwise.engine.optimizer_state import KnownOptimizer
from shardwise.plan import Parameter
from shardwise.space import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNames:
    """What every rank knows of the whole model, whatever part of it is here."""

    trainable: dict[str, torch.dtype]
    """The parameters that are trained, in the order of the model, and the dtype of their masters."""
    ties: dict[str, str]
    """Other names of parameters: alias -> name."""
    specs: tuple[Parameter, ...]
    """All parameters, none of them cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOver:
    """All that another engine needs to go on with the model."""

    model: nn.Module
    channel: Channel
    names: ModelNames
    state: dict[Piece, torch.Tensor]
    settings: dict[str, Any]
    loss: LossOfModel
    loss_weight: LossWeight | None
    optimizers: tuple[KnownOptimizer, ...]
