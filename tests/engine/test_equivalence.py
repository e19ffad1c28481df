"""In float32 every layout trains as one process does.

Two claims. To the bit: the engine equals a single process that adds the gradients up in the order of ranks (each rank's
microbatches first, then the ranks), whatever is cut where. Within `BOUND`: it equals the program that anybody would
write, which adds all microbatches up in one row. Sums of n terms in two orders differ by (n - 1) steps of 2^-24 of the
sum of their sizes at most; n is 32 at most here, terms have either sign, and parameters and updates are below 2.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.plan.specs import Partition
from shardwise.space import Piece
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
)
from tests.engine.oracle import Optimizers, RankOrder, Trained, microbatches_of, train_in_one_process
from tests.engine.ranks import assert_same_bits, largest_difference, train_on_ranks

BOUND = 8 * 2.0**-23
"""Eight ulps of a parameter between 1 and 2, after three updates (measured: two)."""

BATCHES = [word_batch(seed, 96) for seed in range(3)]
"""96 rows: equal shares for all ranks here; three ranks with three microbatches make uneven ones."""


def plan_of(mesh: sw.Mesh, sharding: sw.Sharding | None = None, *, k: int = 1, clip: float | None = None) -> sw.Plan:
    sharding = sharding or sw.Sharding(bucket_bytes=600)
    return sw.Plan(mesh=mesh, sharding=sharding, merge=sw.Merge(microbatches=k), clip_grad_norm=clip)


def ours(plan: sw.Plan, optimizer: Optimizers) -> Trained:
    return train_on_ranks(words, plan, BATCHES, optimizer=optimizer, loss=word_loss)


def in_one_process(optimizer: Optimizers, *, n: int, clip: float | None) -> Trained:
    model = words()
    parameters = optimizer(list(model.parameters()))
    return train_in_one_process(model, parameters, BATCHES, loss=word_loss, num_microbatches=n, clip=clip)


def in_rank_order(
    optimizer: Optimizers, *, ranks: int, k: int, clip: float | None, ranks_per_sum: int | None = None
) -> Trained:
    return RankOrder(
        model=words(),
        make_optimizer=optimizer,
        loss_of=loss_of_words,
        num_ranks=ranks,
        ranks_per_sum=ranks_per_sum,
        num_microbatches=k,
        clip=clip,
    ).train(BATCHES)


def assert_close(got: Trained, expected: Trained) -> None:
    assert largest_difference(got, expected) <= BOUND
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "k", "clip", "optimizer"), covering((1, 2, 3, 4, 8), (1, 3, 4), (None, 0.3), (sgd, adamw), strength=2)
)
def test_ranks_train_as_one_process(ranks: int, k: int, clip: float | None, optimizer: Optimizers) -> None:
    got = ours(plan_of(sw.Mesh(dp_shard=ranks), k=k, clip=clip), optimizer)
    in_order = in_rank_order(optimizer, ranks=ranks, k=k, clip=clip)
    plain = in_one_process(optimizer, n=ranks * k, clip=clip)
    assert_same_bits(got, in_order)
    assert got.grad_norms == in_order.grad_norms
    assert_close(got, plain)
    if ranks == 1:
        assert_same_bits(got, plain)
        assert got.grad_norms == plain.grad_norms


@pytest.mark.parametrize(("optimizer", "ranks", "k"), [(sgd, 2, 4), (adamw, 3, 3), (sgd, 8, 1), (adamw, 2, 1)])
def test_stages_partitions_and_buckets_change_no_bit(optimizer: Optimizers, ranks: int, k: int) -> None:
    mesh = sw.Mesh(dp_shard=ranks)
    cuts: list[tuple[Partition, int]] = [("slice", 1), ("slice", 1 << 20), ("whole", 1), ("whole", 700)]
    layouts = [
        sw.Sharding(stage=stage, partition=partition, bucket_bytes=bucket_bytes)
        for stage in (0, 1)
        for partition, bucket_bytes in cuts
    ]
    first, *others = [ours(plan_of(mesh, layout, k=k, clip=0.3), optimizer) for layout in layouts]
    for other in others:
        assert_same_bits(other, first)
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms)


@pytest.mark.parametrize(
    ("axes", "partition", "optimizer"),
    covering(((2, 2), (3, 1), (4, 2), (2, 3)), ("slice", "whole"), (sgd, adamw), strength=2),
)
def test_replicas_add_the_sums_of_their_owners(
    axes: tuple[int, int], partition: Partition, optimizer: Optimizers
) -> None:
    replicate, shard = axes
    sharding = sw.Sharding(partition=partition, owners="dp_shard", bucket_bytes=600)
    plan = plan_of(sw.Mesh(dp_replicate=replicate, dp_shard=shard), sharding, k=3, clip=0.3)
    got = ours(plan, optimizer)
    ranks = replicate * shard
    group = shard if shard > 1 else None
    assert_same_bits(got, in_rank_order(optimizer, ranks=ranks, k=3, clip=0.3, ranks_per_sum=group))
    assert_close(got, in_one_process(optimizer, n=3 * ranks, clip=0.3))


@pytest.mark.parametrize(("replicate", "shard"), [(2, 1), (2, 2), (4, 2)])
def test_masters_cut_over_all_data_ranks_do_not_see_which_axis_a_rank_is_on(replicate: int, shard: int) -> None:
    on_two_axes = ours(plan_of(sw.Mesh(dp_replicate=replicate, dp_shard=shard), k=3, clip=0.3), adamw)
    on_one_axis = ours(plan_of(sw.Mesh(dp_shard=replicate * shard), k=3, clip=0.3), adamw)
    assert_same_bits(on_two_axes, on_one_axis)


@pytest.mark.parametrize(("ranks", "k"), [(2, 4), (3, 4), (8, 3)])
def test_one_update_differs_from_the_plain_sum_by_its_rounding_at_most(ranks: int, k: int) -> None:
    """The proven bound: each program's sum of n terms is off by (n - 1) u of the sum of their sizes; u = 2^-24."""
    n, rate, u = ranks * k, 1.0, 2.0**-24

    def descent(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate)

    got = train_on_ranks(words, plan_of(sw.Mesh(dp_shard=ranks), k=k), BATCHES[:1], optimizer=descent, loss=word_loss)
    model = words()
    sizes = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for part in [part for of_rank in microbatches_of(BATCHES[0], ranks, k) for part in of_rank]:
        model.zero_grad()
        loss_of_words(model, part).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sizes[name] += parameter.grad.abs()
    plain = train_in_one_process(
        model, descent(list(model.parameters())), BATCHES[:1], loss=word_loss, num_microbatches=n
    )
    for name, value in plain.parameters.items():
        # Two sums, two quotients by n, and the two roundings of the new parameter.
        bound = rate * 2 * n * u * sizes[name] / n + 2 * u * (value.abs() + sizes[name] / n)
        assert bool(((got.parameters[name] - value).abs() <= bound).all()), name


