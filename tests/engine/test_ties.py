"""Ties: one storage under many names trains as one parameter; storages shared in part are refused by name."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, OptimizerError
from tests.engine.expected import (
    SLICES,
    WHOLE,
    adamw,
    assert_ranks_train_as_one_process,
    points,
    seeded,
    sgd,
    square_loss,
)

SHARDINGS = pytest.mark.parametrize("sharding", [SLICES, WHOLE, sw.Sharding(stage=0)], ids=["slice", "whole", "stage0"])
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


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


def tied_as_one_object() -> Chain:
    chain = Chain()
    chain.second.weight = chain.first.weight
    chain.third.weight = chain.first.weight
    return chain


def tied_by_storage() -> Chain:
    chain = Chain()
    chain.second.weight = nn.Parameter(chain.first.weight.data)
    chain.third.weight = nn.Parameter(chain.first.weight.data)
    return chain


def tied_both_ways() -> Chain:
    chain = Chain()
    chain.second.weight = nn.Parameter(chain.first.weight.data)
    chain.third.weight = chain.second.weight
    return chain


def tied_as_one_module() -> Chain:
    chain = Chain()
    chain.second = chain.third = chain.first
    return chain


@RANKS
@SHARDINGS
@pytest.mark.parametrize("make", [tied_as_one_object, tied_by_storage, tied_both_ways, tied_as_one_module])
def test_a_tie_trains_as_the_one_parameter_that_it_is(
    make: Callable[[], Chain], sharding: sw.Sharding, num_ranks: int
) -> None:
    assert_ranks_train_as_one_process(
        seeded(make),
        num_ranks=num_ranks,
        sharding=sharding,
        num_microbatches=2,
        make_oracle=seeded(tied_as_one_object),
    )


def tied_pair_apart() -> Chain:
    chain = Chain()
    chain.third.weight = chain.first.weight  # another parameter lies between the names
    return chain


@RANKS
def test_a_tie_may_leave_out_a_parameter_between(num_ranks: int) -> None:
    assert_ranks_train_as_one_process(seeded(tied_pair_apart), num_ranks=num_ranks, optimizer=sgd)


@pytest.mark.parametrize("make", [tied_by_storage, tied_both_ways])
def test_names_that_shared_a_storage_are_one_parameter_object_afterwards(make: Callable[[], Chain]) -> None:
    def run(channel: sw.Channel) -> None:
        chain = seeded(make)()
        engine = sw.parallelize(
            chain, sw.Plan(mesh=sw.Mesh(dp_shard=2)), optimizer=adamw, loss=square_loss, channel=channel
        )
        assert chain.first.weight is chain.second.weight is chain.third.weight
        assert [name for name, _ in chain.named_parameters()] == ["first.weight", "out.weight", "out.bias"]
        names = {piece.name for piece in engine.state()}
        assert names <= {"first.weight", "out.weight", "out.bias"}
        assert set(chain.state_dict()) == {
            *names,
            "first.weight",
            "second.weight",
            "third.weight",
            "out.bias",
            "out.weight",
        }

    sw.simulate(2, run)


def test_an_optimizer_built_over_both_objects_of_one_storage_updates_it_once() -> None:
    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        chain = seeded(tied_by_storage)()
        built = adamw(list(chain.parameters()))
        engine = sw.parallelize(
            chain, sw.Plan(mesh=sw.Mesh(dp_shard=2)), optimizer=built, loss=square_loss, channel=channel
        )
        engine.step(points(channel.rank, 4))
        assert sum(len(group["params"]) for group in built.param_groups) <= 3
        return {name: each.detach().clone() for name, each in chain.named_parameters()}

    def plain(channel: sw.Channel) -> dict[str, torch.Tensor]:
        chain = seeded(tied_as_one_object)()
        engine = sw.parallelize(
            chain, sw.Plan(mesh=sw.Mesh(dp_shard=2)), optimizer=adamw, loss=square_loss, channel=channel
        )
        engine.step(points(channel.rank, 4))
        return {name: each.detach().clone() for name, each in chain.named_parameters()}

    (got, _), (expected, _) = sw.simulate(2, run), sw.simulate(2, plain)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


class Shared(nn.Module):
    """Two parameters in one storage."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        super().__init__()
        self.one = nn.Parameter(one)
        self.other = nn.Parameter(other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) * self.one.sum() + self.other.square().sum()


