"""Masters in float32, working copies in the compute dtype, one cast per update: to the bit, on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from tests.covering import covering
from tests.engine.expected import adamw, sgd
from tests.engine.models import (
    curve,
    curve_batch,
    curve_loss,
    loss_of_words,
    word_batch,
    word_loss,
    words,
    words_with_kept_norm,
)
from tests.engine.oracle import Optimizers, RankOrder, Trained, share_of
from tests.engine.ranks import assert_same_bits, largest_difference, train_on_ranks

BATCHES = [word_batch(seed, 48) for seed in range(3)]
BF16 = sw.Precision(compute="bfloat16")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A precision, and the same written into a model by hand."""

    precision: sw.Precision
    by_hand: Callable[[], nn.Module] = words
    kept: str | None = None

    def working(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, str(self.precision.compute))
        return torch.float32 if self.kept and self.kept in name else dtype


CASES = {
    "bfloat16": Case(precision=BF16),
    "accumulated in bfloat16": Case(precision=sw.Precision(compute="bfloat16", accumulate="bfloat16")),
    "reduced in bfloat16": Case(precision=sw.Precision(compute="bfloat16", reduce="bfloat16")),
    "norm kept": Case(
        precision=sw.Precision(compute="bfloat16", keep=("*norm*",)), by_hand=words_with_kept_norm, kept="norm"
    ),
    "norm kept, reduced in bfloat16": Case(
        precision=sw.Precision(compute="bfloat16", reduce="bfloat16", keep=("norm",)),
        by_hand=words_with_kept_norm,
        kept="norm",
    ),
    "float16": Case(precision=sw.Precision(compute="float16")),
    "float32 reduced in bfloat16": Case(precision=sw.Precision(compute="float32", reduce="bfloat16")),
}


def by_hand(
    case: Case, optimizer: Optimizers, *, ranks: int, k: int, clip: float | None = 0.3, group: int | None = None
) -> Trained:
    return RankOrder(
        model=case.by_hand(),
        make_optimizer=optimizer,
        loss_of=loss_of_words,
        num_ranks=ranks,
        ranks_per_sum=group,
        num_microbatches=k,
        clip=clip,
        working=case.working,
        accumulate=getattr(torch, case.precision.accumulate),
        reduce=getattr(torch, case.precision.reduce),
    ).train(BATCHES)


def ours(
    precision: sw.Precision,
    optimizer: Optimizers,
    *,
    mesh: sw.Mesh,
    k: int,
    clip: float | None = 0.3,
    sharding: sw.Sharding | None = None,
    model: Callable[[], nn.Module] = words,
) -> Trained:
    sharding = sharding or sw.Sharding(bucket_bytes=600)
    plan = sw.Plan(
        mesh=mesh, sharding=sharding, merge=sw.Merge(microbatches=k), precision=precision, clip_grad_norm=clip
    )
    return train_on_ranks(model, plan, BATCHES, optimizer=optimizer, loss=word_loss)


@pytest.mark.parametrize(
    ("name", "layout", "optimizer"),
    covering(list(CASES), ((1, 1), (1, 3), (1, 4), (2, 1), (3, 4), (8, 2)), (sgd, adamw), strength=2),
)
def test_a_step_is_the_one_written_by_hand(name: str, layout: tuple[int, int], optimizer: Optimizers) -> None:
    case, (ranks, k) = CASES[name], layout
    got = ours(case.precision, optimizer, mesh=sw.Mesh(dp_shard=ranks), k=k)
    expected = by_hand(case, optimizer, ranks=ranks, k=k)
    assert_same_bits(got, expected)
    assert got.grad_norms == expected.grad_norms
    assert got.losses == pytest.approx(expected.losses, rel=1e-12)