@pytest.mark.parametrize("partition", ["slice", "whole"])
def test_ranks_that_own_nothing_take_part(partition: Partition) -> None:
    """41 elements on 8 ranks: parameters smaller than the number of ranks, and ranks without any."""
    sharding = sw.Sharding(partition=partition)
    plan = plan_of(sw.Mesh(dp_shard=8), sharding, k=2, clip=0.1)
    batches = [curve_batch(seed, 32) for seed in range(3)]

    def owned_elements(channel: sw.Channel) -> int:
        engine = sw.parallelize(curve(), plan, optimizer=adamw, loss=curve_loss, channel=channel)
        return engine.footprint().owned_elements

    owned = sw.simulate(8, owned_elements)
    assert sum(owned) == 41
    assert 0 in owned
    got = train_on_ranks(curve, plan, batches, optimizer=adamw, loss=curve_loss)
    expected = RankOrder(
        model=curve(),
        make_optimizer=adamw,
        loss_of=lambda model, batch: curve_loss(model(batch["x"]), batch),
        num_ranks=8,
        num_microbatches=2,
        clip=0.1,
    ).train(batches)
    assert_same_bits(got, expected)


def test_a_parameter_cut_over_several_ranks_is_put_together_again() -> None:
    """A matrix of 296 elements, in one bucket over 8 ranks."""

    def pieces(channel: sw.Channel) -> list[tuple[int, int]]:
        model = words()
        engine = sw.parallelize(
            model, plan_of(sw.Mesh(dp_shard=8), sw.Sharding()), optimizer=sgd, loss=word_loss, channel=channel
        )
        return [piece.run for piece in engine.state() if piece.name == "wide.weight" and piece.run is not None]

    runs = [run for of_rank in sw.simulate(8, pieces) for run in of_rank]
    assert len(runs) >= 3
    runs.sort()
    assert [start for start, _ in runs] == [0, *[stop for _, stop in runs[:-1]]]
    assert runs[-1][1] == 296


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_plan_equals_one_process_in_the_order_of_its_ranks(data: st.DataObject) -> None:
    check_any_plan(data)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_very_many_plans_equal_one_process_in_the_order_of_their_ranks(data: st.DataObject) -> None:
    check_any_plan(data)


def check_any_plan(data: st.DataObject) -> None:
    replicate, shard = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 5), (3, 2), (2, 4)]))
    sharding = sw.Sharding(
        stage=data.draw(st.sampled_from([0, 1])),
        partition=data.draw(st.sampled_from(["slice", "whole"])),
        owners=data.draw(st.sampled_from(["all", "dp_shard"])),
        bucket_bytes=data.draw(st.sampled_from([1, 64, 600, 1500, 1 << 20])),
    )
    k = data.draw(st.integers(1, 5))
    clip = data.draw(st.sampled_from([None, 0.3, 100.0]))
    optimizer = data.draw(st.sampled_from([sgd, adamw]))
    got = ours(plan_of(sw.Mesh(dp_replicate=replicate, dp_shard=shard), sharding, k=k, clip=clip), optimizer)
    in_groups = sharding.stage == 1 and sharding.owners == "dp_shard" and shard > 1
    group = shard if in_groups else None
    expected = in_rank_order(optimizer, ranks=replicate * shard, k=k, clip=clip, ranks_per_sum=group)
    assert_same_bits(got, expected)
    assert got.grad_norms == expected.grad_norms


class Sometimes(nn.Module):
    """A second map, for batches that begin above zero only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 1)
        self.sometimes = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.always(x)
        return output + self.sometimes(x) if x[0, 0] > 0 else output


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_rank_did_not_use_counts_as_zero_whatever_it_had_before(stage: int) -> None:
    mesh = sw.Mesh(dp_replicate=2) if stage == 0 else sw.Mesh(dp_shard=2)
    plan = sw.Plan(mesh=mesh, sharding=sw.Sharding(stage=stage))

    def run(channel: sw.Channel) -> torch.Tensor:
        engine = sw.parallelize(
            Sometimes(),
            plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            loss=lambda output, batch: output.sum(),
            channel=channel,
        )
        for first in (5.0, 5.0 if channel.rank == 0 else -5.0):
            engine.step({"x": torch.tensor([[first, 3.0]])})
        wanted = Piece(name="sometimes.weight", dtype="float32", global_shape=(1, 2))
        return sw.reshard(engine.gradients(), {wanted: None}, channel=channel)[wanted]

    for gradient in sw.simulate(2, run):
        assert gradient.tolist() == [[2.5, 1.5]]
