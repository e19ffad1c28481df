"""Losses are scaled as by torch.amp.GradScaler in a plain loop, to the bit, under every layout."""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine import loss_scaling
from shardwise.engine.kept_numbers import KeptNumbers
from shardwise.engine.step_figures import KnownFigures
from shardwise.errors import CheckpointError, PlanError, UnderflowWarning
from tests.engine.expected import points, sgd, square_loss
from tests.engine.models import Residual
from tests.engine.oracle import count_rows, factors_of, microbatches_of, share_of

Values = dict[str, torch.Tensor]

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
    values: Values = field(default_factory=dict)


def plain(num_microbatches: int, *, clip: float | None = None, rows: int = 8) -> Run:
    """torch's loop: float16 copies of float32 masters, and GradScaler around the optimizer."""
    run, masters, working = Run(), Net(), Net().half()
    optimizer = sgd(list(masters.parameters()))
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    for batch in batches(rows):
        run.scales.append(scaler.get_scale())
        optimizer.zero_grad()
        [parts] = microbatches_of(batch, 1, num_microbatches)
        weights = [count_rows(part) for part in parts]
        losses = []
        for part, factor in zip(parts, factors_of(weights), strict=True):
            loss = square_loss(working(part["x"].half()), part)
            losses.append(loss.item())
            scaler.scale(loss if factor == 1.0 else loss * factor).backward()
            for master, copy in zip(masters.parameters(), working.parameters(), strict=True):
                assert copy.grad is not None
                master.grad = copy.grad.float() if master.grad is None else master.grad + copy.grad
                copy.grad = None
        for master in masters.parameters():
            assert master.grad is not None
            master.grad /= num_microbatches
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


def plan_of(stage: int = 1, k: int = 1, *, scale: Any = "dynamic", clip: float | None = None, **mesh: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        sharding=sw.Sharding(stage=stage),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute="float16", loss_scale=scale),
        tensor=sw.Tensor(rules={"layers.*": "colwise_gather_output"} if "tp" in mesh else None),
        clip_grad_norm=clip,
    )


@pytest.fixture(autouse=True)
def soon_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two finite steps in a row double the scale, where it takes 2000 otherwise."""
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 2)


def begin(plan: sw.Plan, channel: sw.Channel, make: Callable[[], nn.Module] = Net) -> sw.Engine:
    return sw.parallelize(make(), plan, optimizer=sgd, loss=square_loss, channel=channel)


def step(engine: sw.Engine, batch: Any, run: Run) -> None:
    """An update from this rank's share, with what it reports."""
    mesh = engine.plan.mesh
    report = engine.step(share_of(batch, mesh.coordinates(engine.channel.rank)["dp_shard"], mesh.dp_shard))
    assert report.loss_scale is not None
    run.scales.append(report.loss_scale)
    run.skipped.append(report.skipped)
    run.norms.append(report.grad_norm)
    run.losses.append(report.loss)


def on_ranks(plan: sw.Plan, *, rows: int = 8) -> Run:
    """What rank 0 reports; all ranks report the same."""

    def train(channel: sw.Channel) -> Run:
        engine, run = begin(plan, channel), Run()
        for batch in batches(rows):
            step(engine, batch, run)
        run.values = whole_masters(engine)
        return run

    first, *others = sw.simulate(plan.mesh.size, train)
    assert all(repr(each) == repr(first) for each in others)
    return first


def whole_masters(engine: sw.Engine) -> Values:
    """The float32 values; the float16 parameters are copies of them."""
    state = sw.full(engine, optimizer=True)
    return {name.split("/")[1]: tensor for name, tensor in state if name.endswith("/master")}


