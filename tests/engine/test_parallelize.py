"""Models and optimizers that cannot be run are refused by all ranks, with the name and with what to do."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import OptimizerError
from tests.engine.refusals import PLAN, refusal, two_layers
from tests.oracle.batches import points, square_loss
from tests.oracle.program import adamw
from tests.refusals import Refusals

SGD: Any = partial(torch.optim.SGD, lr=0.1)


def raises(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise KeyError("no such group")


def strangers(parameters: list[nn.Parameter], *, keeps: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD([*(parameters if keeps else []), nn.Parameter(torch.ones(1))], lr=0.1)


def sparse(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters)


OPTIMIZERS: dict[str, Any] = {
    "drops one": lambda parameters: SGD(parameters[1:]),
    "drops many": strangers,
    "adds one": partial(strangers, keeps=True),
    "copies": lambda parameters: SGD([nn.Parameter(each.detach().clone()) for each in parameters]),
    "two over the same": lambda parameters: [SGD(parameters), torch.optim.Adam(parameters[:2])],
    "raises": raises,
    "needs a closure": torch.optim.LBFGS,
    "needs sparse gradients": sparse,
    "gives none": lambda parameters: None,
    "a name": "AdamW",
    "none": None,
}


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call lazy modules experimental
        return nn.Sequential(nn.LazyLinear(1))


class Scaled(nn.Linear):
    """A parameter and a buffer that nobody initialises."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("graph", torch.ones(2))


def scaled_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Scaled())


def with_buffer() -> nn.Module:
    model = two_layers()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def of_no_dtype() -> nn.Module:
    model = two_layers()
    model.register_parameter("table", nn.Parameter(torch.ones(2, dtype=torch.uint16), requires_grad=False))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lazy": lazy,
    "a sparse buffer": with_buffer,
    "no values, and nobody initialises": scaled_on_meta,
    "a dtype that no plan holds": of_no_dtype,
}


def raising(**settings: Any) -> Callable[[], None]:
    def call() -> None:
        raise refusal(**settings)

    return call


def of_dtensors() -> None:
    """What `parallelize_module` and `fully_shard` leave."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        model = two_layers()
        linear: Any = model[0]
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, init_device_mesh("cpu", (1,))))
        sw.parallelize(model, sw.Plan(), optimizer=SGD, loss=square_loss, channel=alone())
    finally:
        dist.destroy_process_group()


def everywhere(each: Any) -> Mapping[int, Any]:
    return dict.fromkeys(range(3), each)


SCALED = lambda: nn.Sequential(Scaled())  # noqa: E731
REFUSED = Refusals(
    "engine.parallelize",
    {
        **{f"an optimizer: {name}": raising(optimizers=everywhere(each)) for name, each in OPTIMIZERS.items()},
        **{
            f"a model: {name}": raising(models=everywhere(each), optimizers=everywhere(SGD))
            for name, each in MODELS.items()
        },
        **{f"on rank 1, {name}": raising(models={1: MODELS[name]}) for name in ("lazy", "a sparse buffer")},
        "on rank 1, no values": raising(models={0: SCALED, 1: scaled_on_meta, 2: SCALED}),
        "a model of DTensors": of_dtensors,
        "two optimizers on two ranks": raising(optimizers={0: OPTIMIZERS["drops one"], 2: raises}),
        "names to keep": raising(plan=replace(PLAN, precision=sw.Precision(keep=("*norm*", "0.weihgt", "1")))),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_by_name_on_all_ranks(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("name", ["drops one", "raises", "a name"])
def test_an_optimizer_of_one_rank_is_refused_on_all_with_its_rank(name: str) -> None:
    of_all, alone = refusal(optimizers=everywhere(OPTIMIZERS[name])), refusal(optimizers={1: OPTIMIZERS[name]})
    assert str(alone) == f"rank 1: {of_all}"
    assert type(alone) is type(of_all)


def test_a_refused_model_is_as_it_was() -> None:
    def run(channel: sw.Channel) -> None:
        model = two_layers()
        before = [(id(each), each.data_ptr(), each.detach().clone()) for each in model.parameters()]
        with pytest.raises(OptimizerError):
            sw.parallelize(model, PLAN, optimizer=OPTIMIZERS["drops one"], loss=square_loss, channel=channel)
        for each, (identity, address, values) in zip(model.parameters(), before, strict=True):
            assert (id(each), each.data_ptr()) == (identity, address)
            assert torch.equal(each, values)
        engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 2))

    sw.simulate(3, run)
