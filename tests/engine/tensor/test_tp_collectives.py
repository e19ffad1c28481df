"""Collectives along tp: sums are rounded once, what moved may be written to, and gradients of gradients move too."""

import pytest
import torch

import shardwise as sw
from shardwise.engine.tensor.tp_collectives import TpCollectives


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_sum_is_rounded_once_and_equal_on_all_ranks(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = values.float()
    expected = (wide[0] + wide[1] + wide[2]).to(dtype)  # rank order

    def on_rank(channel: sw.Channel) -> torch.Tensor:
        return TpCollectives(channel, "test").all_reduce(values[channel.rank])

    for total in sw.simulate(3, on_rank):
        assert torch.equal(total, expected)


def test_what_moved_may_be_written_to_in_place() -> None:
    def on_rank(channel: sw.Channel) -> torch.Tensor:
        value = torch.ones(4, requires_grad=True)
        collectives = TpCollectives(channel, "test")
        ranges = [((0, 2),), ((2, 4),)]
        (collectives.all_reduce(value).add_(1) * 2).sum().backward()
        collectives.all_gather(collectives.scatter(value, 0, ranges).mul_(3), 0, ranges).mul_(5).sum().backward()
        assert value.grad is not None
        return value.grad

    assert all(torch.equal(each, torch.full((4,), 2.0 + 15.0)) for each in sw.simulate(2, on_rank))


def test_gradients_of_gradients_move_too() -> None:
    def on_rank(channel: sw.Channel) -> torch.Tensor:
        value = torch.tensor([2.0], requires_grad=True)
        collectives = TpCollectives(channel, "test")
        total = collectives.all_reduce(collectives.copy_to_ranks(value) ** 3 * (channel.rank + 1))  # 3 x^3
        (first,) = torch.autograd.grad(total.sum(), value, create_graph=True)
        (second,) = torch.autograd.grad(collectives.all_reduce(collectives.copy_to_ranks(first) * 0.5), value)
        return torch.stack([first.detach(), second])

    assert all(torch.equal(each, torch.tensor([[36.0], [36.0]])) for each in sw.simulate(2, on_rank))
