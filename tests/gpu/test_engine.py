"""The engine on one GPU: the same arithmetic as plain PyTorch there."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, 7, bias=False))


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), batch["label"])


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input": torch.randn(12, 33, generator=generator),
            "label": torch.randint(0, 7, (12,), generator=generator),
        }
        for _ in range(4)
    ]


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_one_gpu_equals_plain_pytorch_on_it(num_microbatches: int) -> None:
    plain = build().cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = sw.parallelize(
        build(),
        sw.Plan(merge=sw.Merge(microbatches=num_microbatches), clip_grad_norm=0.5),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        loss=loss_of,
        channel=alone("cuda"),
    )
    for batch in batches():
        optimizer.zero_grad()
        for x, y in zip(batch["input"].chunk(num_microbatches), batch["label"].chunk(num_microbatches), strict=True):
            loss_of(plain(x.cuda()), {"label": y.cuda()}).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_microbatches
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        report = engine.step(batch)
        # The foreach kernels that torch takes here may add in another order than those for single tensors.
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_bfloat16_on_a_gpu_holds_masters_and_learns() -> None:
    engine = sw.parallelize(
        build(),
        sw.Plan(precision=sw.Precision(compute="bfloat16", keep=("2",))),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        loss=loss_of,
        channel=alone("cuda"),
    )
    losses = [engine.step(batches()[0]).loss for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert engine.counters.cast_elements == 20 * (33 * 65 + 65 + 65 * 7)
