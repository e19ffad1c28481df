"""Norms and clips that stay on the device are those that the host reads: run here on the CPU, where both can be."""

import math
import random

import pytest
import torch
from torch import nn

from shardwise.engine.kept_numbers import KeptNumbers
from shardwise.engine.norm import (
    clip,
    divide_and_square,
    norm_of,
    norm_on_device,
    norms_of,
    total_of_each,
    total_of_norms,
)

CPU = torch.device("cpu")
BLOCK = 256
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


def total_of(found: list[torch.Tensor], kept: KeptNumbers) -> float:
    return float(total_of_each(norms_of(found), kept))


def gradients(*dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3 + 7 * at, 5, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)
        for at, dtype in enumerate(dtypes)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_parts_is_that_of_sums_of_squares(dtype: torch.dtype) -> None:
    found = gradients(dtype, dtype, dtype)
    squares = divide_and_square([(each.clone().view(-1), True) for each in found], 1, CPU)
    got = torch.full((), math.nan, dtype=torch.float64)
    norm_on_device(found, KeptNumbers(CPU), out=got)
    assert got.dtype == torch.float64
    assert float(got) == pytest.approx(math.sqrt(squares), rel=1e-14)
    assert float(got.to(torch.float32)) == norm_of([squares], torch.float32)
    norm_on_device([], KeptNumbers(CPU), out=got)
    assert float(got) == 0.0


def divided_and_squared_one_by_one(runs: list[tuple[torch.Tensor, bool]], divisor: int) -> float:
    """The plain version."""
    squares = []
    for run, counts in runs:
        for block in run.split(BLOCK // 2 if run.is_complex() else BLOCK):
            block.div_(divisor)
            real = torch.view_as_real(block).view(-1) if block.is_complex() else block
            squares += [float(torch.dot(real.double(), real.double()))] if counts else []
    return sum(squares, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_runs_are_divided_and_squared_together_as_one_by_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.engine.norm._BLOCK_ELEMENTS", BLOCK)
    places = random.Random(1)
    for _ in range(20):
        memory = gradients(*[dtype] * 9)[8].view(-1).repeat(9)[: 40 * 64].contiguous()
        spans, at = [], 0
        while (stop := at + places.choice([0, 1, 5, 16, 24, 70, 600])) <= len(memory):
            spans.append((at, stop, places.random() < 0.8))
            # Up to the next slot, and sometimes beyond: what is in between belongs to others then.
            at = -(-stop // 16) * 16 + places.choice([0, 0, 0, 16, 32])
        mine, plain = memory.clone(), memory.clone()
        got = divide_and_square([(mine[start:stop], counts) for start, stop, counts in spans], 3, CPU)
        assert got == divided_and_squared_one_by_one([(plain[start:stop], counts) for start, stop, counts in spans], 3)
        for start, stop, _ in spans:
            assert torch.equal(mine[start:stop], plain[start:stop])
        for (_, stop, _), (start, _, _) in zip(spans, [*spans[1:], (len(memory), 0, False)], strict=True):
            if start - stop >= 16:
                assert torch.equal(mine[stop:start], memory[stop:start])
    # Neighbours in another memory are no neighbours.
    apart = [(each.view(-1), True) for each in gradients(dtype, dtype)]
    copies = [(each.clone(), counts) for each, counts in apart]
    assert divide_and_square(apart, 3, CPU) == divided_and_squared_one_by_one(copies, 3)


@pytest.mark.parametrize(
    "dtypes",
    [[torch.float32] * 5, [torch.float32, torch.bfloat16] * 3, [torch.bfloat16, torch.float64, torch.float32] * 2],
    ids=["one", "two", "three"],
)
def test_norms_of_stages_make_the_norm_of_one_process_in_every_bit(dtypes: list[torch.dtype]) -> None:
    found = gradients(*dtypes)
    there = {at: norm.double() for at, norm in norms_of(found).items()}
    kept = KeptNumbers(CPU)
    got = float(total_of_norms(there, kept, dtypes=dtypes))
    assert got == float(nn.utils.get_total_norm(found)) == total_of(found, kept)
    assert float(total_of_norms({}, kept, dtypes=dtypes)) == 0.0
    assert total_of([], kept) == 0.0


@pytest.mark.parametrize("norm", [0.0, 0.5, 3.7])
def test_a_clip_has_the_bits_of_torch(norm: float) -> None:
    masters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(9))]
    flat = gradients(torch.float32)[0].view(-1)[:13].clone()
    for master, part in zip(masters, flat.clone().split([4, 9]), strict=True):
        master.grad = part
    nn.utils.clip_grads_with_norm_(masters, 1.0, torch.tensor(norm))
    clip([flat], torch.tensor(norm), 1.0, KeptNumbers(CPU))
    assert torch.equal(flat, torch.cat([master.grad for master in masters if master.grad is not None]))


def test_gradients_of_a_step_that_is_skipped_stay_as_they_are() -> None:
    flat = torch.tensor([1.0, math.inf, math.nan])
    clip([flat], torch.tensor(math.nan), 1.0, KeptNumbers(CPU))
    assert torch.equal(flat.nan_to_num(nan=-7.0), torch.tensor([1.0, math.inf, -7.0]).nan_to_num(nan=-7.0))


def test_a_number_of_the_next_step_is_where_the_last_one_was() -> None:
    kept = KeptNumbers(CPU)
    first = kept.place("table", 3, dtype=torch.float64)
    assert kept.place("table", 3, dtype=torch.float64) is first
    assert kept.place("row", 3, dtype=torch.float64) is not first
    assert kept.place("table", 4, dtype=torch.float64).shape == (4,)
    assert kept.place("table", 4, dtype=torch.float32).dtype == torch.float32
