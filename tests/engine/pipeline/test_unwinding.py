"""Forwards that end by an error, and run the program's `finally` and `except` on the way out: no rank waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

ROWS, WIDTH, K = 8, 4, 4


class Block(nn.Linear):
    def __init__(self, number: int, broken: tuple[int, int], calls: dict[int, int]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.number, self.broken, self.calls = number, broken, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[self.number] = self.calls.get(self.number, 0) + 1
        if self.broken == (self.number, self.calls[self.number]):
            raise RuntimeError("broken sample")
        return super().forward(x)


class Cleaning(nn.Module):
    """Cleans up after each forward, whatever came of it."""

    def __init__(self, broken: tuple[int, int], clean: Callable[[Any, torch.Tensor], object], *, catches: bool) -> None:
        super().__init__()
        calls: dict[int, int] = {}
        self.blocks = nn.ModuleList(Block(number, broken, calls) for number in range(4))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.clean, self.catches = clean, catches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            for block, after in zip(self.blocks, self.after, strict=True):
                x = after(block(x))
        except RuntimeError:
            if self.catches:
                self.clean(self, x)
            raise
        finally:
            if not self.catches:
                self.clean(self, x)
        return x


def each_from_new(model: Cleaning, x: torch.Tensor) -> None:
    for block in model.after:
        block(torch.zeros(1, WIDTH))


def each_from_values(model: Cleaning, x: torch.Tensor) -> None:
    for block in model.after:
        x = block(x)


WAYS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "operations": lambda model, x: (x * 2).sum(),
    "modules": each_from_new,
    "modules of values": each_from_values,
    "a read": lambda model, x: float(x.detach().sum()),
    "the last module": lambda model, x: model.after[3](torch.zeros(1, WIDTH)),
}


@pytest.mark.parametrize("catches", [False, True], ids=["finally", "except"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("schedule", "broken"), [("interleaved", (2, 1)), ("interleaved", (1, 3)), ("1f1b", (2, 2))])
def test_what_runs_because_of_an_error_makes_no_rank_wait(
    schedule: str, broken: tuple[int, int], way: str, catches: bool
) -> None:
    def run(channel: sw.Channel) -> None:
        model = Cleaning(broken, WAYS[way], catches=catches)
        chunks = 2 if schedule == "interleaved" else 1
        stages = {f"{part}.{at}": at * 2 * chunks // 4 for part in ("blocks", "after") for at in range(4)}
        plan = sw.Plan(
            mesh=sw.Mesh(pp=2),
            pipeline=sw.Pipeline(schedule=schedule, stages=stages),
            merge=sw.Merge(microbatches=K),
        )
        engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        engine.step({"x": torch.ones(ROWS, WIDTH)})

    with pytest.raises(RuntimeError, match="broken sample"):
        sw.simulate(2, run, timeout_seconds=20)
