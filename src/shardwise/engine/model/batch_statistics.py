"""SyncBatchNorm: statistics of a microbatch's rows on all data ranks, as one process has them.

Torch's own sums over the default process group. Shardwise makes none, and a user's has the ranks along tp and pp in it.

    rank 0  rows 0 1 2   sum, count  --+                     --+
                                       +--> mean  --> squares  +--> variance     and the same sums again in backward
    rank 1  rows 3 4     sum, count  --+                     --+
"""

from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm import Channel
from shardwise.engine.forward.layers import APART, OfEngine, Place, wrap
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.tensor.tp_collectives import TpCollectives
from shardwise.engine.torch_private import check_input_of_norm
from shardwise.errors import ModelError


def synchronised_in(model: nn.Module) -> list[nn.SyncBatchNorm]:
    """The modules whose statistics are of all data ranks. Raises ModelError for those that mean others."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            if module.process_group is not None or type(module).forward is not nn.SyncBatchNorm.forward:
                own = "forward" if module.process_group is None else "process_group"
                raise ModelError(
                    f"{name!r} is a {type(module).__name__} with its own {own}, and its statistics would not be "
                    "those of all data ranks. Use torch.nn.SyncBatchNorm without a process_group, or BatchNorm for "
                    "statistics of each rank's rows"
                )
            found.append(module)
    return found


def synchronise(model: nn.Module, channel: Channel, random: KeyedRandom) -> None:
    """Put the sums over the ranks of `channel` into the forwards."""
    if channel.size > 1:
        collectives = TpCollectives(channel, "statistics of SyncBatchNorm")
        for module in synchronised_in(model):
            wrap(module, _OfAllRows(collectives, random))


class _Summed(torch.autograd.Function):
    """The sum over all ranks. Each rank has its own loss, so that backward sums too."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, collectives: TpCollectives) -> torch.Tensor:
        ctx.collectives = collectives
        return collectives.sum_of(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.collectives), None


def _sum(value: torch.Tensor, collectives: TpCollectives) -> torch.Tensor:
    return cast("torch.Tensor", _Summed.apply(value, collectives))  # type: ignore[no-untyped-call]


class _OfAllRows(OfEngine):
    """The forward of a SyncBatchNorm."""

    place = Place.CLASS

    def __init__(self, collectives: TpCollectives, random: KeyedRandom) -> None:
        self._collectives = collectives
        self._random = random

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self.module
        assert isinstance(module, nn.SyncBatchNorm)
        # Outside of the steps of all ranks a call is of this rank alone.
        if not module.training or self._random.active is None or APART in vars(module):
            return cast("torch.Tensor", self.forward(*args, **kwargs))
        (given,) = (*args, *kwargs.values())
        check_input_of_norm(module, given)
        x = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
        dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        own = torch.cat([x.sum(dims), x.new_full((1,), x.numel() // x.shape[1])])
        *_, count = total = _sum(own, self._collectives)
        mean = total[:-1] / count
        centred = x - mean.view(shape)
        variance = _sum(centred.square().sum(dims), self._collectives) / count
        if module.track_running_stats:
            _track(module, mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)).detach())
        output = centred * (variance + module.eps).rsqrt().view(shape)
        if module.weight is not None:
            output = output * module.weight.view(shape)
        if module.bias is not None:
            output = output + module.bias.view(shape)
        return cast("torch.Tensor", output.to(given.dtype))


@torch.no_grad()
def _track(module: nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    for running, now in ((module.running_mean, mean), (module.running_var, variance)):
        assert running is not None
        weight = module.momentum if module.momentum is not None else 1 / module.num_batches_tracked.to(running.dtype)
        running.lerp_(now.to(running.dtype), weight)
