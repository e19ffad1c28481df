"""Schedules of torch, of transformers and of the user, against the schedulers themselves; also in runs that go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import get_scheduler

from shardwise.errors import ConfigError
from shardwise.train import RunConfig, check_references
from shardwise.train.learning_rates import scheduler_maker
from tests.train.runs import finished, laid_out, small_run

MINE = """
from torch.optim import lr_scheduler


def make(optimizer, steps, share=0.5):
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=2)
    then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps * share))
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[2])


def none(optimizer, steps):
    return 3


def plateau(optimizer, steps):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


class Halved(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [group["lr"] * (0.5 if self.last_epoch else 1.0) for group in self.optimizer.param_groups]
"""

WITHOUT_DECAY = ("train.warmup_steps=null",)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


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
    "own": (["train.schedule=mine.py:make", *WITHOUT_DECAY], mine),
    "own class": (
        ["train.schedule=mine.py:Halved", *WITHOUT_DECAY],
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
    (folder / "mine.py").write_text(MINE)
    config = laid_out(folder, *SCHEDULES[name][0], GROUPS, *overrides)
    check_references(config)
    return config


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_rates_that_its_scheduler_gives(tmp_path: Path, name: str) -> None:
    through = finished(scheduled(tmp_path, name))
    assert through.curve("learning_rate") == expected_rates(SCHEDULES[name][1])


@pytest.mark.parametrize("name", ["exponential", "own", "restarts"])
def test_a_run_goes_on_in_its_schedule_under_another_layout(tmp_path: Path, name: str) -> None:
    words = ("checkpoint.every=3", f"train.output={tmp_path / 'parts'}")
    finished(scheduled(tmp_path, name, *words, "train.steps=6", "mesh.dp_shard=2"))
    (tmp_path / "parts" / "checkpoints" / "save-00000001").exists()
    then = finished(scheduled(tmp_path, name, *words, "train.steps=9", "mesh.dp_shard=3"), resume="auto")
    again = finished(scheduled(tmp_path, name, "train.steps=9", f"train.output={tmp_path / 'whole'}"))
    # Of nine updates from the beginning on, as with `decay`.
    assert then.curve("learning_rate")[6:] == again.curve("learning_rate")[6:]


def test_a_schedule_may_be_another_one_from_a_save_on(tmp_path: Path) -> None:
    words = ("checkpoint.every=3", f"train.output={tmp_path / 'parts'}")
    finished(scheduled(tmp_path, "cosine", *words, "train.steps=4"))
    then = finished(scheduled(tmp_path, "exponential", *words), resume="auto")
    assert then.curve("learning_rate")[4:] == pytest.approx(expected_rates(SCHEDULES["exponential"][1])[4:], rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.schedule=cosin"], 'train.schedule: transformers has no schedule "cosin"; did you mean "cosine"?'),
        (
            ["train.schedule=torch.optim.lr_scheduler:ExponentalLR", *WITHOUT_DECAY],
            "train.schedule: torch.optim.lr_scheduler has no ExponentalLR; did you mean "
            "torch.optim.lr_scheduler:ExponentialLR?",
        ),
        (
            [
                "train.schedule=torch.optim.lr_scheduler:ExponentialLR",
                "train.schedule_options.gama=1.0",
                *WITHOUT_DECAY,
            ],
            "train.schedule_options.gama: torch.optim.lr_scheduler:ExponentialLR takes no gama; did you mean "
            "train.schedule_options.gamma?",
        ),
        (
            ["train.schedule=torch.optim.lr_scheduler:ExponentialLR", *WITHOUT_DECAY],
            "train.schedule_options.gamma: missing; torch.optim.lr_scheduler:ExponentialLR needs it",
        ),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused(tmp_path: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_references(small_run(tmp_path, *overrides))
    assert problem in caught.value.problems


def test_settings_that_a_schedule_makes_meaningless_are_refused(tmp_path: Path) -> None:
    def problems(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            small_run(tmp_path, *overrides)
        return list(caught.value.problems)

    assert problems("train.schedule=cosine", "train.decay=linear", "train.min_learning_rate=0.0") == [
        "train.decay: given with train.schedule; leave one out",
        "train.min_learning_rate: given with train.schedule; leave one out",
    ]
    assert problems("train.schedule=mine.py:make") == ["train.warmup_steps: given with train.schedule; leave one out"]
    assert problems("train.schedule_options.gamma=1.0") == [
        "train.schedule_options: given without train.schedule, which they belong to"
    ]


PLATEAU = (
    "train.schedule=torch.optim.lr_scheduler:ReduceLROnPlateau",
    "train.schedule_options={factor=0.5, patience=1, threshold=0.9}",
    "train.evaluate_every=1",
    "checkpoint.every=4",
    *WITHOUT_DECAY,
)


@pytest.mark.parametrize("layout", [[], ["mesh.dp_shard=3", "sharding.stage=3"]])
def test_rates_fall_where_held_out_losses_do_not_also_in_a_run_that_goes_on(tmp_path: Path, layout: list[str]) -> None:
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


def test_options_of_a_plateau_are_checked(tmp_path: Path) -> None:
    options = ("train.schedule=reduce_lr_on_plateau", "train.schedule_options.factor=2.0")
    config = small_run(tmp_path, *options, *WITHOUT_DECAY)
    with pytest.raises(ConfigError, match=r"train\.schedule_options: ReduceLROnPlateau raised ValueError: Factor"):
        finished(config)


def test_a_schedule_that_ends_too_soon_is_named(tmp_path: Path) -> None:
    words = ["train.schedule=torch.optim.lr_scheduler:OneCycleLR", *WITHOUT_DECAY]
    config = laid_out(tmp_path, *words, "train.schedule_options={max_lr=0.05, total_steps=4}", "mesh.dp_shard=2")
    with pytest.raises(ConfigError, match=r"OneCycleLR raised ValueError: .*; give it as many steps as train\.steps"):
        finished(config)


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("mine.py:plateau", "makes a ReduceLROnPlateau, whose counts no save would have. Name "),
        ("mine.py:none", "mine.py:none gave a int, which is no scheduler of torch"),
        ("torch.optim.lr_scheduler:OneCycleLR", "raised "),
    ],
)
def test_a_callable_that_makes_no_schedule_of_steps_is_refused(tmp_path: Path, schedule: str, problem: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = small_run(tmp_path, f"train.schedule={schedule}", *WITHOUT_DECAY)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match=problem):
        scheduler_maker(config)(optimizer, 0)
