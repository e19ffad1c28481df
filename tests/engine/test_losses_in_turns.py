"""Two more kinds of turns against plain loops: an actor and a critic with one trunk, and alternating minimisation."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.covering import pairwise

Batch = Mapping[str, torch.Tensor]
Turns = list[tuple[str, Callable[[Any, Batch], torch.Tensor]]]


class ActorCritic(nn.Module):
    """Both heads read one trunk, which is in both groups."""

    groups: Mapping[str, Any] = {"actor": ("trunk", "policy"), "critic": ("trunk", "value")}
    stages: Mapping[str, int] = {"trunk": 0, "policy": 1, "value": 1}

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.policy = nn.Linear(8, 4)
        self.value = nn.Linear(8, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.trunk(state)
        return self.policy(seen), self.value(seen)

    def turns(self) -> Turns:
        def value_loss(output: Any, batch: Batch) -> torch.Tensor:
            loss: torch.Tensor = (output[1].squeeze(1) - batch["gain"]).square().mean()
            return loss

        def policy_loss(output: Any, batch: Batch) -> torch.Tensor:
            logits, value = output
            better = batch["gain"] - value.squeeze(1).detach()
            chosen = logits.log_softmax(1).gather(1, batch["action"][:, None]).squeeze(1)
            loss: torch.Tensor = -(chosen * better).mean()
            return loss

        return [("critic", value_loss), ("actor", policy_loss)]

    @staticmethod
    def batch(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {
            "state": torch.randn(8, 3, generator=generator),
            "gain": torch.randn(8, generator=generator),
            "action": torch.randint(0, 4, (8,), generator=generator),
        }


class Factors(nn.Module):
    """A matrix as the product of two bare parameters; each is fitted in turn."""

    groups: Mapping[str, Any] = {"left": "left", "right": "right"}
    stages: Mapping[str, int] = {"left": 0, "right": 1}

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(6, 2))
        self.right = nn.Parameter(torch.randn(2, 5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.left @ self.right

    def turns(self) -> Turns:
        def fit(output: torch.Tensor, batch: Batch) -> torch.Tensor:
            return (output - batch["wanted"]).square().mean()

        return [("left", fit), ("right", fit), ("right", fit)]

    @staticmethod
    def batch(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {name: torch.randn(8, width, generator=generator) for name, width in (("rows", 6), ("wanted", 5))}


def made(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind()


def plain(kind: Any, parts: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        for group, loss_of in model.turns():
            globs = (globs,) if isinstance(globs := kind.groups[group], str) else globs
            for name, each in model.named_parameters():
                each.requires_grad_(name.split(".")[0] in globs)
            optimizer.zero_grad()
            total = 0.0
            for part in zip(*(each.chunk(parts) for each in kind.batch(step).values()), strict=True):
                rows = dict(zip(kind.batch(step), part, strict=True))
                loss = loss_of(model(part[0]), rows)
                (loss / parts if parts > 1 else loss).backward()
                total += loss.item() / parts
            optimizer.step()
            losses.append(total)
    return losses, {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "mesh", "stage", "k"),
    pairwise([ActorCritic, Factors], ["dp_shard=1", "dp_shard=2", "pp=2"], [0, 1, 2, 3], [1, 2]),
)
def test_turns_are_those_of_a_plain_loop(kind: Any, mesh: str, stage: int, k: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage),
        merge=sw.Merge(microbatches=k),
        pipeline=sw.Pipeline(stages=kind.stages) if "pp" in mesh else sw.Pipeline(),
    )

    def run(channel: sw.Channel) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = made(kind)
        engine = sw.parallelize(
            model,
            plan,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
            loss=lambda *_: torch.zeros(()),
            channel=channel,
            groups=kind.groups,
        )
        rank, ranks = plan.mesh.data_rank(channel.rank), plan.mesh.num_data_ranks
        losses = []
        for step in range(3):
            mine = {name: each.chunk(ranks)[rank] for name, each in kind.batch(step).items()}
            losses += [engine.step(mine, only=group, loss=loss).loss for group, loss in model.turns()]
        return losses, {name: values.clone() for name, values in sw.full(engine)}

    found = sw.simulate(plan.mesh.size, run)
    losses, values = plain(kind, k * plan.mesh.num_data_ranks)
    assert all(each[0] == found[0][0] for each in found)
    if plan.mesh.size * k == 1:
        assert found[0][0] == losses
    assert found[0][0] == pytest.approx(losses, rel=2e-6)
    for name, each in values.items():
        torch.testing.assert_close(found[0][1][name], each, rtol=0, atol=5e-7)
