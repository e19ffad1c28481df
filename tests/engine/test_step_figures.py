"""Steps whose figures stay on the device, run on CPU ranks: the oracle is the same step with its figures on the host.

A copy for the host arrives when somebody waits for it, or at once on the ranks that the test names.
"""

import math
import threading
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.step_figures import HostCopy, MadeOnDevice
from shardwise.errors import MismatchError
from tests.engine.models import curve_loss


class HeldCopy(HostCopy):
    """A copy that comes when somebody waits for it."""

    waits: ClassVar[Counter[int]] = Counter()
    """By the thread, which is the rank."""
    come: ClassVar[set[int]] = set()
    """The threads whose copies come at once."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.clone()

    @property
    def has_come(self) -> bool:
        return threading.get_ident() in HeldCopy.come

    def values(self) -> list[float]:
        HeldCopy.waits[threading.get_ident()] += not self.has_come
        values: list[float] = self._numbers.tolist()
        return values


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.engine.step_figures.HostCopy", HeldCopy)
    monkeypatch.setattr("shardwise.engine.step_closing.figures_making", MadeOnDevice)
    monkeypatch.setattr(HeldCopy, "waits", Counter())
    monkeypatch.setattr(HeldCopy, "come", set())


def tower() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(seed: int, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.sum(1, keepdim=True) * scale}


def weight_of(part: dict[str, Any]) -> float:
    return 1.0 + float(part["x"][0, 0] > 0)


def train(channel: sw.Channel, plan: sw.Plan, *, looks: bool) -> tuple[list[Any], dict[str, torch.Tensor], list[int]]:
    model = tower()
    engine = sw.parallelize(
        model,
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        loss=curve_loss,
        loss_weight=weight_of,
        channel=channel,
    )
    at, reports, waits = plan.mesh.data_rank(channel.rank), [], []
    for step in range(4):
        # Not finite on one data rank only, once: all of them skip.
        scale = math.inf if step == 2 and at == 0 else 1.0
        reports.append(engine.step(batch(10 * step + at, scale=scale)))
        waits.append(HeldCopy.waits[threading.get_ident()])
        if looks:
            assert reports[-1].loss is not None
    counts = engine.counters.updates, engine.counters.skipped
    state = {str(piece): values.clone() for piece, values in engine.state().items()}
    return [*((r.loss, r.grad_norm, r.skipped, r.weight) for r in reports), counts], state, waits


CUT = {"0": "column", "2": "row"}

PLANS = {
    "one": sw.Plan(clip_grad_norm=0.5),
    "one k=2": sw.Plan(merge=sw.Merge(microbatches=2)),
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=0), clip_grad_norm=0.5),
    "stage 1 bf16": sw.Plan(
        mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute="bfloat16"), merge=sw.Merge(microbatches=2)
    ),
    "replicas": sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2), clip_grad_norm=0.5),
    "stage 2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2), clip_grad_norm=0.5),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3), clip_grad_norm=0.5),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=CUT), clip_grad_norm=0.5),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2), clip_grad_norm=0.5),
    "pp and dp": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), merge=sw.Merge(microbatches=2), clip_grad_norm=0.5),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_steps_do_the_same_and_wait_for_nothing(plan: sw.Plan, request: pytest.FixtureRequest) -> None:
    size = plan.mesh.size
    expected = sw.simulate(size, lambda channel: train(channel, plan, looks=True))
    request.getfixturevalue("on_device")
    got = sw.simulate(size, lambda channel: train(channel, plan, looks=False))
    # The first update makes the optimizers' state, for which the host looks. Where losses can differ along tp, it waits
    # in each step for the one before.
    assert [waits for _, _, waits in got] == [[1, 1, 2, 3] if plan.mesh.tp > 1 else [1, 1, 1, 1]] * size
    for (reports, state, _), (other_reports, other_state, _) in zip(got, expected, strict=True):
        assert str(reports) == str(other_reports)  # nan is equal here
        assert state.keys() == other_state.keys()
        assert all(torch.equal(value, other_state[name]) for name, value in state.items())


def test_an_optimizer_that_cannot_skip_on_the_device_is_skipped_by_one_look(on_device: None) -> None:
    model = tower()
    engine = sw.parallelize(model, sw.Plan(), optimizer=torch.optim.AdamW, loss=curve_loss)
    for step in range(3):
        engine.step(batch(step))
        assert HeldCopy.waits[threading.get_ident()] == step + 1
    before = [each.detach().clone() for each in model.parameters()]
    assert engine.step(batch(9, scale=math.inf)).skipped
    assert all(map(torch.equal, before, model.parameters()))
    assert (engine.counters.updates, engine.counters.skipped) == (3, 1)


@pytest.mark.parametrize("looks", ["at the report", "at the next step", "at the state"])
def test_losses_that_differ_along_tp_are_named_when_they_are_known(looks: str, on_device: None) -> None:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=CUT))

    def run(channel: sw.Channel) -> str:
        wrong: list[float] = []

        def loss_of(output: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
            return curve_loss(output, part) + sum(wrong)

        engine = sw.parallelize(
            tower(), plan, optimizer=lambda each: torch.optim.AdamW(each, fused=True), loss=loss_of, channel=channel
        )
        assert engine.step(batch(0)).loss > 0
        wrong.append(channel.rank)
        if channel.rank == 0:
            HeldCopy.come.add(threading.get_ident())  # changes nothing: all ranks raise in the same step
        report = engine.step(batch(1))
        look = {
            "at the report": lambda: report.loss,
            "at the next step": lambda: engine.step(batch(2)),
            "at the state": engine.state,
        }[looks]
        with pytest.raises(MismatchError) as caught:
            look()
        return str(caught.value)

    said = sw.simulate(2, run)
    assert len(set(said)) == 1
    assert "rank 0 and rank 1 are peers along tp" in said[0]
