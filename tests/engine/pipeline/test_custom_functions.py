"""Custom autograd functions between placed modules: with the numbers of one process, wherever their inputs are."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


class Scores(torch.autograd.Function):
    """Reads a weight itself, and writes into parts of a tensor, as fused heads do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: None) -> tuple[torch.Tensor, None]:
        ctx.save_for_backward(hidden, weight)
        made = torch.zeros(len(hidden))
        for row in range(len(hidden)):
            made[row : row + 1].add_((hidden[row : row + 1] @ weight.t()).sum(-1))
        return made, None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        each = gradients[0][:, None].expand(-1, len(weight))
        return each @ weight, each.t() @ hidden, None


kept: Any = Scores.apply  # as models write it, before any engine


class Scoring(nn.Module):
    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.scores = kept if is_kept else lambda *given: Scores.apply(*given)  # type: ignore[no-untyped-call]
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x).tanh())
        scores, nothing = self.scores(hidden, self.head.weight, None)
        assert nothing is None
        out: torch.Tensor = scores * hidden.mean(1)  # its input has another use
        return out


STAGES = {"in a row": None, "weight on the stage before": {"first": 0, "second": 1, "head": 0}}


@pytest.mark.parametrize("name", STAGES)
def test_a_custom_function_between_modules_trains_as_in_one_process(name: str) -> None:
    rows = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))

    def train(channel: sw.Channel) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        plan = sw.Plan(
            mesh=sw.Mesh(pp=channel.size),
            merge=sw.Merge(microbatches=2),
            pipeline=sw.Pipeline(stages=STAGES[name] if channel.size > 1 else None),
        )
        engine = sw.parallelize(
            Scoring(is_kept=STAGES[name] is None),
            plan,
            optimizer=torch.optim.AdamW,
            loss=lambda out, _: out.square().mean(),
            channel=channel,
        )
        losses = [engine.step({"x": each}).loss for each in rows]
        return [*losses, engine.evaluate({"x": rows[0]}).loss], dict(sw.full(engine))

    [(losses, weights)] = sw.simulate(1, train)
    for found, whole in sw.simulate(2, train):
        assert found == losses
        for each, weight in whole.items():
            assert torch.equal(weight, weights[each])
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)  # taken away
