"""Parameters that are not two matrices in a row: odd shapes, strides and names, without gradient or a sparse one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
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
from tests.engine.oracle import Optimizers, share_of

SHARDINGS = pytest.mark.parametrize("sharding", [SLICES, WHOLE], ids=["slice", "whole"])
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


class OddShapes(nn.Module):
    """Scalars, single elements, nothing at all, five dims, and memory that is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.randn(1))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.five_dims = nn.Parameter(torch.randn(2, 1, 3, 2, 4))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.every_other = nn.Parameter(torch.randn(4, 10)[:, ::2])
        self.convolution = nn.Conv2d(3, 5, 2)
        self.nothing_else = nn.ParameterList([nn.Parameter(torch.randn(3, 0, 2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.scalar.dtype
        values = (x.to(dtype) @ self.transposed.t() @ self.transposed @ self.every_other).sum(1, keepdim=True)
        images = self.five_dims.reshape(2, 6, 4)[:, :, None, :].reshape(2, 3, 2, 4)
        seen = self.convolution(images).square().mean()
        y: torch.Tensor = values * self.scalar + self.single + self.nothing.sum() * seen + seen
        return y.float()


def row_major(make: type[nn.Module]) -> nn.Module:
    """The same values in row-major memory, which is what a master is."""
    model = seeded(make)()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return model


def channels_last(make: type[nn.Module]) -> nn.Module:
    """The same values with the channels of images innermost."""
    model = seeded(make)()
    for parameter in model.get_submodule("convolution").parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def on_one_core(model: nn.Module) -> nn.Module:
    """The model, on a thread with one core: a convolution sums in another order on several."""
    torch.set_num_threads(1)
    return model


@RANKS
@SHARDINGS
@pytest.mark.parametrize("make", [row_major, channels_last, lambda kind: seeded(kind)()], ids=["row", "channel", "own"])
def test_any_shape_and_any_strides_train(
    make: Callable[[type[nn.Module]], nn.Module], sharding: sw.Sharding, num_ranks: int
) -> None:
    trained = assert_ranks_train_as_one_process(
        lambda: on_one_core(make(OddShapes)),
        num_ranks=num_ranks,
        sharding=sharding,
        num_microbatches=2,
        make_oracle=lambda: row_major(OddShapes),
    )
    assert trained.parameters["scalar"].shape == ()
    assert trained.parameters["nothing"].shape == (0, 4)
    assert trained.parameters["five_dims"].shape == (2, 1, 3, 2, 4)


@RANKS
def test_any_shape_trains_in_bfloat16(num_ranks: int) -> None:
    assert_ranks_train_as_one_process(
        lambda: on_one_core(seeded(OddShapes)()),
        num_ranks=num_ranks,
        precision=sw.Precision(compute="bfloat16"),
        make_oracle=lambda: row_major(OddShapes),
        working=lambda _: torch.bfloat16,
    )


def test_more_ranks_than_elements_leave_some_with_nothing_to_own() -> None:
    assert_ranks_train_as_one_process(
        seeded(lambda: nn.Linear(1, 1)),
        num_ranks=5,
        batches=[points(seed, 10, width=1) for seed in range(3)],
    )


ODD_NAMES = (
    "a b",
    "\u03b1\u03b2",
    "w",
    "w_rank0",
    "w_rank0_rank1",
    "it's",
    'say "w"',
    "back\\slash",
    "new\nline",
    "head[0]",
    "*",
    "optimizer",
    "/",
    "\U0001f600",
)


class OddNames(nn.Module):
    """Parameters under names that were not made for text files."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 3)) for name in ODD_NAMES})
        self.add_module('module "of"\n \u00e9', nn.Linear(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self.get_submodule('module "of"\n \u00e9')(
            sum(torch.tanh(x @ w) for w in self.table.values())
        )
        return last


@RANKS
@SHARDINGS
def test_any_name_trains(sharding: sw.Sharding, num_ranks: int) -> None:
    trained = assert_ranks_train_as_one_process(seeded(OddNames), num_ranks=num_ranks, sharding=sharding)
    assert {f"table.{name}" for name in ODD_NAMES} < trained.parameters.keys()


def test_any_name_can_be_kept_and_stands_in_the_state() -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        precision=sw.Precision(compute="bfloat16", keep=("table.head[0]", 'table.say "w"', "table.[*]")),
    )
    assert sw.Plan.parse(plan.text()) == plan

    def run(channel: sw.Channel) -> set[str]:
        model = seeded(OddNames)()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        assert {name for name, each in model.named_parameters() if each.dtype == torch.float32} == {
            "table.head[0]",
            'table.say "w"',
            "table.*",
        }
        return {piece.name for piece in engine.state()}

    first, second = sw.simulate(2, run)
    names = {name for name, _ in OddNames().named_parameters()}
    cast = names - {"table.head[0]", 'table.say "w"', "table.*"}
    assert first | second == names | {f"optimizer/{name}/master" for name in cast}


class Branches(nn.Module):
    """Which parameters get a gradient depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 1)
        self.sometimes = nn.Linear(4, 1)
        self.never = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


def branching(seed: int, *taken: bool) -> dict[str, torch.Tensor]:
    """Four rows per entry; `sometimes` is used in those rows where it is true."""
    batch = points(seed, 4 * len(taken))
    batch["x"][:, 0] = batch["x"][:, 0].abs() * torch.tensor(
        [1.0 if each else -1.0 for each in taken]
    ).repeat_interleave(4)
    return batch


@SHARDINGS
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_parameters_without_gradient_are_left_alone_as_in_one_process(
    optimizer: Optimizers, sharding: sw.Sharding, num_microbatches: int
) -> None:
    batches = [
        branching(0, True, True, True, True),
        branching(1, False, False, False, False),  # on no rank: no decay, no momentum, no step
        branching(2, False, False, True, False),  # on one rank, in one microbatch
        branching(3, False, False, False, False),
        branching(4, True, False, False, True),
    ]
    trained = assert_ranks_train_as_one_process(
        seeded(Branches),
        num_ranks=2,
        sharding=sharding,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        batches=batches,
    )
    untouched = seeded(Branches)().never
    assert torch.equal(trained.parameters["never.weight"], untouched.weight)


def test_a_step_counts_for_those_parameters_only_that_had_a_gradient() -> None:
    def run(channel: sw.Channel) -> dict[str, float]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=WHOLE)
        engine = sw.parallelize(seeded(Branches)(), plan, optimizer=adamw, loss=square_loss, channel=channel)
        for seed, taken in enumerate([(True, True), (False, False), (False, True)]):
            engine.step(share_of(branching(seed, *taken), channel.rank, 2))
        return {piece.name: float(value) for piece, value in engine.state().items() if piece.name.endswith("/step")}

    first, second = sw.simulate(2, run)
    assert first | second == {
        "optimizer/always.weight/step": 3.0,
        "optimizer/always.bias/step": 3.0,
        "optimizer/sometimes.weight/step": 2.0,
        "optimizer/sometimes.bias/step": 2.0,
    }


class SparseLookup(nn.Module):
    """An embedding whose gradient names the rows that it is not zero in, or is dense."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, sparse=sparse)
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 10).long() % 9
        y: torch.Tensor = self.out(self.embedding(words).mean(1))
        return y


@RANKS
@SHARDINGS
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_sparse_gradients_train_as_dense_ones(sharding: sw.Sharding, num_ranks: int, num_microbatches: int) -> None:
    assert_ranks_train_as_one_process(
        seeded(lambda: SparseLookup(sparse=True)),
        num_ranks=num_ranks,
        sharding=sharding,
        num_microbatches=num_microbatches,
        make_oracle=seeded(lambda: SparseLookup(sparse=False)),
    )
