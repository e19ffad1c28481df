"""Losses are scaled as by torch.amp.GradScaler in a plain loop, to the bit, under every layout."""

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.engine.step import loss_scaling
from shardwise.errors import CheckpointError, PlanError, UnderflowWarning
from tests.engine.loops import begun, share
from tests.engine.loops import plan_of as short_plan_of
from tests.oracle.batches import count_rows, factors_of, parts_of, points, square_loss
from tests.oracle.program import sgd
from tests.oracle.words import Residual
from tests.refusals import Refusals

LARGE = 1e6
"""A target so far off that gradients overflow under a large scale."""


class Net(Residual):
    """Computes in float16; its loss does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


def batches(rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """The first ones have gradients that are not finite under the scale that they meet, and so has the fifth."""
    made = [points(seed, rows) for seed in range(9)]
    made[4]["y"] *= LARGE
    return made


@dataclass
class Run:
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)


def plain(k: int, *, clip: float | None = None, rows: int = 8, region: bool = False) -> Run:
    """torch's loop: float16 copies of float32 masters, or a region of autocast, and GradScaler around the optimizer."""
    run, masters, working = Run(), Net(), Net() if region else Net().half()
    optimizer, scaler = sgd(list(masters.parameters())), torch.amp.GradScaler("cpu", growth_interval=2)
    for batch in batches(rows):
        run.scales.append(scaler.get_scale())
        optimizer.zero_grad()
        parts = parts_of(batch, k)
        weights, losses = [count_rows(part) for part in parts], []
        for part, factor in zip(parts, factors_of(weights), strict=True):
            with torch.autocast("cpu", torch.float16, enabled=region):
                loss = square_loss(working(part["x"] if region else part["x"].half()), part)
            losses.append(loss.item())
            scaler.scale(loss if factor == 1.0 else loss * factor).backward()
            for master, copy in zip(masters.parameters(), working.parameters(), strict=True):
                assert copy.grad is not None
                master.grad = copy.grad.float() if master.grad is None else master.grad + copy.grad
                copy.grad = None
        for master in masters.parameters():
            assert master.grad is not None
            master.grad /= k
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), math.inf if clip is None else clip)
        run.norms.append(float(norm) if norm.isfinite() else math.nan)
        run.skipped.append(not norm.isfinite())
        run.losses.append(math.fsum(map(math.prod, zip(losses, weights, strict=True))) / math.fsum(weights))
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, copy in zip(masters.parameters(), working.parameters(), strict=True):
                copy.copy_(master)
    run.values = {name: value.detach() for name, value in masters.named_parameters()}
    return run


def plan_of(mesh: str = "single", stage: int = 1, k: int = 1, *, scale: Any = "dynamic", **settings: Any) -> sw.Plan:
    precision = sw.Precision(**{"compute": "float16", "loss_scale": scale, **settings.pop("precision", {})})
    return short_plan_of(mesh, stage, k, precision=precision, rules={"layers.*": "colwise_gather_output"}, **settings)


@pytest.fixture(autouse=True)
def soon_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two finite steps in a row double the scale, where it takes 2000 otherwise."""
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 2)


def begin(plan: sw.Plan, channel: sw.Channel, make: Callable[[], nn.Module] = Net) -> Any:
    return begun(channel, make, plan, optimizer=sgd, loss=square_loss)


def take(engine: Any, given: Any, run: Run) -> Run:
    """Updates from this rank's shares, with what they report."""
    for batch in given:
        report = engine.step(share(engine, batch))
        run.scales.append(report.loss_scale)
        run.skipped.append(report.skipped)
        run.norms.append(report.grad_norm)
        run.losses.append(report.loss)
    return run


def on_ranks(plan: sw.Plan, *, rows: int = 8) -> Run:
    """What rank 0 reports, and float32 values, of which float16 parameters are copies; all ranks report the same."""

    def train(channel: sw.Channel) -> Run:
        engine = begin(plan, channel)
        run = take(engine, batches(rows), Run())
        state = sw.full(engine, optimizer=True)
        run.values = {name.split("/")[1]: tensor for name, tensor in state if name.endswith("/master")}
        return run

    first, *others = sw.simulate(plan.mesh.size, train)
    assert all(repr(each) == repr(first) for each in others)
    return first


