"""A loss function that returns a dict: "loss" is differentiated, and every entry is weighed and reported."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing.accelerator import counted
from tests.engine.loops import begun
from tests.engine.loops import plan_of as short_plan_of
from tests.oracle.batches import points, square_loss
from tests.oracle.program import adamw
from tests.refusals import Refusals


class GivesBoth(nn.Module):
    """Gives what it has on both of its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return hidden, self.last(hidden)


def test_entries_and_metrics_may_be_of_several_stages() -> None:
    def loss(output: tuple[torch.Tensor, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        hidden, last = output
        return {"loss": square_loss(last, batch), "hidden": hidden.mean(), "both": hidden.mean() + last.mean()}

    def run(channel: sw.Channel) -> Any:
        plan = short_plan_of(f"pp={channel.size}", k=2, stages={"first": 0, "last": 1})
        engine = begun(channel, GivesBoth, plan, optimizer=adamw, loss=loss)
        found = [engine.step(points(step, 5)).losses for step in range(2)]
        metrics = {"hidden": lambda output, batch: output[0].mean(1) + output[1][:, 0]}
        report = engine.evaluate(points(2, 5), metrics=metrics)
        return found, report.losses, report.metrics

    assert sw.simulate(2, run) == sw.simulate(1, run) * 2


def linear_loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {"loss": square_loss(output, batch), "aux": output.mean(), "rows": len(output)}


def linear_engine(channel: sw.Channel, loss: Callable[..., Any], **settings: Any) -> Any:
    plan = short_plan_of(f"dp_shard={channel.size}", clip_grad_norm=1.0)
    return begun(channel, lambda: nn.Linear(4, 1).to(channel.device), plan, optimizer=adamw, loss=loss, **settings)


def test_entries_travel_in_the_calls_that_the_loss_needs_anyway() -> None:
    def calls(channel: sw.Channel, loss: Callable[..., Any]) -> list[str]:
        watched = sw.Recorded(channel)
        engine = linear_engine(watched, loss)
        engine.step(points(channel.rank, 3))
        engine.evaluate(points(channel.rank, 3))
        return [call.operation for call in watched.calls]

    plain, dicts = (sw.simulate(2, partial(calls, loss=loss)) for loss in (square_loss, linear_loss))
    assert dicts == plain


def test_entries_of_a_microbatch_without_weight_do_not_count() -> None:
    def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {**linear_loss(output, batch), **({"strange": 1.0} if batch["x"].isnan().any() else {})}

    def run(channel: sw.Channel) -> tuple[Any, Any]:
        weight = lambda batch: 0.0 if batch["x"].isnan().any() else float(len(batch["x"]))  # noqa: E731
        engine = linear_engine(channel, loss, loss_weight=weight)
        nothing = {"x": torch.full((2, 4), math.nan), "y": torch.ones(2, 1)}
        # The second rank computes nothing at all.
        parts = [points(0, 3), nothing, points(1, 1)] if channel.rank == 0 else [nothing]
        return engine.evaluate(parts).losses, engine.step(parts).losses

    (held_out, losses), other = sw.simulate(2, run)
    assert held_out == losses
    assert losses["rows"] == (3 * 3 + 1) / 4
    assert other == (held_out, losses)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_entries_on_a_device_are_those_of_the_host_and_wait_for_nothing(fake: str, num_ranks: int) -> None:
    def run(channel: sw.Channel) -> list[float]:
        engine, found = linear_engine(channel, linear_loss), []
        for step in range(4):
            parts = [points(step, 2), points(9 + step, 3)][: 2 - channel.rank]
            found += [*engine.step(parts).losses.values(), *engine.evaluate(parts).losses.values()]
        return found

    def waits(channel: sw.Channel, loss: Callable[..., Any]) -> list[Any]:
        engine = linear_engine(channel, loss)
        for step in range(4):
            engine.step(points(step, 2))
        with counted() as counts:
            for step in range(3):
                engine.step(points(step, 2))
        return [each.syncs for each in counts]

    wanted = sw.simulate(num_ranks, run)
    assert sw.simulate(num_ranks, run, device=fake) == [pytest.approx(each, rel=1e-5) for each in wanted]
    plain, dicts = (sw.simulate(1, partial(waits, loss=loss), device=fake) for loss in (square_loss, linear_loss))
    assert dicts == plain


def gave(entries_of: Callable[[int, Any], dict[str, Any]], method: str = "step", num_ranks: int = 2) -> None:
    """entries_of: f(rank, batch) -> what the loss function gives on each rank; "loss" stands for one."""

    def run(channel: sw.Channel) -> ModelError:
        def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
            found = entries_of(channel.rank, batch)
            return {key: square_loss(output, batch) if value == "loss" else value for key, value in found.items()}

        x = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
        parts = [{"x": x[at : at + 1], "y": torch.ones(1, 1)} for at in range(2)]
        with pytest.raises(ModelError) as caught:
            getattr(linear_engine(channel, loss), method)(parts)
        return caught.value

    errors = sw.simulate(num_ranks, run)
    assert len({str(each) for each in errors}) == 1
    raise errors[0]


UNLIKE: dict[str, Any] = {
    "microbatches differ": lambda rank, batch: {"loss": "loss", **({"more": 1.0} if batch["x"][0, 0] > 0 else {})},
    "ranks differ": lambda rank, batch: {"loss": "loss", "aux": 1.0, **({"more": 1.0} if rank else {})},
}
REFUSED = Refusals(
    "engine.loss_entries",
    {
        **{name: partial(gave, each) for name, each in UNLIKE.items()},
        **{f"{name} in an evaluation": partial(gave, each, "evaluate") for name, each in UNLIKE.items()},
        "no loss": lambda: gave(lambda *_: {"aux": 1.0}, num_ranks=1),
        "None for a loss": lambda: gave(lambda *_: {"loss": None}, num_ranks=1),
        "several numbers": lambda: gave(lambda *_: {"loss": "loss", "aux": torch.ones(3)}, num_ranks=1),
        "a text": lambda: gave(lambda *_: {"loss": "loss", "aux": "text"}, num_ranks=1),
    },
    kind=ModelError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_other_dicts_are_refused_alike_on_all_ranks(case: str) -> None:
    REFUSED.check(case)
