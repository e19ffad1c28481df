"""Modules run under any layout as they run alone: no mode of torch's is active around them.

Modules ask whether one is: torch's transformer layers leave their fused kernels then, and compiled modules run eagerly.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import shardwise as sw
from tests.engine.loops import mean_square, sgd
from tests.engine.tower import DATA


class Block(nn.Module):
    """Its shapes depend on values: no rank can say what it gives without executing it."""

    def __init__(self, seen: Counter[tuple[bool, int]]) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(8, 16), nn.Linear(16, 8), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and not x.is_meta:
            is_seen = torch.overrides.has_torch_function((x, self.up.weight))
            self.seen[is_seen, len(_get_current_dispatch_mode_stack())] += 1
        kept = x[x.isfinite().all(1)]
        out: torch.Tensor = x + self.down(nn.functional.dropout(self.up(kept).relu(), 0.1, self.training))
        return out


PLANS = {
    "stage 1": sw.Plan(mesh=DATA),
    "stage 3": sw.Plan(mesh=DATA, sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"*.up": "column", "*.down": "row"}, prove=False)),
}


@pytest.mark.parametrize("name", PLANS)
def test_no_mode_is_active_around_a_module(name: str) -> None:
    def calls(channel: sw.Channel) -> Counter[tuple[bool, int]]:
        seen: Counter[tuple[bool, int]] = Counter()
        model = nn.Sequential(Block(seen), Block(seen), nn.Linear(8, 4))
        engine = sw.parallelize(model, PLANS[name], optimizer=sgd, loss=mean_square, channel=channel)
        batch = {"input": torch.ones(2, 8)}
        for _ in range(2):
            engine.step(batch)
        engine.evaluate(batch)
        engine.predict(batch, lambda inputs: model(**inputs))
        return seen

    num_blocks = 1 if name == "pp" else 2
    assert sw.simulate(2, calls) == [{(False, 0): 4 * num_blocks}] * 2
