"""A rank that stops stops all: its own error stays its own, and the others are told which rank it was."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PeerError
from tests.engine.expected import adamw, points, seeded, square_loss

PLAN = sw.Plan(mesh=sw.Mesh(dp_shard=3), merge=sw.Merge(microbatches=2))
Outcome = BaseException | None


class Stumbling(nn.Module):
    """Raises in forward, or in backward, for rows that hold a 99 (or 98)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 99).any()):
            raise ArithmeticError("cannot do 99")
        y: torch.Tensor = self.linear(x)
        if bool((x == 98).any()):
            y.register_hook(_raise)
        return y


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("cannot undo 98")


def outcomes(act: Callable[[sw.Engine, int], object], **settings: Any) -> list[Outcome]:
    """What each of three ranks ends with when `act` is done to its engine."""

    def run(channel: sw.Channel) -> Outcome:
        given = {"loss": square_loss, "optimizer": adamw, **settings}
        engine = sw.parallelize(seeded(Stumbling)(), PLAN, channel=channel, **given)
        try:
            act(engine, channel.rank)
        except Exception as error:
            return error
        return None

    return sw.simulate(3, run)


def with_value(value: float, *, row: int = 0) -> dict[str, torch.Tensor]:
    batch = points(0, 4)
    batch["x"][row, 0] = value
    return batch


def assert_told_by(rank: int, found: list[Outcome], *, words: str, operation: bool = True) -> None:
    """Every other rank has a PeerError that names the rank, what it was for, and the reason."""
    for other, error in enumerate(found):
        if other == rank:
            continue
        assert isinstance(error, PeerError), error
        assert error.rank == rank
        assert f"rank {rank} stopped: {words}" in str(error)
        if operation:
            assert error.operation
            assert error.purpose


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("value", "words"), [(99, "cannot do 99"), (98, "cannot undo 98")])
@pytest.mark.parametrize("row", [0, 3])
def test_an_exception_in_forward_or_backward_keeps_its_kind_and_stops_the_others(
    rank: int, value: float, words: str, row: int
) -> None:
    found = outcomes(lambda engine, own: engine.step(with_value(value, row=row) if own == rank else points(0, 4)))
    error = found[rank]
    assert isinstance(error, ArithmeticError)
    assert str(error) == words
    assert error.__notes__ == [f"shardwise: on rank {rank}, in microbatch {row // 2} of 2"]
    assert_told_by(rank, found, words=f"ArithmeticError in a step: {words}")


def test_an_exception_in_an_evaluation_stops_the_others() -> None:
    found = outcomes(lambda engine, own: engine.evaluate(with_value(99) if own == 1 else points(0, 4)))
    assert isinstance(found[1], ArithmeticError)
    assert_told_by(1, found, words="ArithmeticError in an evaluation: cannot do 99")


def test_an_exception_in_the_users_weight_stops_the_others() -> None:
    def weight(batch: Any) -> float:
        return float(batch["no such entry"]) if bool((batch["x"] == 99).any()) else 1.0

    found = outcomes(lambda engine, own: engine.step(with_value(99) if own == 2 else points(0, 4)), loss_weight=weight)
    assert isinstance(found[2], KeyError)
    assert_told_by(2, found, words="KeyError in splitting a batch: 'no such entry'")


class Failing(torch.optim.SGD):
    """Raises in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2 and self.param_groups[0]["nesterov"]:
            raise ArithmeticError("no second step")
        return super().step(closure)


def test_an_exception_in_the_optimizer_stops_the_others() -> None:
    def act(engine: sw.Engine, rank: int) -> None:
        if rank == 1:
            engine.optimizer.param_groups[0].update(nesterov=True, momentum=0.9)
        for _ in range(2):
            engine.step(points(0, 4))

    found = outcomes(act, optimizer=lambda parameters: Failing(parameters, lr=0.1))
    assert isinstance(found[1], ArithmeticError)
    assert_told_by(1, found, words="ArithmeticError in a step: no second step")


def test_an_interruption_stops_the_others() -> None:
    class Interrupted(Stumbling):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x == 99).any()):
                raise KeyboardInterrupt
            return super().forward(x)

    def run(channel: sw.Channel) -> Outcome:
        engine = sw.parallelize(Interrupted(), PLAN, optimizer=adamw, loss=square_loss, channel=channel)
        try:
            engine.step(with_value(99) if channel.rank == 0 else points(0, 4))
        except BaseException as error:
            return error
        return None

    torch.manual_seed(0)
    found = sw.simulate(3, run)
    assert isinstance(found[0], KeyboardInterrupt)
    assert_told_by(0, found, words="KeyboardInterrupt in a step")


def test_a_channel_that_was_stopped_refuses_at_once() -> None:
    def act(engine: sw.Engine, rank: int) -> None:
        with pytest.raises(ArithmeticError if rank == 1 else PeerError):
            engine.step(with_value(99) if rank == 1 else points(0, 4))
        engine.step(points(0, 4))

    for error in outcomes(act):
        assert isinstance(error, PeerError)
        assert error.rank == 1


def test_an_exception_while_building_stops_the_others() -> None:
    class Unhookable(nn.Linear):
        """Modules whose parameters are narrower than their inputs get a hook, after the ranks have agreed."""

        def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
            raise ArithmeticError("cannot hook")

    def run(channel: sw.Channel) -> Outcome:
        model = Unhookable(4, 1) if channel.rank == 1 else nn.Linear(4, 1)
        plan = replace(PLAN, precision=sw.Precision(compute="bfloat16"))
        try:
            engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
            engine.step(points(0, 4))
        except Exception as error:
            return error
        return None

    torch.manual_seed(0)
    found = sw.simulate(3, run)
    assert isinstance(found[1], ArithmeticError)
    assert_told_by(1, found, words="ArithmeticError in parallelize: cannot hook")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda output, batch: output,
            "the loss function's result holds no scalar loss (found a tensor of shape",
        ),
        (lambda output, batch: None, "the loss function's result holds no scalar loss (found NoneType)"),
        (lambda output, batch: output.sum().item(), "the loss function's result holds no scalar loss (found float)"),
        (
            lambda output, batch: output.sum().detach(),
            "the loss depends on no trainable parameter",
        ),
        (None, "the model's output holds no scalar loss (found a tensor of shape [2, 1])"),
    ],
)
def test_a_model_without_a_loss_to_learn_from_is_told_on_the_first_step(loss: Any, message: str) -> None:
    found = outcomes(lambda engine, _: engine.step({"x": points(0, 4)["x"]}), loss=loss)
    assert any(isinstance(error, ModelError) and message in str(error) for error in found)
    assert all(isinstance(error, ModelError | PeerError) for error in found)


def test_a_model_in_which_nothing_trains_is_told_on_the_first_step() -> None:
    def run(channel: sw.Channel) -> Outcome:
        model = seeded(Stumbling)().requires_grad_(False)
        engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=square_loss, channel=channel)
        assert engine.evaluate(points(0, 4)).loss > 0
        try:
            engine.step(points(0, 4))
        except Exception as error:
            return error
        return None

    found = sw.simulate(3, run)
    assert any("the loss depends on no trainable parameter" in str(error) for error in found)
    assert all(isinstance(error, ModelError | PeerError) for error in found)


def test_a_failed_run_leaves_no_gradients_for_the_next_engine() -> None:
    model = seeded(Stumbling)()

    def fail(channel: sw.Channel) -> None:
        engine = sw.parallelize(model, sw.Plan(), optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(with_value(99))

    with pytest.raises(ArithmeticError):
        sw.simulate(1, fail)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.linear.weight, seeded(Stumbling)().linear.weight)
