"""Clips by norm of all, by norms of parts and by value, and the norms of a report: as torch has them in one process."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import MismatchError, PlanError
from shardwise.testing.accelerator import counted
from shardwise.train.config import read_config
from tests.covering import pairwise
from tests.engine.refusals import same_error_everywhere
from tests.train.test_config import MINIMAL, written

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


def test_a_report_has_the_norms_of_parts_by_globs_and_those_of_a_turn_only_what_it_trains() -> None:
    def run(channel: sw.Channel) -> list[Any]:
        model = net()
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=sw.Mesh(dp_shard=2)),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=loss_of,
            channel=channel,
            groups=GROUPS,
        )
        one = engine.step(
            batch_of(0), norms={"weights": "*.weight", "first": ("first", "middle.bias"), "still": "still"}
        )
        two = engine.step(batch_of(0), norms="parameters", only="ends")
        three = engine.step(batch_of(0), norms="groups", only="ends")
        return [one.norms, one.grad_norm, two.norms, two.grad_norm, three.norms, three.grad_norm]

    first, second = sw.simulate(2, run)
    assert first == second
    weights, of_one, by_parameter, of_two, by_group, of_three = first
    model = net()
    loss_of(model(batch_of(0)["x"]), None).backward()
    gradient = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert weights == pytest.approx(
        {
            "weights": nn.utils.get_total_norm([each for name, each in gradient.items() if "weight" in name]).item(),
            "first": nn.utils.get_total_norm(
                [gradient[n] for n in ("first.weight", "first.bias", "middle.bias")]
            ).item(),
        }
    )
    assert of_one == pytest.approx(nn.utils.get_total_norm(list(gradient.values())).item())
    assert by_parameter == {"last.weight": of_two}
    assert by_group == {"ends": of_three}


def test_norms_of_a_step_that_is_not_finite_are_nan() -> None:
    model = net()
    engine = sw.parallelize(
        model,
        sw.Plan(clip_grad_norm={"first": 1.0, "middle": 1.0}),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda output, _: output.square().sum() * math.inf,
        channel=alone(),
    )
    report = engine.step(batch_of(0), norms="layers")
    assert report.skipped
    assert report.norms is not None
    assert all(map(math.isnan, (report.norms["first"], report.norms["last"])))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), net().parameters(), strict=True))


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ({"firts": 1.0}, "clip_grad_norm: 'firts' matches none of the 7 parameters; the nearest parameter is"),
        (
            {"body": 1.0, "first.weight": 1.0},
            "'first.weight' belongs to 'body' and to 'first.weight'; a gradient is clipped",
        ),
    ],
)
def test_a_clip_of_parts_that_are_none_or_overlap_is_refused_before_anything_changes(clip: Any, words: str) -> None:
    model = net()
    before = [each.data_ptr() for each in model.parameters()]
    with pytest.raises(PlanError, match=words):
        sw.parallelize(
            model,
            sw.Plan(clip_grad_norm=clip),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=loss_of,
            channel=alone(),
            groups=GROUPS,
        )
    assert [each.data_ptr() for each in model.parameters()] == before


@pytest.mark.parametrize(
    ("norms", "words", "kind"),
    [
        ("everything", "is neither 'groups', 'layers' nor 'parameters'", PlanError),
        ({"a": "nothing.*"}, r"norms['a']: 'nothing.*' matches none of the 7 parameters", PlanError),
        ({"a": 3}, "norms: 'a': 3 is not a name with globs of parameters; write norms=", PlanError),
        ("layers", "rank 0 trains all, and rank 1 trains all, with norms of 'layers'", MismatchError),
    ],
)
def test_norms_that_mean_nothing_or_differ_are_refused_on_all_ranks(norms: Any, words: str, kind: type) -> None:
    def run(channel: sw.Channel) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        try:
            engine.step(batch_of(0), norms=norms if channel.rank or kind is PlanError else None)
        finally:
            engine.step(batch_of(0))

    error = same_error_everywhere(2, run)
    assert type(error) is kind
    assert words in str(error)


def test_clips_are_written_in_a_configuration(tmp_path: Path) -> None:
    text = MINIMAL + 'clip_grad_norm = { "layers.*" = 1, head = 0.5 }\nclip_grad_value = 2\n'
    plan = read_config(written(tmp_path, text)).plan
    assert plan.clip_grad_norm == {"layers.*": 1.0, "head": 0.5}
    assert plan.clip_grad_value == 2.0
    assert plan.text().splitlines()[:2] == [
        'clip_grad_norm = {"head" = 0.5, "layers.*" = 1.0}',
        "clip_grad_value = 2.0",
    ]
    assert sw.Plan.parse(plan.text()) == plan


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2", "pp=2", "tp=2"])
def test_a_device_waits_for_no_norm_and_no_clip(fake: str, mesh: str) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        pipeline=STAGES if "pp" in mesh else sw.Pipeline(),
        tensor=sw.Tensor(rules=RULES, prove=False) if "tp" in mesh else sw.Tensor(),
        clip_grad_norm={"body": 0.3, "ends": 0.2},
        clip_grad_value=0.1,
    )

    def run(channel: sw.Channel) -> tuple[int, int]:
        model = net().to(channel.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel, groups=GROUPS)
        batches = [batch_of(step, channel.device) for step in range(6)]
        for batch in batches[:3]:
            engine.step(batch, norms="layers", only=("body", "ends"))
        with counted("sync") as counts:
            reports = [engine.step(batch, norms="layers", only=("body", "ends")) for batch in batches[3:]]
        found = counts[channel.device.index or 0]
        assert all(report.norms is not None and report.norms["first"] > 0 for report in reports)
        return found.syncs, found.uploads

    assert sw.simulate(plan.mesh.size, run, device=fake) == [(0, 0)] * plan.mesh.size
