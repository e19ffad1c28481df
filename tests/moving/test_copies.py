"""Strided copies are copies, whatever the strides."""

import random

import pytest
import torch

from shardwise.moving.copies import put

SIZES = (1, 2, 3, 7, 16, 65, 129)


def view_of(shape: list[int], order: list[int], spare: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the shape whose dims lie in memory in this order, with room between them and in front."""
    sizes = [shape[dim] * step + spare for dim in order]
    memory = torch.zeros(5 + torch.Size(sizes).numel(), dtype=dtype)[5:].view(sizes)
    part = memory[tuple(slice(0, shape[dim] * step, step) for dim in order)]
    return part.permute([order.index(dim) for dim in range(len(shape))])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64])
def test_any_order_of_dims_becomes_any_other(dtype: torch.dtype) -> None:
    numbers = random.Random(str(dtype))
    for _ in range(150):
        shape = [numbers.choice(SIZES) for _ in range(numbers.randint(0, 4))]
        if torch.Size(shape).numel() > 1 << 18:
            continue
        dims = list(range(len(shape)))
        target, source = (
            view_of(shape, numbers.sample(dims, len(dims)), numbers.choice((0, 0, 3)), numbers.choice((1, 1, 2)), dtype)
            for _ in range(2)
        )
        source.copy_(torch.randint(0, 100, shape).to(dtype))
        put(target, source)
        assert torch.equal(target, source), (shape, target.stride(), source.stride())


def test_a_cast_on_the_way_is_the_cast_of_torch() -> None:
    source = torch.randn(300, 200)
    target = torch.zeros(200, 300, dtype=torch.bfloat16)
    put(target.t(), source)
    assert torch.equal(target, source.t().bfloat16())


def test_one_element_for_many_and_many_in_one_place_are_copied_as_torch_does() -> None:
    target = torch.zeros(100, 100)
    put(target, torch.ones(1, 1).expand(100, 100))
    assert torch.equal(target, torch.ones(100, 100))
    put(target.t(), torch.arange(100.0).expand(100, 100))
    assert torch.equal(target.t(), torch.arange(100.0).expand(100, 100))


def test_matrices_larger_than_the_bounce_are_transposed_in_parts() -> None:
    source = torch.randint(-100, 100, (3000, 1001), dtype=torch.int16)
    target = torch.zeros(1001, 3000, dtype=torch.int16)
    put(target.t(), source)
    assert torch.equal(target, source.t())
