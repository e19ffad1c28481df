"""Puts the styles of a plan around the modules of a model."""

from torch import nn

from shardwise.comm import Channel
from shardwise.engine.tensor.movements import Movements
from shardwise.engine.tensor.styles import STYLES, ColumnStyle, SharedInputs
from shardwise.engine.tensor.vocabulary import forget_heads, know_head
from shardwise.engine.wrapping import unwrap, wrap
from shardwise.plan.tensor_plan import TensorPlan


class TensorParallel:
    """The modules of one rank under a plan of tensor parallelism; their parameters are this rank's portions."""

    def __init__(self, model: nn.Module, plan: TensorPlan, channel: Channel) -> None:
        forget_heads(model)
        shared = SharedInputs()
        for name, styles in plan.styles.items():
            module = model.get_submodule(name)
            movements = Movements(channel, f"tensor parallelism of {name or 'the model'}", module=name)
            for style in styles:
                styled = STYLES[style.kind](name, style, movements, shared)
                wrap(module, styled)
                if isinstance(styled, ColumnStyle) and not style.gathers:
                    know_head(module, styled)

    @staticmethod
    def take_off(model: nn.Module) -> None:
        """Give the modules that an earlier plan changed their own forwards back."""
        unwrap(model)
        forget_heads(model)
