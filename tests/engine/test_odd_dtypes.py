"""Parameters that are frozen, or not all float32: narrow, wide, complex, whole numbers, several in one model."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.plan.dtypes import ITEMSIZE_BYTES, promote
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
from tests.engine.oracle import Optimizers, share_of, train_in_one_process

SHARDINGS = pytest.mark.parametrize("sharding", [SLICES, WHOLE], ids=["slice", "whole"])
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])

FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def test_promotion_of_names_is_torchs_promotion_of_dtypes() -> None:
    for first in FLOATING:
        for second in FLOATING:
            both = torch.promote_types(getattr(torch, first), getattr(torch, second))
            assert promote(first, second) == str(both).removeprefix("torch.")


def test_sizes_of_names_are_torchs_sizes_of_dtypes() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE_BYTES} == dict(ITEMSIZE_BYTES)


class Adapted(nn.Module):
    """A base that does not train, and an adapter that does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(6, 2))
        self.up = nn.Parameter(torch.zeros(2, 1))
        self.head = nn.Linear(6, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.base(x.to(self.down.dtype))
        y: torch.Tensor = self.head(hidden) + hidden @ self.down @ self.up
        return y.float()


class AllButOneFrozen(Adapted):
    """One trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down.requires_grad_(False)
        nn.init.ones_(self.up)


@RANKS
@SHARDINGS
@pytest.mark.parametrize("make", [Adapted, AllButOneFrozen])
def test_frozen_parameters_stay_and_the_others_train(
    make: type[Adapted], sharding: sw.Sharding, num_ranks: int
) -> None:
    trained = assert_ranks_train_as_one_process(seeded(make), num_ranks=num_ranks, sharding=sharding)
    for name, value in seeded(make)().named_parameters():
        assert torch.equal(value, trained.parameters[name]) != value.requires_grad


@RANKS
@SHARDINGS
def test_frozen_parameters_compute_in_bfloat16_and_keep_their_masters_exactly(
    sharding: sw.Sharding, num_ranks: int
) -> None:
    precision = sw.Precision(compute="bfloat16")
    assert_ranks_train_as_one_process(
        seeded(Adapted),
        num_ranks=num_ranks,
        sharding=sharding,
        precision=precision,
        working=lambda _: torch.bfloat16,
    )

    def run(channel: sw.Channel) -> dict[sw.Piece, torch.Tensor]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=num_ranks), sharding=sharding, precision=precision)
        engine = sw.parallelize(seeded(Adapted)(), plan, optimizer=adamw, loss=square_loss, channel=channel)
        for seed in range(2):
            engine.step(points(seed, 4))
        return {piece: value.clone() for piece, value in engine.state().items()}

    held = [item for state in sw.simulate(num_ranks, run) for item in state.items()]
    for name, value in seeded(Adapted)().named_parameters():
        if value.requires_grad:
            continue
        parts = sorted(
            (piece.elements.start, part.reshape(-1)) for piece, part in held if piece.name == f"optimizer/{name}/master"
        )
        assert torch.equal(torch.cat([part for _, part in parts]), value.reshape(-1))


def test_frozen_parameters_of_a_narrow_model_compute_as_the_plan_says() -> None:
    def run(channel: sw.Channel) -> None:
        model = seeded(Adapted)().bfloat16()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute="float32"))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(0, 4))
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.requires_grad or torch.equal(parameter, before[name].float())

    sw.simulate(2, run)


class MixedDtypes(nn.Module):
    """float32, bfloat16 and float64 in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(4, 5)
        self.narrow = nn.Linear(5, 5).bfloat16()
        self.exact = nn.Linear(5, 3).double()
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(torch.tanh(self.single(x)).bfloat16())
        y: torch.Tensor = self.last(torch.tanh(self.exact(hidden.double())).float())
        return y


@RANKS
@SHARDINGS
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_model_of_several_dtypes_trains_in_each_parameters_own(
    sharding: sw.Sharding, num_ranks: int, num_microbatches: int
) -> None:
    dtypes = {name: parameter.dtype for name, parameter in MixedDtypes().named_parameters()}
    trained = assert_ranks_train_as_one_process(
        seeded(MixedDtypes),
        num_ranks=num_ranks,
        sharding=sharding,
        num_microbatches=num_microbatches,
        working=dtypes.__getitem__,
    )
    assert {name: value.dtype for name, value in trained.parameters.items()} == dtypes


class KeptHere(nn.Module):
    """Layers that compute in bfloat16 with ones in float32 between, small and large by turns."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 4, 40, 4, 4, 30, 4)
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in pairwise(widths))
        self.kept = nn.ModuleList(nn.Linear(width, width) for width in widths[1:])
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute, master = self.last.weight.dtype, self.kept[0].get_parameter("weight").dtype
        for layer, kept in zip(self.layers, self.kept, strict=True):
            x = kept(torch.tanh(layer(x.to(compute))).to(master))
        y: torch.Tensor = self.last(x.to(compute))
        return y.float()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 500, 1000, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_in_two_dtypes_do_not_run_into_each_other(bucket_bytes: int, num_ranks: int) -> None:
    assert_ranks_train_as_one_process(
        seeded(KeptHere),
        num_ranks=num_ranks,
        sharding=sw.Sharding(bucket_bytes=bucket_bytes),
        precision=sw.Precision(compute="bfloat16", keep=("kept",)),
        working=lambda name: torch.float32 if name.startswith("kept") else torch.bfloat16,
    )


class WholeNumbers(nn.Module):
    """Frozen parameters that are no floating-point numbers: look-up tables, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.tensor([3, 1, 0, 2]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear((x[:, self.order] * self.mask).to(self.linear.weight.dtype))
        return y.float()


class WithoutWholeNumbers(nn.Module):
    """What `WholeNumbers` computes, with the numbers written out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = x[:, [3, 1, 0, 2]] * torch.tensor([True, False, True, True])
        y: torch.Tensor = self.linear(masked.to(self.linear.weight.dtype))
        return y.float()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_whole_numbers_and_masks_stay_what_they_are(compute: str) -> None:
    trained: list[dict[str, torch.Tensor]] = []
    for kind in (WholeNumbers, WithoutWholeNumbers):

        def run(channel: sw.Channel, kind: type[nn.Module] = kind) -> dict[str, torch.Tensor]:
            model = seeded(kind)()
            plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute=compute))
            engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
            for seed in range(3):
                engine.step(points(2 * seed + channel.rank, 4))
            assert {"order", "mask"} & dict(model.named_parameters()).keys() <= {piece.name for piece in engine.state()}
            return {name: value.detach().clone() for name, value in model.named_parameters()}

        first, second = sw.simulate(2, run)
        assert all(torch.equal(first[name], second[name]) for name in first)
        trained.append(first)
    with_numbers, without = trained
    assert torch.equal(with_numbers.pop("order"), torch.tensor([3, 1, 0, 2]))
    assert torch.equal(with_numbers.pop("mask"), torch.tensor([True, False, True, True]))
    assert all(torch.equal(with_numbers[name], without[name]) for name in without)


class Complex(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.linear = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear((x.to(torch.complex64) @ self.turn).abs())
        return y


@SHARDINGS
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_complex_parameters_train_as_in_one_process(
    optimizer: Optimizers, num_microbatches: int, num_ranks: int, sharding: sw.Sharding
) -> None:
    batches = [points(seed, 12) for seed in range(3)]
    model = seeded(Complex)()
    expected = train_in_one_process(
        model,
        optimizer(list(model.parameters())),
        batches,
        loss=square_loss,
        num_microbatches=num_ranks * num_microbatches,
        clip=0.5,
    )

    def run(channel: sw.Channel) -> list[float]:
        trained = seeded(Complex)()
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=num_ranks),
            sharding=sharding,
            merge=sw.Merge(microbatches=num_microbatches),
            clip_grad_norm=0.5,
        )
        engine = sw.parallelize(trained, plan, optimizer=optimizer, loss=square_loss, channel=channel)
        norms = [engine.step(share_of(batch, channel.rank, num_ranks)).grad_norm for batch in batches]
        for name, value in trained.named_parameters():
            torch.testing.assert_close(value.detach(), expected.parameters[name], rtol=1e-5, atol=1e-6)
        return norms

    for norms in sw.simulate(num_ranks, run):
        assert norms == pytest.approx(expected.grad_norms, rel=1e-5)
