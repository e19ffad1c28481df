"""Digests of batches: equal for equal elements whatever their layout in memory, and others after any change."""

import pytest
import torch

from shardwise.engine.forward.batch_digests import ROW, BatchDigests

SHAPES = [(), (0,), (3,), (ROW,), (ROW + 1,), (5 * ROW,), (7, 70001), (300, 901), (1, 1, 9 * ROW), (3, 2, 5, 7000)]
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128, torch.bool)


def digest_of(value: torch.Tensor) -> int:
    return int(BatchDigests()._of(value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_digest_is_of_the_elements_and_of_nothing_else(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = (100 * torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    expected = digest_of(value)
    assert digest_of(torch.stack([value, value], -1)[..., 0]) == expected
    if value.dim() > 1:
        assert digest_of(value.transpose(0, -1).contiguous().transpose(0, -1)) == expected
        assert digest_of(value.mT.contiguous().mT) == expected
    if value.is_complex():
        assert digest_of(value.conj().resolve_conj().conj()) == expected
    for at in {0, value.numel() // 2, value.numel() - 1} if value.numel() else ():
        other = value.clone()
        other.view(-1)[at] = ~other.view(-1)[at] if dtype is torch.bool else other.view(-1)[at] + 1
        assert digest_of(other) != expected
    if value.numel() > 1 and dtype is not torch.bool:
        assert digest_of(value.flatten().roll(1).view(shape)) != expected