LAYOUTS = {
    "one rank": (plan_of(), 8),
    "microbatches": (plan_of(k=4), 7),
    "clipped": (plan_of(k=4, clip_grad_norm=0.5), 8),
    "stage 0": (plan_of("dp_shard=2", 0), 7),
    "stage 3": (plan_of("dp_shard=2", 3), 7),
    "stage 2 twice": (plan_of("dp_shard=2", 2, 2), 8),
    "tp": (plan_of("tp=2", 1, 2), 8),
    "pipeline": (plan_of("pp=2", 1, 4, clip_grad_norm=0.5), 7),
    "pipeline and stage 3": (plan_of("pp=2,dp_shard=2", 3, 2), 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_and_updates_are_those_of_a_grad_scaler(layout: str) -> None:
    plan, rows = LAYOUTS[layout]
    clip: Any = plan.clip_grad_norm
    expected = plain(plan.merge.microbatches * plan.mesh.dp_shard, clip=clip, rows=rows)
    got = on_ranks(plan, rows=rows)
    assert (got.scales, got.skipped) == (expected.scales, expected.skipped)
    # It was halved, doubled, and halved again.
    assert expected.skipped[0]
    assert expected.skipped[4]
    assert any(one < other for one, other in itertools.pairwise(expected.scales))
    # Ranks add in another order than one process where each has several microbatches, or parts of a product.
    if plan.mesh.tp > 1 or min(plan.mesh.dp_shard, plan.merge.microbatches) > 1:
        for name, value in expected.values.items():
            torch.testing.assert_close(got.values[name], value, rtol=1e-2, atol=1e-3)
    else:
        assert all(torch.equal(got.values[name], value) for name, value in expected.values.items())
        assert got.losses == pytest.approx(expected.losses, rel=1e-15, abs=0)
    if plan.mesh.size == plan.mesh.pp:  # else the norm is summed in another precision
        assert got.norms == pytest.approx(expected.norms, abs=0, rel=0, nan_ok=True)


def test_a_region_of_autocast_is_scaled_as_in_a_plain_loop() -> None:
    engine, run = begin(plan_of(precision={"compute": None}), alone()), Run()
    for batch in batches():
        with torch.autocast("cpu", torch.float16):
            take(engine, [batch], run)
    expected = plain(1, region=True)
    assert run.scales == expected.scales
    assert len(set(run.scales)) > 2
    assert all(torch.equal(value, expected.values[name]) for name, value in sw.full(engine))


def test_a_number_scales_and_changes_nothing_else() -> None:
    """In float32, where nothing is rounded to zero, and a power of two rounds nothing."""

    def train(channel: sw.Channel, scale: float | None) -> tuple[list[Any], list[Any], list[float | None]]:
        plan = plan_of("dp_shard=2", 3, scale=scale, precision={"compute": None}, clip_grad_norm=1.0)
        engine, seen, gradients, scales = begin(plan, channel), [], [], []
        for batch in batches()[:3]:
            report = engine.step(share(engine, batch))
            seen.append((report.loss, report.grad_norm, report.skipped, engine.evaluate(batch).loss))
            scales.append(report.loss_scale)
            gradients.append({str(piece): tensor.clone() for piece, tensor in engine.gradients().items()})
        return seen, [*gradients, dict(sw.full(engine))], scales

    runs = {scale: sw.simulate(2, partial(train, scale=scale))[0] for scale in (None, 2.0**-7, 1000.0)}
    seen, values, scales = runs[None]
    assert scales == [None] * 3
    assert (runs[2.0**-7][0], runs[2.0**-7][2]) == (seen, [2.0**-7] * 3)
    for one, other in zip(runs[2.0**-7][1], values, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    for name, value in values[-1].items():
        torch.testing.assert_close(runs[1000.0][1][-1][name], value, rtol=1e-5, atol=1e-7)


def test_gradients_that_float16_rounds_to_zero_are_there_again() -> None:
    def tiny(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.mean() * 1e-9

    def norm(scale: Any) -> float:
        engine = begun(alone(), Net, plan_of(scale=scale), optimizer=sgd, loss=tiny)
        return float(engine.step({"x": torch.ones(2, 4)}).grad_norm)

    with pytest.warns(UnderflowWarning, match=r"set precision\.loss_scale"):
        assert norm(None) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled = norm("dynamic")
    model = Net()
    tiny(model(torch.ones(2, 4)), None).backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert scaled == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), 1e-3)


def test_a_scale_goes_through_a_checkpoint_and_a_relayout_into_any_layout(tmp_path: Path) -> None:
    """With the steps in a row under it, so that it is doubled in the same step."""

    def save(channel: sw.Channel) -> Run:
        engine = begin(plan_of("dp_shard=2", 3), channel)
        run = take(engine, batches()[:4], Run())
        sw.save(tmp_path / "save", engine)
        take(engine, batches()[4:6], run)  # one step before it is doubled
        return take(sw.relayout(engine, plan_of("pp=2", k=2)), batches()[6:], run)

    def go_on(channel: sw.Channel, plan: sw.Plan) -> Run:
        engine = begin(plan, channel)
        sw.load(tmp_path / "save", engine)
        return take(engine, batches()[4:], Run())

    moved, whole = sw.simulate(2, save)[0], on_ranks(plan_of("dp_shard=2", 3))
    assert moved.scales == whole.scales
    for plan in (plan_of(), plan_of("pp=2", k=2), plan_of("dp_shard=2")):
        run = sw.simulate(plan.mesh.size, partial(go_on, plan=plan))[0]
        assert (run.scales, run.skipped) == (whole.scales[4:], whole.skipped[4:])
    assert set(go_on(alone(), plan_of(scale=8)).scales) == {8.0}
    fixed = on_ranks(plan_of(scale=65536))  # it stays after a skipped step
    assert (fixed.skipped[0], set(fixed.scales)) == (True, {65536.0})


def restored(entry: object) -> None:
    engine = begin(plan_of(), alone())
    assert engine.settings()["loss_scale"] == {"scale": 65536.0, "in_a_row": 0}
    engine.restore({}, {**engine.settings(), "loss_scale": entry})


ENTRIES = [3, {"scale": 0.0, "in_a_row": 1}, {"scale": 1.0}, {"scale": 1.0, "in_a_row": -1}]
REFUSED = Refusals(
    "engine.loss_scaling",
    {
        **{f"settings {each}": partial(restored, each) for each in ENTRIES},
        **{
            f"loss_scale={each!r}": lambda each=each: sw.Precision(loss_scale=each)
            for each in ("static", 0, -1.0, math.inf, math.nan, True, [1])
        },
    },
    kind=(CheckpointError, PlanError),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_scale_is_refused(case: str) -> None:
    REFUSED.check(case)