def refusal_of(make: Callable[[], nn.Module], optimizer: Callable[..., object] = adamw) -> str:
    """The message with which every rank refuses the model."""
    errors: list[str] = []

    def run(channel: sw.Channel) -> None:
        with pytest.raises((ModelError, OptimizerError)) as caught:
            sw.parallelize(
                make(),
                sw.Plan(mesh=sw.Mesh(dp_shard=2)),
                optimizer=optimizer,  # type: ignore[arg-type]
                loss=square_loss,
                channel=channel,
            )
        errors.append(str(caught.value))

    sw.simulate(2, run)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    return errors[0]


@pytest.mark.parametrize(
    "parts",
    [
        lambda base: (base[:5], base[3:]),  # rows that overlap
        lambda base: (base, base[2:3]),  # one within the other
        lambda base: (base, base.t()),  # the same elements, transposed
        lambda base: (base, base.view(-1)),  # the same elements in another shape
        lambda base: (base[:, ::2], base[:, 2:]),  # columns that meet here and there
        lambda base: (base, base.view(torch.int32).view(torch.float32)[:, :2]),
    ],
)
def test_parameters_that_share_a_part_of_one_storage_are_refused_by_name(
    parts: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    message = refusal_of(lambda: Shared(*parts(torch.ones(8, 6))))
    assert re.search("'one' and 'other' share a part of one storage|'other' and 'one' share a part", message)
    assert "make one of them a copy" in message


@RANKS
@pytest.mark.parametrize(
    "parts",
    [
        lambda base: (base[:, 0::2], base[:, 1::2]),  # interleaved
        lambda base: (base[:, :1], base[:, 1:]),
        lambda base: (base[:3], base[3:]),  # neighbours
    ],
)
def test_parts_of_one_matrix_that_do_not_meet_are_two_parameters(
    parts: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], num_ranks: int
) -> None:
    base = torch.arange(48.0).reshape(8, 6) / 48
    one, other = parts(base)
    assert_ranks_train_as_one_process(
        lambda: Shared(*parts(base.clone())),
        num_ranks=num_ranks,
        make_oracle=lambda: Shared(one.clone().contiguous(), other.clone().contiguous()),  # sums in the same order
    )


class Expanded(nn.Module):
    """A parameter of four elements in the memory of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1).expand(4, 1))


def test_a_parameter_that_was_expanded_is_refused_by_name() -> None:
    assert "parameter 'weight' has several elements in one place of memory (it was expanded)" in refusal_of(Expanded)


class Watched(nn.Module):
    """A buffer that shows a part of a parameter."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4), requires_grad=trained)
        self.register_buffer("last", self.weight.data[3:])


def test_a_buffer_that_views_a_parameter_which_moves_is_refused_by_name() -> None:
    assert "buffer 'last' and parameter 'weight' share a part of one storage" in refusal_of(Watched)


def test_a_buffer_that_views_a_parameter_which_stays_goes_on_viewing_it() -> None:
    model = Watched(trained=False)
    sw.simulate(1, lambda channel: sw.parallelize(model, sw.Plan(), optimizer=adamw, loss=square_loss, channel=channel))
    assert model.get_buffer("last").data_ptr() == model.weight[3:].data_ptr()


def test_a_tie_of_which_one_name_only_is_trained_is_refused() -> None:
    def make() -> Chain:
        chain = tied_by_storage()
        chain.second.weight.requires_grad_(False)
        return chain

    message = refusal_of(make)
    assert "'first.weight' and 'second.weight' share one storage, and only one of them requires a gradient" in message


def test_a_tie_in_two_groups_is_refused_for_it_has_one_set_of_settings() -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": others, "lr": 2.0}])

    message = refusal_of(seeded(tied_by_storage), optimizer)
    assert "these are in several groups: 'first.weight'; a parameter (or a tie) has one set of settings" in message


def test_a_name_to_keep_may_be_any_name_of_a_tie() -> None:
    def run(channel: sw.Channel) -> list[torch.dtype]:
        chain = seeded(tied_pair_apart)()
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute="bfloat16", keep=("third", "second.weight"))
        )
        sw.parallelize(chain, plan, optimizer=adamw, loss=square_loss, channel=channel)
        return [each.dtype for each in chain.parameters()]

    kept = [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert sw.simulate(2, run) == [kept, kept]
