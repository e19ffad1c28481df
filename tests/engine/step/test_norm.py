"""Clips by norm of all, by norms of parts and by value, and the norms of a report: as torch has them in one process."""

import math
import random
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.engine.step.norm import squares_of_atoms
from tests.covering import pairwise
from tests.engine.loops import rows, share
from tests.engine.refusals import raise_of_all
from tests.engine.tower import DATA
from tests.oracle.one_process import values_of
from tests.oracle.program import seeded
from tests.refusals import Refusals

GROUPS = {"body": ("first", "middle.*"), "ends": "last"}
PARTS = {"weights": "*.weight", "first": ("first", "middle.bias"), "still": "still"}
TP = sw.Tensor(rules={"first": "column", "middle": "row"}, prove=False)
STAGES = sw.Pipeline(stages={"first": 0, "norm": 0, "middle": 1, "last": 1, "idle": 1, "still": 1})
Found = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


class Net(nn.Module):
    """`idle` is used by nothing, `still` is frozen."""

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


net = seeded(Net)


def loss_of(output: torch.Tensor, _: object = None) -> torch.Tensor:
    return output.square().mean() * 10


def plain(plan: sw.Plan, k: int = 1) -> Found:
    """What torch's own functions do on one process, for the rows of all ranks."""
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def within(*globs: str) -> list[nn.Parameter]:
        named = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
        return [each for name, each in named if any(fnmatchcase(name, glob) for glob in globs)]

    def total(*globs: str) -> float:
        return nn.utils.get_total_norm([each.grad for each in within(*globs) if each.grad is not None]).item()

    for step in range(4):
        optimizer.zero_grad()
        for part in rows(step)["x"].chunk(k):
            (loss_of(model(part)) / k if k > 1 else loss_of(model(part))).backward()
        found.append(
            {
                "all": total("*"),
                "layers": {name: total(f"{name}.*") for name in ("first", "middle", "last", "idle")},
                "groups": {"body": total("first.*", "middle.*"), "ends": total("last.*")},
                "parts": {"weights": total("*.weight"), "first": total("first.*", "middle.bias")},
            }
        )
        if isinstance(plan.clip_grad_norm, Mapping):
            nn.utils.clip_grad_norm_(within("first.*", "middle.*"), plan.clip_grad_norm.get("body", math.inf))
            nn.utils.clip_grad_norm_(within("last.*"), plan.clip_grad_norm["ends"])
        elif plan.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip_grad_norm)
        if plan.clip_grad_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), plan.clip_grad_value)
        optimizer.step()
    return found, values_of(model)


def engine_of(channel: sw.Channel, plan: sw.Plan, **settings: Any) -> sw.Engine:
    given: dict[str, Any] = {"loss": loss_of, "groups": GROUPS, **settings}
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return sw.parallelize(net(), plan, optimizer=optimizer, channel=channel, **given)


def ours(channel: sw.Channel, plan: sw.Plan) -> Found:
    engine, found, exchanges = engine_of(channel, plan), [], []
    asked: dict[str, Any] = {"layers": "layers", "groups": "groups", "parts": PARTS, "none": None}
    for step, (name, norms) in enumerate(asked.items()):
        before = engine.counters.exchanges
        report = engine.step({"x": share(engine, rows(step))["x"].to(channel.device)}, norms=norms)
        exchanges.append(engine.counters.exchanges - before)
        found.append({"all": report.grad_norm, name: report.norms})
    assert exchanges[3] == exchanges[1]  # as many with norms as without
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


@pytest.mark.parametrize(("clips", "on_device"), [(clips, at % 2 == 0) for at, clips in enumerate(CLIPS)])
def test_one_rank_clips_and_reports_as_torch_does_to_the_bit(
    fake: str, clips: Mapping[str, Any], on_device: bool
) -> None:
    plan = sw.Plan(**clips)
    (found,) = sw.simulate(1, lambda channel: ours(channel, plan), device=fake if on_device else "cpu")
    compare(plain(plan), found, exactly=True)


