"""Clips by norm of all, by norms of parts and by value, and the norms of a report: as torch has them in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from tests.covering import pairwise

GROUPS = {"body": ("first", "middle.*"), "ends": "last"}
RULES = {"first": "column", "middle": "row"}
STAGES = sw.Pipeline(stages={"first": 0, "norm": 0, "middle": 1, "last": 1, "idle": 1, "still": 1})
Found = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


class Net(nn.Module):
    """`last` is tied to `first`; `idle` is used by nothing, `still` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.Identity()
        self.middle = nn.Linear(8, 4)
        self.last = nn.Linear(4, 8, bias=False)
        self.idle = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.still = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.middle(torch.tanh(self.norm(self.first(x)))))
        return out


def net(*, is_tied: bool = False) -> Net:
    torch.manual_seed(0)
    made = Net()
    if is_tied:
        made.last.weight = made.first.weight
    return made


def batch_of(step: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(device)}


def loss_of(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean() * 10


def plain(plan: sw.Plan, *, is_tied: bool = False, k: int = 1) -> Found:
    """What torch's own functions do on one process, for the rows of all ranks."""
    model = net(is_tied=is_tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts = {"body": [model.first, model.middle], "ends": [model.last]}
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for part in batch_of(step)["x"].chunk(k):
            (loss_of(model(part), None) / k if k > 1 else loss_of(model(part), None)).backward()

        def total(named: Any) -> float:
            return nn.utils.get_total_norm([each.grad for each in named if each.grad is not None]).item()

        layers = {name: total(each.parameters(recurse=False)) for name, each in model.named_children()}
        layers.pop("norm")
        if is_tied:  # it has no other parameter than that of `first`
            layers.pop("last")
        groups = {name: total(p for each in modules for p in each.parameters()) for name, modules in parts.items()}
        found.append({"all": total(model.parameters()), "layers": layers, "groups": groups})
        if isinstance(plan.clip_grad_norm, Mapping):
            for name, most in plan.clip_grad_norm.items():
                nn.utils.clip_grad_norm_([p for each in parts[name] for p in each.parameters()], most)
        elif plan.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip_grad_norm)
        if plan.clip_grad_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), plan.clip_grad_value)
        optimizer.step()
    return found, {name: each.detach().clone() for name, each in model.named_parameters()}


def ours(channel: sw.Channel, plan: sw.Plan, *, is_tied: bool = False) -> Found:
    model = net(is_tied=is_tied)
    engine = sw.parallelize(
        model,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=loss_of,
        channel=channel,
        groups=GROUPS,
    )
    rank, ranks = plan.mesh.data_rank(channel.rank), plan.mesh.num_data_ranks
    found = []
    asked: list[Any] = ["layers", "groups", None]
    exchanges = [engine.counters.exchanges]
    for step in range(3):
        mine = {"x": batch_of(step)["x"].chunk(ranks)[rank].to(channel.device)}
        report = engine.step(mine, norms=asked[step])
        exchanges.append(engine.counters.exchanges)
        found.append({"all": report.grad_norm, asked[step] or "none": report.norms})
    assert exchanges[3] - exchanges[2] == exchanges[2] - exchanges[1]  # as many with norms as without
    return found, {name: values.cpu().clone() for name, values in sw.full(engine)}


def compare(one: Found, other: Found, *, exactly: bool) -> None:
    for step, (expected, found) in enumerate(zip(one[0], other[0], strict=True)):
        assert found.pop("none", None) is None
        for what, shown in found.items():
            assert shown == (expected[what] if exactly else pytest.approx(expected[what], rel=2e-6)), (step, what)
    for name, values in one[1].items():
        torch.testing.assert_close(other[1][name], values, rtol=0, atol=0 if exactly else 3e-7)


CLIPS: list[Mapping[str, Any]] = [
    {},
    {"clip_grad_norm": 0.7},
    {"clip_grad_value": 0.05},
    {"clip_grad_norm": 0.7, "clip_grad_value": 0.05},
    {"clip_grad_norm": {"body": 0.3, "ends": 1e3}},
    {"clip_grad_norm": {"ends": 0.2}, "clip_grad_value": 0.1},
]


@pytest.mark.parametrize("clips", CLIPS)
def test_one_rank_clips_and_reports_as_torch_does_to_the_bit(clips: Mapping[str, Any]) -> None:
    plan = sw.Plan(**clips)
    compare(plain(plan), ours(alone(), plan), exactly=True)


@pytest.mark.parametrize("clips", CLIPS)
def test_a_device_clips_and_reports_as_torch_does(fake: str, clips: Mapping[str, Any]) -> None:
    plan = sw.Plan(**clips)
    compare(plain(plan), sw.simulate(1, lambda channel: ours(channel, plan), device=fake)[0], exactly=True)


@pytest.mark.parametrize(
    ("mesh", "stage", "k", "clips", "on_device", "is_tied"),
    pairwise(
        ["dp_shard=2", "pp=2", "tp=2", "pp=2,dp_shard=2", "dp_replicate=2,tp=2"],
        [0, 1, 2, 3],
        [1, 2],
        CLIPS[1:],
        [False, True],
        [False, True],
    ),
)
def test_ranks_clip_and_report_as_torch_does(
    fake: str, mesh: str, stage: int, k: int, clips: Mapping[str, Any], on_device: bool, is_tied: bool
) -> None:
    is_tied = is_tied and "clip_grad_norm" not in clips and "tp" not in mesh
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=160),
        merge=sw.Merge(microbatches=k),
        pipeline=STAGES if "pp" in mesh else sw.Pipeline(),
        tensor=sw.Tensor(rules=RULES) if "tp" in mesh else sw.Tensor(),
        **clips,
    )
    device = fake if on_device else "cpu"
    found = sw.simulate(plan.mesh.size, lambda channel: ours(channel, plan, is_tied=is_tied), device=device)
    assert all(repr(each[0]) == repr(found[0][0]) for each in found)
    expected = plain(plan, is_tied=is_tied, k=k * plan.mesh.num_data_ranks)
    compare(expected, found[0], exactly=False)
