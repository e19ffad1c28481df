"""Backwards out of the ordinary: hooks of the user, activation checkpointing, reductions that start in the middle."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.reports import Counters
from shardwise.errors import ModelError
from tests.engine.channels import GoesOnAlone
from tests.engine.expected import adamw, points, seeded, square_loss
from tests.engine.models import word_batch, word_loss, words
from tests.engine.oracle import share_of, values_of


def trained_words(
    plan: sw.Plan, *, alone: bool, microbatches: Sequence[int | None] = (None, None, None)
) -> tuple[dict[str, torch.Tensor], Counters]:
    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], Counters]:
        model = words()
        given = GoesOnAlone(channel) if alone else channel
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=given)
        for seed, k in enumerate(microbatches):
            engine.step(share_of(word_batch(seed, 24), channel.rank, channel.size), microbatches=k)
        return values_of(model), engine.counters

    return sw.simulate(plan.mesh.size, run)[0]


@pytest.mark.parametrize("partition", ["slice", "whole"])
@pytest.mark.parametrize("precision", [sw.Precision(), sw.Precision(compute="bfloat16", keep=("norm", "scale"))])
@pytest.mark.parametrize("mesh", [sw.Mesh(dp_shard=3), sw.Mesh(dp_replicate=2, dp_shard=2), sw.Mesh()])
@pytest.mark.parametrize("owners", ["all", "dp_shard"])
@pytest.mark.parametrize("k", [1, 3])
def test_reductions_that_start_within_backward_change_no_bit(
    k: int, owners: str, mesh: sw.Mesh, precision: sw.Precision, partition: str
) -> None:
    plan = sw.Plan(
        mesh=mesh,
        sharding=sw.Sharding(bucket_bytes=300, owners=owners, partition=partition),  # type: ignore[arg-type]
        precision=precision,
        merge=sw.Merge(microbatches=k),
        clip_grad_norm=0.5,
    )
    steps = (None, 2, None)
    late, of_late = trained_words(plan, alone=False, microbatches=steps)
    early, of_early = trained_words(plan, alone=True, microbatches=steps)
    assert all(torch.equal(early[name], late[name]) for name in late)
    assert of_late.early_reductions == 0
    assert of_early.reduce_scatters == of_late.reduce_scatters


def test_reductions_start_within_backward_up_to_the_first_bucket_that_is_not_complete() -> None:
    """`Words` has a module that is never used: it ends what can start early, and the rest follows after backward."""
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(bucket_bytes=1))
    _, counters = trained_words(plan, alone=True)
    assert counters.early_reductions == 0  # its bucket is the first

    def run(channel: sw.Channel) -> tuple[int, int]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=GoesOnAlone(channel))
        engine.step(points(channel.rank, 4), microbatches=2)
        return engine.counters.early_reductions, engine.counters.reduce_scatters

    assert sw.simulate(2, run) == [(4, 4), (4, 4)]


class Block(nn.Module):
    """Two layers that forget their activations, or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.compute(x)
        y: torch.Tensor = checkpoint(self.compute, x, use_reentrant=self.reentrant)
        return y

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


class Blocks(nn.Module):
    """Blocks one after the other, or one block twice."""

    def __init__(self, reentrant: bool | None, *, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        one, other = Block(reentrant), Block(reentrant)
        self.blocks = nn.ModuleList([one, one if shared else other])
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.out(x)
        return y


def trained_blocks(
    reentrant: bool | None, *, shared: bool, alone: bool, k: int = 2, bucket_bytes: int = 100
) -> dict[str, torch.Tensor]:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(bucket_bytes=bucket_bytes), merge=sw.Merge(microbatches=k)
    )

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = seeded(lambda: Blocks(reentrant, shared=shared))()
        given = GoesOnAlone(channel) if alone else channel
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=given)
        for seed in range(3):
            engine.step(points(2 * seed + channel.rank, 4))
        return values_of(model)

    first, second = sw.simulate(2, run)
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_activation_checkpointing_changes_no_bit(k: int, alone: bool, shared: bool) -> None:
    plain = trained_blocks(None, shared=shared, alone=alone, k=k)
    checkpointed = trained_blocks(False, shared=shared, alone=alone, k=k)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_reentrant_checkpointing_trains_where_reductions_wait_for_backward(k: int, shared: bool) -> None:
    plain = trained_blocks(None, shared=shared, alone=False, k=k)
    reentrant = trained_blocks(True, shared=shared, alone=False, k=k)
    for name, value in plain.items():
        torch.testing.assert_close(reentrant[name], value, rtol=1e-5, atol=1e-6)


def test_reentrant_checkpointing_of_parameters_used_once_trains_with_early_reductions() -> None:
    plain = trained_blocks(None, shared=False, alone=True)
    reentrant = trained_blocks(True, shared=False, alone=True)
    assert all(torch.equal(plain[name], reentrant[name]) for name in plain)


def test_a_gradient_that_comes_after_its_bucket_was_reduced_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        trained_blocks(True, shared=True, alone=True, bucket_bytes=1)
    assert "got a gradient twice in one backward, after its bucket was reduced; use non-reentrant activation" in str(
        caught.value
    )


def test_hooks_of_the_user_on_gradients_and_modules_run_once_each() -> None:
    def run(channel: sw.Channel) -> None:
        model = seeded(lambda: Blocks(None))()
        engine = sw.parallelize(
            model, sw.Plan(mesh=sw.Mesh(dp_shard=2)), optimizer=adamw, loss=square_loss, channel=channel
        )
        seen: list[str] = []

        def double(gradient: torch.Tensor) -> torch.Tensor:
            seen.append("gradient")
            return gradient * 2

        norm = engine.step(points(0, 4)).grad_norm
        model.load_state_dict(seeded(lambda: Blocks(None))().state_dict())
        for parameter in model.parameters():
            parameter.register_hook(double)
        model.out.register_forward_hook(lambda *_: seen.append("forward"))
        model.out.register_full_backward_hook(lambda *_: seen.append("backward"))
        assert engine.step(points(0, 4)).grad_norm == pytest.approx(2 * norm, rel=1e-6)
        assert sorted(seen) == ["backward", "forward", *["gradient"] * len(list(model.parameters()))]

    sw.simulate(2, run)
