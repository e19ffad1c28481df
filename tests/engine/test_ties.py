"""Ties: one storage under many names trains as one parameter; storages shared in part are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.covering import covering
from tests.engine.refusals import raise_of_all
from tests.engine.tower import DATA
from tests.oracle.batches import points, square_loss
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import Program, adamw, plan_of, seeded
from tests.refusals import Refusals


class Chain(nn.Module):
    """Three layers that may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.third = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        y: torch.Tensor = self.out(x)
        return y


def tied(second: str, third: str) -> Callable[[], Chain]:
    """`second` and `third` say how their weights are the first one's."""

    def make() -> Chain:
        chain = Chain()
        for name, how in (("second", second), ("third", third)):
            if how == "module":
                setattr(chain, name, chain.first)
            elif how == "object":
                getattr(chain, name).weight = chain.first.weight
            elif how == "storage":
                getattr(chain, name).weight = nn.Parameter(chain.first.weight.data)
            elif how == "the second's":
                getattr(chain, name).weight = chain.second.weight
        return chain

    return seeded(make)


class Shared(nn.Module):
    """Two parameters in one storage."""

    def __init__(self, parts: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], *, copies: bool) -> None:
        super().__init__()
        one, other = parts(torch.arange(48.0).reshape(8, 6) / 48)
        self.one = nn.Parameter(one.clone().contiguous() if copies else one)
        self.other = nn.Parameter(other.clone().contiguous() if copies else other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) * self.one.sum() + self.other.square().sum()


def shared(parts: Any, *, copies: bool = False) -> Callable[[], nn.Module]:
    return lambda: Shared(parts, copies=copies)


APART: dict[str, Any] = {
    "interleaved": lambda base: (base[:, 0::2], base[:, 1::2]),
    "columns": lambda base: (base[:, :1], base[:, 1:]),
    "neighbours": lambda base: (base[:3], base[3:]),
}
MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "one object": (tied("object", "object"), tied("object", "object")),
    "one storage": (tied("storage", "storage"), tied("object", "object")),
    "both ways": (tied("storage", "the second's"), tied("object", "object")),
    "one module": (tied("module", "module"), tied("object", "object")),
    "a parameter between": (tied("", "object"), tied("", "object")),
    **{name: (shared(parts), shared(parts, copies=True)) for name, parts in APART.items()},
}
"""Models, and what they are: copies, whose sums are in the same order."""


@pytest.mark.parametrize(
    ("name", "ranks", "sharding"),
    covering(list(MAKERS), (1, 2, 3), ({}, {"partition": "whole"}, {"stage": 0}, {"stage": 3}), strength=2),
)
def test_a_tie_trains_as_the_one_parameter_that_it_is(name: str, ranks: int, sharding: dict[str, Any]) -> None:
    make, make_plain = MAKERS[name]
    batches = [points(seed, 12) for seed in range(3)]
    program = Program(make=make, make_plain=make_plain, batches=batches, loss=square_loss)
    plan = plan_of(program, f"dp_shard={ranks}", k=2, **{"bucket_bytes": 256, **sharding})
    assert_trains_like_one_process(program, plan)


@pytest.mark.parametrize("third", ["storage", "the second's"])
def test_names_that_shared_a_storage_are_one_parameter_afterwards_also_in_an_optimizer(third: str) -> None:
    def run(channel: sw.Channel, make: Callable[[], Chain]) -> list[torch.Tensor]:
        chain = make()
        built = adamw(list(chain.parameters()))  # over all objects of the storage
        engine = sw.parallelize(chain, sw.Plan(mesh=DATA), optimizer=built, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 4))
        assert sum(len(group["params"]) for group in built.param_groups) <= 3
        assert chain.first.weight is chain.second.weight is chain.third.weight
        names = {name for name, _ in chain.named_parameters()}
        assert {each.name for each in engine.state() if "/" not in each.name} <= names
        assert set(chain.state_dict()) == {*names, "second.weight", "third.weight"}
        return [each.detach().clone() for each in chain.parameters()]

    got = sw.simulate(2, lambda channel: run(channel, tied("storage", third)))
    expected = sw.simulate(2, lambda channel: run(channel, tied("object", "object")))
    assert all(map(torch.equal, got[0], expected[0]))


def test_a_name_to_keep_may_be_any_name_of_a_tie() -> None:
    def run(channel: sw.Channel) -> list[torch.dtype]:
        precision = sw.Precision(compute="bfloat16", keep=("third", "second.weight"))
        chain = tied("", "object")()
        sw.parallelize(
            chain, sw.Plan(mesh=DATA, precision=precision), optimizer=adamw, loss=square_loss, channel=channel
        )
        return [each.dtype for each in chain.parameters()]

    assert sw.simulate(2, run) == [[torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]] * 2


class Watched(nn.Module):
    """A buffer that shows a part of a parameter."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4), requires_grad=trained)
        self.register_buffer("last", self.weight.data[3:])


def test_a_buffer_that_views_a_parameter_which_stays_goes_on_viewing_it() -> None:
    model = Watched(trained=False)
    sw.parallelize(model, sw.Plan(), optimizer=adamw, loss=square_loss)
    assert model.get_buffer("last").data_ptr() == model.weight[3:].data_ptr()


def expanded() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1, 1).expand(4, 1))
    return model


def half_frozen() -> Chain:
    chain = tied("storage", "storage")()
    chain.second.weight.requires_grad_(False)
    return chain


def in_two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 2.0}])


def refuses(make: Callable[[], nn.Module], optimizer: Any = adamw) -> Callable[[], None]:
    def run(channel: sw.Channel) -> None:
        sw.parallelize(make(), sw.Plan(mesh=DATA), optimizer=optimizer, loss=square_loss, channel=channel)

    return lambda: raise_of_all(2, run)


MEETING: dict[str, Any] = {
    "rows that overlap": lambda base: (base[:5], base[3:]),
    "one within the other": lambda base: (base, base[2:3]),
    "the same elements, transposed": lambda base: (base, base.t()),
    "the same elements in another shape": lambda base: (base, base.view(-1)),
    "columns that meet here and there": lambda base: (base[:, ::2], base[:, 2:]),
    "a view of other numbers": lambda base: (base, base.view(torch.int32).view(torch.float32)[:, :2]),
}
REFUSED = Refusals(
    "engine.ties",
    {
        **{name: refuses(shared(parts)) for name, parts in MEETING.items()},
        "a parameter that was expanded": refuses(expanded),
        "a buffer that views a parameter which moves": refuses(Watched),
        "a tie of which one name is trained": refuses(half_frozen),
        "a tie in two groups": refuses(tied("storage", "storage"), in_two_groups),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_storages_that_are_shared_in_part_are_refused_by_name(case: str) -> None:
    REFUSED.check(case)