LAYOUTS = {
    "one rank": (plan_of(), 8),
    "microbatches": (plan_of(k=4), 7),
    "clipped": (plan_of(k=4, clip=0.5), 8),
    **{f"stage {stage}": (plan_of(stage, dp_shard=2), 7) for stage in range(4)},
    "stage 2 twice": (plan_of(2, 2, dp_shard=2), 8),
    "tp": (plan_of(1, 2, tp=2), 8),
    "pipeline": (plan_of(1, 4, clip=0.5, pp=2), 7),
    "pipeline and stage 3": (plan_of(3, 2, pp=2, dp_shard=2), 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_and_updates_are_those_of_a_grad_scaler(layout: str) -> None:
    plan, rows = LAYOUTS[layout]
    clip = plan.clip_grad_norm
    assert not isinstance(clip, Mapping)
    expected = plain(plan.merge.microbatches * plan.mesh.dp_shard, clip=clip, rows=rows)
    got = on_ranks(plan, rows=rows)
    assert got.scales == expected.scales
    assert got.skipped == expected.skipped
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
    region = torch.autocast("cpu", torch.float16)

    def train(channel: sw.Channel) -> tuple[list[float], Values]:
        run, plan = Run(), sw.Plan(precision=sw.Precision(loss_scale="dynamic"))
        engine = begin(plan, channel)
        for batch in batches():
            with region:
                step(engine, batch, run)
        return run.scales, dict(sw.full(engine))

    model, scaler, scales = Net(), torch.amp.GradScaler("cpu", growth_interval=2), []
    optimizer = sgd(list(model.parameters()))
    for batch in batches():
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        with region:
            loss = square_loss(model(batch["x"]), batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    [(got, values)] = sw.simulate(1, train)
    assert got == scales
    assert len(set(scales)) > 2
    assert all(torch.equal(values[name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_number_scales_and_changes_nothing_else(stage: int) -> None:
    """In float32, where nothing is rounded to zero, and a power of two rounds nothing."""

    def train(scale: float | None, channel: sw.Channel) -> tuple[list[Any], list[Values], list[float | None]]:
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2),
            sharding=sw.Sharding(stage=stage),
            precision=sw.Precision(loss_scale=scale),
            clip_grad_norm=1.0,
        )
        engine, seen, gradients, scales = begin(plan, channel), [], [], []
        for batch in batches()[:3]:
            report = engine.step(share_of(batch, channel.rank, 2))
            seen.append((report.loss, report.grad_norm, report.skipped, engine.evaluate(batch).loss))
            scales.append(report.loss_scale)
            gradients.append({str(piece): tensor.clone() for piece, tensor in engine.gradients().items()})
        return seen, [*gradients, dict(sw.full(engine))], scales

    seen, values, scales = sw.simulate(2, lambda channel: train(None, channel))[0]
    got = sw.simulate(2, lambda channel: train(2.0**-7, channel))[0]
    assert scales == [None] * 3
    assert got[2] == [2.0**-7] * 3
    assert got[0] == seen
    for one, other in zip(got[1], values, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    rounded = sw.simulate(2, lambda channel: train(1000.0, channel))[0]
    for name, value in values[-1].items():
        torch.testing.assert_close(rounded[1][-1][name], value, rtol=1e-5, atol=1e-7)


def test_a_number_stays_after_a_skipped_step() -> None:
    run = on_ranks(plan_of(scale=65536))
    assert run.skipped[0]
    assert set(run.scales) == {65536.0}


def test_gradients_that_float16_rounds_to_zero_are_there_again() -> None:
    def tiny(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.mean() * 1e-9

    def norms(scale: Any, channel: sw.Channel) -> float:
        plan = sw.Plan(precision=sw.Precision(compute="float16", loss_scale=scale))
        engine = sw.parallelize(Net(), plan, optimizer=sgd, loss=tiny, channel=channel)
        return engine.step({"x": torch.ones(2, 4)}).grad_norm

    with pytest.warns(UnderflowWarning, match=r"set precision\.loss_scale"):
        assert sw.simulate(1, lambda channel: norms(None, channel)) == [0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [scaled] = sw.simulate(1, lambda channel: norms("dynamic", channel))
    model = Net()
    tiny(model(torch.ones(2, 4)), None).backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert scaled == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), 1e-3)


# Checkpoints ------------------------------------------------------------------------------------------------------


def test_a_scale_goes_through_a_checkpoint_into_any_layout(tmp_path: Path) -> None:
    """With the steps in a row under it, so that it is doubled in the same step."""
    path = str(tmp_path / "save")

    def save(channel: sw.Channel) -> None:
        engine = begin(plan_of(3, dp_shard=2), channel)
        for batch in batches()[:4]:
            step(engine, batch, Run())
        sw.save(path, engine, channel=channel)

    def go_on(plan: sw.Plan, channel: sw.Channel) -> Run:
        engine, run = begin(plan, channel), Run()
        sw.load(path, engine, channel=channel)
        for batch in batches()[4:]:
            step(engine, batch, run)
        return run

    sw.simulate(2, save)
    whole = on_ranks(plan_of(3, dp_shard=2))
    for plan in (plan_of(), plan_of(k=2, pp=2), plan_of(1, dp_shard=2)):
        run = sw.simulate(plan.mesh.size, partial(go_on, plan))[0]
        assert (run.scales, run.skipped) == (whole.scales[4:], whole.skipped[4:])
    fixed = sw.simulate(1, partial(go_on, plan_of(scale=8)))[0]
    assert set(fixed.scales) == {8.0}


def test_a_relayout_keeps_the_scale() -> None:
    def train(channel: sw.Channel) -> Run:
        engine, run = begin(plan_of(1, dp_shard=2), channel), Run()
        for at, batch in enumerate(batches()):
            if at == 6:  # one step before it is doubled
                engine = sw.relayout(engine, plan_of(1, k=2, pp=2))
            step(engine, batch, run)
        return run

    assert sw.simulate(2, train)[0].scales == on_ranks(plan_of(1, dp_shard=2)).scales


@pytest.mark.parametrize("entry", [3, {"scale": 0.0, "in_a_row": 1}, {"scale": 1.0}, {"scale": 1.0, "in_a_row": -1}])
def test_settings_that_are_no_scale_are_refused(entry: object) -> None:
    def load(channel: sw.Channel) -> None:
        engine = begin(plan_of(), channel)
        settings = engine.settings()
        assert settings["loss_scale"] == {"scale": 65536.0, "in_a_row": 0}
        with pytest.raises(CheckpointError, match=r"loss_scale=.* is not a scale and a number of steps"):
            engine.restore({}, {**settings, "loss_scale": entry})

    sw.simulate(1, load)


# Plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["static", 0, -1.0, math.inf, math.nan, True, [1]])
def test_what_is_no_scale_is_refused(scale: Any) -> None:
    with pytest.raises(PlanError, match=r"precision\.loss_scale: .* is neither .dynamic. nor a number"):
        sw.Precision(loss_scale=scale)


@pytest.mark.parametrize("scale", [None, "dynamic", 1024])
def test_a_scale_is_in_the_text_of_a_plan(scale: Any) -> None:
    plan = plan_of(scale=scale)
    assert sw.Plan.parse(plan.text()) == plan
    assert ("loss_scale" in plan.text()) == (scale is not None)
    assert plan_of(scale=1024).text() == plan_of(scale=1024.0).text()


def test_scales_follow_those_of_torch_for_many_steps() -> None:
    """From the largest scale to small ones, through every change."""
    random = torch.Generator().manual_seed(0)
    ours = loss_scaling.LossScale("dynamic", torch.device("cpu"))
    scale, in_a_row = torch.full((), 2.0**126), torch.zeros((), dtype=torch.int32)
    ours.restore((2.0**126, 0))
    kept = KeptNumbers(torch.device("cpu"))
    for draw in torch.rand(400, generator=random).tolist():
        is_wrong = draw < 0.4
        norm = math.nan if is_wrong else 1.0
        ours.learn(KnownFigures(loss=1.0, grad_norm=norm, norms={}, weight=1.0, norm_dtype=torch.float32, kept=kept))
        torch._amp_update_scale_(scale, in_a_row, torch.tensor(float(is_wrong)), 2.0, 0.5, 2)
        assert ours.state() == (float(scale), int(in_a_row))
    assert float(scale) < 2.0**110