LAYOUTS: dict[str, tuple[sw.Mesh, sw.Sharding, int | None]] = {
    "stage 0": (sw.Mesh(dp_shard=3), sw.Sharding(stage=0), None),
    "whole": (sw.Mesh(dp_shard=3), sw.Sharding(partition="whole", bucket_bytes=600), None),
    "two axes": (sw.Mesh(dp_replicate=2, dp_shard=2), sw.Sharding(), None),
    "replicas": (sw.Mesh(dp_replicate=2, dp_shard=2), sw.Sharding(owners="dp_shard", bucket_bytes=300), 2),
    "replicas alone": (sw.Mesh(dp_replicate=2), sw.Sharding(owners="dp_shard", partition="whole"), None),
}
"""The last: how many ranks are summed first."""


@pytest.mark.parametrize(
    ("name", "layout", "k"),
    covering(("bfloat16", "reduced in bfloat16", "norm kept"), list(LAYOUTS), (1, 2), strength=2),
)
def test_every_layout_rounds_in_the_same_places(name: str, layout: str, k: int) -> None:
    mesh, sharding, group = LAYOUTS[layout]
    got = ours(CASES[name].precision, adamw, mesh=mesh, k=k, sharding=sharding)
    assert_same_bits(got, by_hand(CASES[name], adamw, ranks=mesh.size, k=k, group=group))


def test_gradients_of_ranks_lose_no_more_than_those_of_microbatches() -> None:
    """Both travel in bfloat16 as backward left them and are added in float32, in the same order."""
    four_ranks = ours(BF16, adamw, mesh=sw.Mesh(dp_shard=4), k=1, clip=None)
    four_microbatches = ours(BF16, adamw, mesh=sw.Mesh(), k=4, clip=None)
    assert_same_bits(four_ranks, four_microbatches)


def test_masters_carry_what_the_working_copies_cannot_hold() -> None:
    """With updates below half a step of bfloat16, training without masters would stand still."""

    def tiny_steps(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=2e-4, weight_decay=0.0)

    batches = [word_batch(0, 8)] * 60
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=BF16)
    low = train_on_ranks(words, plan, batches, optimizer=tiny_steps, loss=word_loss)
    full = train_on_ranks(words, sw.Plan(mesh=plan.mesh), batches, optimizer=tiny_steps, loss=word_loss)
    for name, value in low.parameters.items():
        step = 2.0**-8 * full.parameters[name].abs()
        # One rounding to bfloat16, and the few updates whose sign differs because gradients were rounded.
        assert bool(((value - full.parameters[name]).abs() <= step + 60 * 2e-4 / 3).all()), name
    assert low.losses[-1] == pytest.approx(full.losses[-1], rel=2e-2)
    assert low.losses[-1] < low.losses[0] - 0.1


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_model_in_float64_stays_in_float64(ranks: int, k: int, clip: float | None) -> None:
    got = ours(sw.Precision(), adamw, mesh=sw.Mesh(dp_shard=ranks), k=k, clip=clip, model=lambda: words().double())
    oracle = RankOrder(
        model=words().double(),
        make_optimizer=adamw,
        loss_of=loss_of_words,
        num_ranks=ranks,
        num_microbatches=k,
        clip=clip,
        working=lambda _: torch.float64,
    )
    expected = oracle.train(BATCHES)
    if ranks == 1 or clip is None:
        assert_same_bits(got, expected)
    else:  # nothing is wider than float64 to add the ranks' shares of the norm in: its last bit follows the cut
        assert largest_difference(got, expected) <= 8 * 2.0**-52
    assert all(value.dtype == torch.float64 for value in got.parameters.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_built_in_bfloat16_gets_masters_without_being_asked(ranks: int) -> None:
    got = ours(sw.Precision(), adamw, mesh=sw.Mesh(dp_shard=ranks), k=3, model=lambda: words().bfloat16())
    oracle = RankOrder(
        model=words().bfloat16(),
        make_optimizer=adamw,
        loss_of=loss_of_words,
        num_ranks=ranks,
        num_microbatches=3,
        clip=0.3,
        working=lambda _: torch.bfloat16,
    )
    assert_same_bits(got, oracle.train(BATCHES))


@pytest.mark.parametrize("precision", [sw.Precision(), sw.Precision(compute="float32")])
def test_float32_runs_hold_no_second_copy(precision: sw.Precision) -> None:
    def run(channel: sw.Channel) -> None:
        model = words()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=precision)
        engine = sw.parallelize(model, plan, optimizer=sgd, loss=word_loss, channel=channel)
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        buffers = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        masters = [master for group in engine.optimizer.param_groups for master in group["params"]]
        assert masters
        assert {master.untyped_storage().data_ptr() for master in masters} <= buffers
        assert engine.footprint().master_bytes == 0
        assert engine.counters.cast_elements == 0

    sw.simulate(2, run)


