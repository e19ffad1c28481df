"""A budget for saved tensors: what is chosen keeps to it as bytes of a device show, and changes no bit."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from tests.engine.activations.nets import (
    ACTIVATION,
    DROPPING,
    ROWS,
    SAVED,
    assert_changes_nothing,
    blocks,
    square,
)
from tests.oracle.decoder import Decoder
from tests.oracle.places import train
from tests.oracle.program import plan_of, seeded

NUM_BLOCKS, WIDTH = 24, 64
PARTS = ("?.up", "??.up", "1?")
DEEP = replace(
    DROPPING,
    make=seeded(lambda: Decoder(0.1, num_blocks=6).double()),
    stages=None,
    batches=[*DROPPING.batches] * 2,
)


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({"mesh": "dp_shard=2", "stage": 3, "k": 2}, 60_000),
        ({"mesh": "pp=2", "k": 4, "schedule": "interleaved"}, 150_000),
    ],
)
def test_every_plan_has_the_bits_that_it_has_without(settings: dict[str, Any], budget: int) -> None:
    asked = sw.Activations(budget_bytes=budget)
    reports = {each.activations.report() for each in assert_changes_nothing(DEEP, plan_of(DEEP, **settings), asked)}
    (report,) = reports  # all ranks know all choices
    assert "recompute: blocks" in report


@pytest.mark.parametrize("mesh", ["single", "dp_shard=2", "pp=2"])
def test_a_budget_that_nothing_meets_is_refused_on_all_ranks_with_the_least_one(mesh: str) -> None:
    plan = plan_of(DEEP, mesh, activations=sw.Activations(budget_bytes=1000))
    with pytest.raises(PlanError, match=r"1000 asked; on stage 0 .* take (\d+) bytes at least") as raised:
        train(DEEP, plan)
    least = int(str(raised.value).split(" bytes at least")[0].rsplit(" ", 1)[1])
    if mesh != "pp=2":  # there the other stage may need more
        train(DEEP, replace(plan, activations=sw.Activations(budget_bytes=least)))


def engine_of(channel: sw.Channel, model: nn.Module, plan: sw.Plan, **settings: Any) -> sw.Engine:
    return sw.parallelize(
        model, plan, optimizer=partial(torch.optim.SGD, lr=0.1), loss=square, channel=channel, **settings
    )


def sampled(activations: sw.Activations, make: Callable[[], nn.Module], device: str) -> tuple[int, int, str]:
    """The most bytes on a device between two modules of a step, second runs included; the expected peak, the report."""

    def on_rank(channel: sw.Channel) -> tuple[int, int, str]:
        model = seeded(make)()
        engine = engine_of(channel, model, sw.Plan(activations=activations))
        batch = {"input": torch.ones(ROWS, WIDTH, device=channel.device)}
        for _ in range(2):
            engine.step(batch)
        gc.collect()
        rest = torch.accelerator.memory_allocated(channel.device)
        seen: list[int] = []
        for each in model.modules():
            each.register_forward_hook(
                lambda *_: seen.append(torch.accelerator.memory_allocated(channel.device) - rest), always_call=True
            )
        engine.step(batch)
        assert engine.activations.budget is not None
        return max(seen), engine.activations.budget.chosen[0].peak_bytes, engine.activations.report()

    [found] = sw.simulate(1, on_rank, device=device)
    return found


@pytest.mark.parametrize(
    ("how", "share"),
    [
        *(({"checkpoint": "blocks"}, share) for share in (1.1, 0.7, 0.25)),
        *(({"checkpoint": ("*",)}, share) for share in (0.7, 0.4)),
        *(({"checkpoint": PARTS}, share) for share in (0.7, 0.4)),
        *(({"offload": "blocks"}, share) for share in (1.1, 0.25)),
    ],
)
def test_the_bytes_of_a_device_keep_to_the_budget(fake: str, share: float, how: dict[str, Any]) -> None:
    budget = int(share * NUM_BLOCKS * SAVED)
    asked = sw.Activations(budget_bytes=budget, **how)
    if how == {"checkpoint": PARTS} and share < 0.7:
        with pytest.raises(PlanError, match="at least"):
            sampled(asked, blocks(NUM_BLOCKS), fake)
        return
    peak, expected, report = sampled(asked, blocks(NUM_BLOCKS), fake)
    assert expected <= budget
    assert peak <= 1.03 * budget
    if "offload" in how:
        assert share > 1 or "offload: " in report
        return
    # Between modules there are what they gave and a gradient of it, too.
    assert expected - 2 * ACTIVATION <= peak <= expected + 3 * ACTIVATION
    assert ("recompute" in report) == (share < 1)


def test_ranks_without_rows_go_by_those_that_have_some() -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), activations=sw.Activations(budget_bytes=1 << 20))

    def on_rank(channel: sw.Channel) -> list[str]:
        engine = engine_of(channel, seeded(blocks(2))(), plan, loss_weight=lambda part: float(part["weight"]))
        reports = []
        for weights in ([0.0, 1.0], [1.0, 1.0]):
            engine.step({"input": torch.ones(2, WIDTH), "weight": torch.tensor(weights[channel.rank])})
            reports.append(engine.activations.report())
        return reports

    (first, second), other = sw.simulate(2, on_rank)
    assert first == second
    assert other == [first, second]
    assert "keep: 0, 1" in first


@pytest.mark.parametrize("by", ["only", "requires_grad"])
def test_steps_that_train_other_parameters_have_choices_of_their_own(by: str) -> None:
    """A module below all that a step trains saves nothing in it, which says nothing of other steps."""
    budget = 3 * SAVED
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), activations=sw.Activations(budget_bytes=budget))
    batch = {"input": torch.ones(ROWS, WIDTH)}

    def on_rank(channel: sw.Channel) -> list[str]:
        model = seeded(blocks(6))()
        engine = engine_of(channel, model, plan, groups={"last": "5", "all": "*"})
        reports = []
        for trains_all in (False, False, True, True, False):
            if by == "requires_grad":
                for block in list(model.children())[:5]:
                    block.requires_grad_(trains_all)
            engine.step(batch, only=None if by == "requires_grad" else "all" if trains_all else "last")
            reports.append(engine.activations.report())
        assert engine.activations.budget is not None
        assert all(each.peak_bytes <= budget for each in engine.activations.budget.chosen)
        return reports

    one, other = sw.simulate(2, on_rank)
    assert one == other
    first, second, third, fourth, last = one
    assert "recompute" not in first
    assert second == last == first
    assert "recompute" in third
    assert fourth == third
