"""Models and optimizers that cannot be run are refused by all ranks, with the name and with what to do."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import MismatchError, ModelError, OptimizerError, PlanError
from tests.engine.expected import adamw, points, square_loss
from tests.engine.refusals import PLAN, refusal, two_layers


def test_names_to_keep_that_mean_nothing_are_refused_with_the_nearest_name() -> None:
    error = refusal(plan=replace(PLAN, precision=sw.Precision(keep=("*norm*", "0.weihgt", "1"))))
    assert isinstance(error, PlanError)
    first, second = str(error).splitlines()[1:]
    assert first.startswith("  - precision.keep: '*norm*' matches none of the 4 parameters; the nearest parameter is ")
    assert second.endswith("'0.weihgt' matches none of the 4 parameters; the nearest parameter is '0.weight'")


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call lazy modules experimental
        return nn.Sequential(nn.LazyLinear(1))


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = two_layers()
    model.register_buffer("graph", buffer)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lazy, "parameter '0.weight' has no shape before the first forward; run the model once on a sample"),
        (
            lambda: with_buffer(torch.eye(3).to_sparse()),
            "buffer 'graph' has layout torch.sparse_coo; shardwise",
        ),
    ],
)
def test_a_model_whose_tensors_no_rank_can_hold_is_refused_by_name(make: Callable[[], nn.Module], message: str) -> None:
    error = refusal(models=dict.fromkeys(range(3), make), optimizers=dict.fromkeys(range(3), sgd_of_any))
    assert isinstance(error, ModelError)
    assert str(error).startswith(message)
    alone = refusal(models={1: make})
    assert isinstance(alone, ModelError)
    assert str(alone).startswith(f"rank 1: {message}")


class Scaled(nn.Linear):
    """A parameter and a buffer that nobody initialises."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("graph", torch.ones(2))


def scaled_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Scaled())


def test_a_model_without_values_that_nobody_initialises_is_refused_by_name() -> None:
    error = refusal(models=dict.fromkeys(range(3), scaled_on_meta))
    assert isinstance(error, ModelError)
    assert str(error).splitlines()[1:3] == [
        "  - parameter '0.scale' (of a Scaled): nobody initialises it",
        "  - buffer '0.graph' (of a Scaled): nobody initialises it",
    ]
    assert "0.weight" not in str(error)  # which Linear initialises
    alone = refusal(models={1: scaled_on_meta, 0: lambda: nn.Sequential(Scaled()), 2: lambda: nn.Sequential(Scaled())})
    assert isinstance(alone, MismatchError)


def sgd_of_any(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_model_of_a_dtype_that_no_plan_holds_is_refused() -> None:
    def make() -> nn.Module:
        model = two_layers()
        model.register_parameter("table", nn.Parameter(torch.ones(2, dtype=torch.uint16), requires_grad=False))
        return model

    error = refusal(models=dict.fromkeys(range(3), make))
    assert isinstance(error, PlanError)
    assert "parameter 'table' has dtype uint16, which no plan can hold" in str(error)


def drops_one(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[1:], lr=0.1)


def drops_many(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def adds_one(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1)


def copies(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(each.detach().clone()) for each in parameters], lr=0.1)


def over_two_optimizers(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters[:2])]


def raises(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise KeyError("no such group")


def needs_a_closure(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (drops_one, "1 of the model's trainable parameters are in no group: '0.weight'. Give them to the optimizer"),
        (
            drops_many,
            "4 of the model's trainable parameters are in no group: '0.weight', '0.bias', '1.weight' and 1",
        ),
        (drops_many, "1 of its parameters are not the model's"),
        (
            adds_one,
            "(SGD) does not fit the model: 1 of its parameters are not the model's; build it over the",
        ),
        (copies, "4 of its parameters are not the model's"),
        (
            over_two_optimizers,
            "(SGD and Adam) does not fit the model: these are in several groups: '0.weight', '0.b",
        ),
        (raises, "the optimizer function raised KeyError: 'no such group'"),
        (needs_a_closure, "LBFGS.step needs a closure that computes the loss again"),
        (
            lambda parameters: None,
            "optimizer: NoneType is not a torch.optim.Optimizer, a sequence of them, or a",
        ),
        ("AdamW", "optimizer: str is not a torch.optim.Optimizer"),
        (None, "no optimizer (None) does not fit the model: 4 of the model's trainable parameters are in no group"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_on_all_ranks(optimizer: Any, message: str) -> None:
    everywhere = refusal(optimizers=dict.fromkeys(range(3), optimizer))
    assert isinstance(everywhere, OptimizerError)
    assert message in str(everywhere)
    alone = refusal(optimizers={1: optimizer})
    assert str(alone) == f"rank 1: {everywhere}"
    assert type(alone) is type(everywhere)


def test_different_refusals_are_all_told() -> None:
    error = refusal(optimizers={0: drops_one, 2: raises})
    assert [line[:40] for line in str(error).splitlines()] == [
        "rank 0: the optimizer (SGD) does not fit",
        "rank 2: the optimizer function raised Ke",
    ]


def test_a_refused_model_is_as_it_was() -> None:
    def run(channel: sw.Channel) -> None:
        model = two_layers()
        before = [(id(each), each.data_ptr(), each._version) for each in model.parameters()]
        with pytest.raises(OptimizerError):
            sw.parallelize(model, PLAN, optimizer=drops_one, loss=square_loss, channel=channel)
        assert [(id(each), each.data_ptr(), each._version) for each in model.parameters()] == before
        engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 2))

    sw.simulate(3, run)