class Casts(TorchDispatchMode):
    """Records the ops that give the values of watched memory in another dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, str] = {}
        self.seen: list[tuple[str, str, int]] = []
        """(whose memory, op, elements)"""

    def watch(self, label: str, tensor: torch.Tensor) -> None:
        self._watched[tensor.untyped_storage().data_ptr()] = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [each for each in args if isinstance(each, torch.Tensor)]
        source = inputs[1] if func is torch.ops.aten.copy_.default else inputs[0] if inputs else None
        if func in _CASTS and source is not None and source.dtype != out.dtype:
            label = self._watched.get(source.untyped_storage().data_ptr())
            if label is not None:
                self.seen.append((label, str(func), source.numel()))
        return out


_CASTS = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def test_the_record_of_casts_sees_those_of_autocast() -> None:
    model = words()
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        for name, parameter in model.named_parameters():
            casts.watch(name, parameter)
        loss_of_words(model, BATCHES[0]).backward()
    assert {label for label, _, _ in casts.seen} == {
        "wide.weight", "wide.bias", "narrow.weight", "narrow.bias", "embedding.weight",
    }  # fmt: skip


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("keep", [(), ("*norm*",)])
def test_no_parameter_is_cast_in_forward_or_backward_and_each_owned_element_once_per_update(
    k: int, keep: tuple[str, ...]
) -> None:
    def run(channel: sw.Channel) -> tuple[int, int]:
        model = words()
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2),
            merge=sw.Merge(microbatches=k),
            precision=sw.Precision(compute="bfloat16", keep=keep),
        )
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=channel)
        masters = [master for group in engine.optimizer.param_groups for master in group["params"]]
        with Casts() as casts:
            for parameter in model.parameters():
                casts.watch("working copy", parameter)
            for master in masters:
                if master.untyped_storage().data_ptr() not in casts._watched:
                    casts.watch("master", master)
            for batch in BATCHES:
                engine.step(share_of(batch, channel.rank, channel.size))
        assert {label for label, _, _ in casts.seen} == {"master"}
        assert len(casts.seen) == len(BATCHES)  # one bucket has masters apart
        kept = sum(master.numel() for master in masters if master.untyped_storage().data_ptr() in _storages(model))
        apart = sum(master.numel() for master in masters) - kept
        assert engine.counters.cast_elements == len(BATCHES) * apart
        return apart, kept

    owned = sw.simulate(2, run)
    num_kept = 2 * 37 if keep else 0
    assert sum(kept for _, kept in owned) == num_kept
    assert sum(apart for apart, _ in owned) == sum(each.numel() for each in words().parameters()) - num_kept


def _storages(model: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def test_a_regression_in_bfloat16_falls_as_in_float32() -> None:
    batches = [curve_batch(seed, 32) for seed in range(30)]
    plans = [sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=each) for each in (BF16, sw.Precision())]
    low, full = (train_on_ranks(curve, plan, batches, optimizer=adamw, loss=curve_loss) for plan in plans)
    assert full.losses[-1] < 0.6 * full.losses[0]
    assert low.losses[-1] == pytest.approx(full.losses[-1], rel=0.05)