@pytest.mark.parametrize(
    ("mesh", "stage", "k", "clips", "on_device"),
    pairwise(
        ["dp_shard=2", "pp=2", "tp=2", "pp=2,dp_shard=2", "dp_replicate=2,tp=2"],
        [0, 1, 2, 3],
        [1, 2],
        CLIPS[1:],
        [False, True],
    ),
)
def test_ranks_clip_and_report_as_torch_does(
    fake: str, mesh: str, stage: int, k: int, clips: Mapping[str, Any], on_device: bool
) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=160),
        merge=sw.Merge(microbatches=k),
        pipeline=STAGES if "pp" in mesh else sw.Pipeline(),
        tensor=TP if "tp" in mesh else sw.Tensor(),
        **clips,
    )
    device = fake if on_device else "cpu"
    found = sw.simulate(plan.mesh.size, lambda channel: ours(channel, plan), device=device)
    assert all(repr(each[0]) == repr(found[0][0]) for each in found)
    compare(plain(plan, k * plan.mesh.num_data_ranks), found[0], exactly=False)


def test_a_report_of_a_turn_has_only_what_it_trains() -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, sw.Plan(mesh=DATA))
        for norms, name in (("parameters", "last.weight"), ("groups", "ends")):
            report = engine.step(rows(0), norms=norms, only="ends")
            assert report.norms == {name: report.grad_norm}

    sw.simulate(2, run)


def test_norms_of_a_step_that_is_not_finite_are_nan() -> None:
    plan = sw.Plan(clip_grad_norm={"first": 1.0, "middle": 1.0})
    engine = engine_of(alone(), plan, loss=lambda output, _: output.square().sum() * math.inf)
    report = engine.step(rows(0), norms="layers")
    assert report.skipped
    assert report.norms is not None
    assert all(map(math.isnan, (report.norms["first"], report.norms["last"])))
    assert all(map(torch.equal, engine.model.parameters(), net().parameters()))


def clipped(clip: Any) -> Callable[[], None]:
    def call() -> None:
        engine_of(alone(), sw.Plan(clip_grad_norm=clip))

    return call


def asked(norms: Any, *, on_all: bool = True) -> Callable[[], None]:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, sw.Plan(mesh=DATA), groups=None)
        try:
            engine.step(rows(0), norms=norms if channel.rank or on_all else None)
        finally:
            engine.step(rows(0))

    return lambda: raise_of_all(2, run)


REFUSED = Refusals(
    "engine.norm",
    {
        "a clip of no part": clipped({"firts": 1.0}),
        "clips that overlap": clipped({"body": 1.0, "first.weight": 1.0}),
        "norms of everything": asked("everything"),
        "norms of nothing": asked({"a": "nothing.*"}),
        "norms of a number": asked({"a": 3}),
        "norms on one rank": asked("layers", on_all=False),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_clips_and_norms_of_parts_that_are_none_are_refused(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_runs_are_divided_and_squared_together_as_one_by_one_and_nothing_between_them(dtype: torch.dtype) -> None:
    places = random.Random(1)
    for _ in range(20):
        memory = torch.randn(2560, generator=torch.Generator().manual_seed(0)).to(dtype)
        spans, at = [], 0
        while (stop := at + places.choice([0, 1, 5, 16, 24, 70, 600])) <= len(memory):
            spans.append((at, stop, places.random() < 0.8))
            # Up to the next slot, and sometimes beyond: what is in between belongs to others then.
            at = -(-stop // 16) * 16 + places.choice([0, 0, 0, 16, 32])
        mine, expected = memory.clone(), memory.clone()
        runs = [(mine[start:stop], 0 if counts else ~0) for start, stop, counts in spans]
        (got,) = squares_of_atoms(runs, 3, torch.device("cpu"), num_atoms=1)
        squares = []
        for start, stop, counts in spans:
            run = expected[start:stop].div_(3)
            real = torch.view_as_real(run).view(-1) if run.is_complex() else run
            squares += [float(real.double().square().sum())] if counts else []
            assert torch.equal(mine[start:stop], run)
        assert got == pytest.approx(sum(squares), rel=1e-14)
        for (_, stop, _), (start, _, _) in zip(spans, [*spans[1:], (len(memory), 0, False)], strict=True):
            if start - stop >= 16:
                assert torch.equal(mine[stop:start], memory[stop:start])
