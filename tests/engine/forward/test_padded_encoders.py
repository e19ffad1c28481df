"""Encoders of torch, whose evaluation goes another way than their training: the numbers of one process in both."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.covering import covering
from tests.engine.loops import mean_square
from tests.oracle.one_process import expected
from tests.oracle.places import train
from tests.oracle.program import Program, plan_of, seeded

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": "tp=2"},
    "stage 3 and tp": {"mesh": "dp_shard=2,tp=2", "stage": 3},
    "pp": {"mesh": "pp=2"},
    "run again": {"activations": sw.Activations(checkpoint="blocks")},
}
PADDING = {"none": (0, 0, 0, 0), "right": (0, 2, 1, 0), "left": (0, -2, 0, 0)}
"""Places of padding in each row; negative: at its beginning, where torch takes no nested tensors."""


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=kind == "norm first")
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        norm = nn.LayerNorm(8) if kind == "norm" else None
        self.body: nn.Module = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=kind != "norm first")
        self.is_whole = kind == "transformer"
        if self.is_whole:
            self.body = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h, given = self.up(x), mask if mask.any() else None
        if self.is_whole:
            h = self.body(h, h, src_key_padding_mask=given, memory_key_padding_mask=given)
        else:
            h = self.body(h, src_key_padding_mask=given)
        out: torch.Tensor = self.head(h)
        return out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    ("kind", "padding", "layout"),
    covering(["plain", "norm", "norm first", "transformer"], list(PADDING), list(LAYOUTS), strength=2),
)
def test_encoders_train_and_evaluate_as_in_one_process(kind: str, padding: str, layout: str) -> None:
    mask = torch.zeros(4, 5, dtype=torch.bool)
    for row, count in enumerate(PADDING[padding]):
        mask[row, 5 - count if count >= 0 else 0 : 5 if count >= 0 else -count] = True
    batch = {"x": torch.linspace(-1, 1, 120).view(4, 5, 6), "mask": mask}
    program = Program(
        make=seeded(lambda: Net(kind)),
        batches=[batch] * 2,
        loss=mean_square,
        rules={"*.linear1": "colwise", "*.linear2": "rowwise"},
    )
    plan = plan_of(program, **LAYOUTS[layout])
    got, wanted = train(program, plan), expected(program, plan.mesh.num_data_ranks)
    # Nested tensors and cut sums round in another order.
    assert got.losses == pytest.approx(wanted.losses, rel=1e-4)
    assert got.held_out == pytest.approx(wanted.held_out, rel=1e-4)
