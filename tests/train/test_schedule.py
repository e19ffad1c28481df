"""The learning rate against the formulas, written out."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from shardwise.train.config import Decay, TrainTable
from shardwise.train.learning_rates import LearningRateSchedule


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


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_last_update_takes_the_smallest_rate_and_later_ones_stay_there(decay: Decay) -> None:
    schedule = LearningRateSchedule(steps=20, warmup_steps=5, decay=decay, final=0.25)
    rates = [schedule(update) for update in range(20)]
    assert max(rates) == rates[4] == rates[5] == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == schedule(20) == schedule(1000) == 0.25


def test_the_schedule_drives_a_torch_scheduler() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    table = TrainTable(steps=4, warmup_steps=2, decay="linear", min_learning_rate=0.0)
    scheduler = LambdaLR(optimizer, LearningRateSchedule.of(table))
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 2.0, 2.0, 0.0]
