"""Schedules of torch, of transformers and of the user, against the schedulers themselves; also in runs that go on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import get_scheduler

from shardwise.train import RunConfig, check_references
from shardwise.train.config import Decay
from shardwise.train.learning_rates import LearningRateSchedule
from tests.train.runs import finished, laid_out

WITHOUT_DECAY = ("train.warmup_steps=null",)


def mine(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)], [2])


def named(name: str, **options: Any) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: get_scheduler(
        name, optimizer, num_warmup_steps=2, num_training_steps=6, scheduler_specific_kwargs=options
    )


SCHEDULES: dict[str, tuple[list[str], Callable[[torch.optim.Optimizer], Any]]] = {
    "exponential": (
        ["train.schedule=torch.optim.lr_scheduler:ExponentialLR", "train.schedule_options.gamma=0.7", *WITHOUT_DECAY],
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.7),
    ),
    "steps": (
        [
            "train.schedule=torch.optim.lr_scheduler:MultiStepLR",
            "train.schedule_options.milestones=[2, 4]",
            *WITHOUT_DECAY,
        ],
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4]),
    ),
    "one cycle": (
        [
            "train.schedule=torch.optim.lr_scheduler:OneCycleLR",
            "train.schedule_options={max_lr=0.05, total_steps=10}",
            *WITHOUT_DECAY,
        ],
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10),
    ),
    "own": (["train.schedule=schedules.py:make", *WITHOUT_DECAY], mine),
    "own class": (
        ["train.schedule=schedules.py:Halved", *WITHOUT_DECAY],
        lambda each: lr_scheduler.ExponentialLR(each, 0.5),
    ),
    "cosine": (["train.schedule=cosine"], named("cosine")),
    "restarts": (
        ["train.schedule=cosine_with_restarts", "train.schedule_options.num_cycles=2"],
        named("cosine_with_restarts", num_cycles=2),
    ),
    "root": (["train.schedule=inverse_sqrt"], named("inverse_sqrt")),
    "polynomial": (["train.schedule=polynomial", "train.schedule_options.power=2.0"], named("polynomial", power=2.0)),
    "constant": (["train.schedule=constant", *WITHOUT_DECAY], named("constant")),
}

GROUPS = "train.groups=[{parameters=['*.bias'], learning_rate=0.4}]"


def expected_rates(make: Callable[[torch.optim.Optimizer], Any], steps: int = 6) -> list[float]:
    """The rates of the first group in a plain loop."""
    settings = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.02, 0.4)]
    optimizer = torch.optim.AdamW(settings, lr=0.02)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def scheduled(folder: Path, name: str, *overrides: str) -> RunConfig:
    config = laid_out(folder, *SCHEDULES[name][0], GROUPS, *overrides)
    check_references(config)
    return config


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_rates_that_its_scheduler_gives(tmp_path: Path, name: str) -> None:
    through = finished(scheduled(tmp_path, name))
    assert through.curve("learning_rate") == expected_rates(SCHEDULES[name][1])


@pytest.mark.parametrize("name", ["own", "restarts"])
def test_a_run_goes_on_in_its_schedule_under_another_layout(tmp_path: Path, name: str) -> None:
    words = ("checkpoint.every=3", f"train.output={tmp_path / 'parts'}")
    finished(scheduled(tmp_path, name, *words, "train.steps=6", "mesh.dp_shard=2"))
    then = finished(scheduled(tmp_path, name, *words, "train.steps=9", "mesh.dp_shard=3"), resume="auto")
    again = finished(scheduled(tmp_path, name, "train.steps=9", f"train.output={tmp_path / 'whole'}"))
    # Of nine updates from the beginning on, as with `decay`.
    assert then.curve("learning_rate")[6:] == again.curve("learning_rate")[6:]


def test_a_schedule_may_be_another_one_from_a_save_on(tmp_path: Path) -> None:
    words = ("checkpoint.every=3", f"train.output={tmp_path / 'parts'}")
    finished(scheduled(tmp_path, "cosine", *words, "train.steps=4"))
    then = finished(scheduled(tmp_path, "exponential", *words), resume="auto")
    assert then.curve("learning_rate")[4:] == pytest.approx(expected_rates(SCHEDULES["exponential"][1])[4:], rel=1e-12)


PLATEAU = (
    "train.schedule=torch.optim.lr_scheduler:ReduceLROnPlateau",
    "train.schedule_options={factor=0.5, patience=1, threshold=0.9}",
    "train.evaluate_every=1",
    "checkpoint.every=4",
    *WITHOUT_DECAY,
)


def test_rates_fall_where_held_out_losses_do_not_also_in_a_run_that_goes_on(tmp_path: Path) -> None:
    layout = ["mesh.dp_shard=3", "sharding.stage=3"]
    whole = finished(laid_out(tmp_path, *PLATEAU, GROUPS, "train.steps=9", *layout))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.02)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.9)
    expected = []
    for loss in whole.curve("held_out_loss"):
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(loss)
    assert whole.curve("learning_rate") == expected
    assert len(set(expected)) > 2
    parts = (*PLATEAU, GROUPS, f"train.output={tmp_path / 'parts'}")
    finished(laid_out(tmp_path, *parts, "train.steps=5", *layout))
    then = finished(laid_out(tmp_path, *parts, "train.steps=9", *layout), resume="auto")
    assert then.curve("learning_rate") == expected
    assert then.curve("loss") == pytest.approx(whole.curve("loss"), rel=1e-6)


def closed_form(update: int, *, steps: int, warmup: int, decay: Decay, final: float) -> float:
    if update < warmup:
        return (update + 1) / warmup
    last, start = steps - 1, warmup
    done = 0.0 if last <= start else (update - start) / (last - start)
    return {
        "constant": 1.0,
        "linear": 1.0 + (final - 1.0) * done,
        "cosine": final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done)),
    }[decay]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (7, 0), (7, 3), (7, 6), (7, 7), (50, 10)])
def test_schedule_equals_the_closed_form_at_every_update(decay: Decay, steps: int, warmup: int) -> None:
    schedule = LearningRateSchedule(steps=steps, warmup_steps=warmup, decay=decay, final=0.1)
    for update in range(steps):
        expected = closed_form(update, steps=steps, warmup=warmup, decay=decay, final=0.1)
        assert schedule(update) == pytest.approx(expected, abs=1e-15)
    assert schedule(steps + 1) == schedule(steps + 999) == (1.0 if decay == "constant" else 0.1)
