"""Gradient merge: k microbatches make the update that one big batch makes."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from tests.engine.expected import adamw
from tests.engine.models import (
    Batch,
    curve,
    curve_batch,
    curve_loss,
    word_batch,
    word_loss,
    words,
)
from tests.engine.oracle import RankOrder, Trained, rows_of, share_of, train_in_one_process, values_of
from tests.engine.ranks import assert_same_bits, largest_difference, train_on_ranks

BOUND = 8 * 2.0**-23
"""Eight ulps of a value between 1 and 2: what other orders of summation make in three updates (measured: two)."""


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def count_targets(batch: Batch) -> int:
    return int((batch["targets"] != -100).sum())


def masked_batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """Rows with 0 to 5 targets."""
    batch = word_batch(seed, rows)
    lengths = torch.randint(0, 6, (rows, 1), generator=torch.Generator().manual_seed(seed))
    lengths[0] = 5
    batch["targets"] = batch["targets"].masked_fill(torch.arange(5) >= lengths, -100)
    return batch


def whole_batch(batches: list[dict[str, torch.Tensor]], *, clip: float | None, optimizer: Any = sgd) -> Trained:
    model = words()
    return train_in_one_process(model, optimizer(list(model.parameters())), batches, loss=word_loss, clip=clip)


def assert_close(got: Trained, expected: Trained) -> None:
    assert largest_difference(got, expected) <= BOUND
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


@pytest.mark.parametrize(("ranks", "k"), [(1, 1), (1, 4), (2, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize("sharding", [sw.Sharding(), sw.Sharding(stage=0), sw.Sharding(partition="whole")])
def test_the_mean_is_taken_before_the_norm_and_the_clip(ranks: int, k: int, sharding: sw.Sharding) -> None:
    """SGD 0.1 and clip 0.5: with the mean taken after the clip, four microbatches would move a quarter as far."""
    batches = [word_batch(seed, 32) for seed in range(3)]
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), sharding=sharding, merge=sw.Merge(microbatches=k), clip_grad_norm=0.5)
    got = train_on_ranks(words, plan, batches, optimizer=sgd, loss=word_loss)
    expected = whole_batch(batches, clip=0.5)
    assert min(expected.grad_norms) > 0.5  # the clip acts
    assert_close(got, expected)


def test_the_mean_after_the_clip_would_have_been_seen() -> None:
    """The wrong program is further from the right one than the bound of these tests, by far."""
    batches = [word_batch(0, 32)]
    model = words()
    optimizer = sgd(list(model.parameters()))
    for rows in (range(at, at + 8) for at in range(0, 32, 8)):
        part = rows_of(batches[0], rows)
        word_loss(model(part["words"]), part).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 4
    optimizer.step()
    wrong = Trained(parameters=values_of(model))
    assert largest_difference(wrong, whole_batch(batches, clip=0.5)) > 100 * BOUND


@pytest.mark.parametrize(("ranks", "k"), [(1, 4), (2, 2), (2, 3)])
def test_without_average_the_microbatches_are_summed_and_the_ranks_averaged(ranks: int, k: int) -> None:
    batches = [word_batch(seed, 24) for seed in range(2)]
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), merge=sw.Merge(microbatches=k, average=False), clip_grad_norm=3.0)
    got = train_on_ranks(words, plan, batches, optimizer=sgd, loss=word_loss)
    model = words()

    def k_times(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return k * word_loss(output, batch)

    expected = train_in_one_process(model, sgd(list(model.parameters())), batches, loss=k_times, clip=3.0)
    assert largest_difference(got, expected) <= BOUND
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    assert got.losses == pytest.approx([loss / k for loss in expected.losses], rel=1e-6)
    if ranks == 1:
        model = words()
        plain = train_in_one_process(
            model,
            sgd(list(model.parameters())),
            batches,
            loss=word_loss,
            num_microbatches=k,
            clip=3.0,
            average=False,
        )
        assert_same_bits(got, plain)


@pytest.mark.parametrize(("rows", "ranks", "k"), [(7, 1, 3), (7, 2, 2), (11, 3, 3), (17, 4, 4)])
def test_rows_count_the_same_in_uneven_microbatches_and_on_uneven_ranks(rows: int, ranks: int, k: int) -> None:
    batches = [word_batch(seed, rows) for seed in range(3)]
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), merge=sw.Merge(microbatches=k), clip_grad_norm=0.5)
    got = train_on_ranks(words, plan, batches, optimizer=sgd, loss=word_loss)
    assert_close(got, whole_batch(batches, clip=0.5))


@pytest.mark.parametrize(("ranks", "k"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_targets_count_the_same_wherever_they_are(ranks: int, k: int, optimizer: Any) -> None:
    batches = [masked_batch(seed, 24) for seed in range(3)]
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), merge=sw.Merge(microbatches=k), clip_grad_norm=0.5)
    got = train_on_ranks(words, plan, batches, optimizer=optimizer, loss=word_loss, loss_weight=count_targets)
    assert_close(got, whole_batch(batches, clip=0.5, optimizer=optimizer))


def test_weights_by_rows_would_have_been_seen() -> None:
    batches = [masked_batch(0, 24)]
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=4))
    by_rows = train_on_ranks(words, plan, batches, optimizer=sgd, loss=word_loss)
    assert largest_difference(by_rows, whole_batch(batches, clip=None)) > 100 * BOUND


@pytest.mark.parametrize("masked_rows", [range(0, 2), range(6, 8), range(0, 4), range(4, 8), range(2, 6)])
def test_a_microbatch_without_targets_does_not_count(masked_rows: range) -> None:
    """Its loss, a mean over nothing, would be nan. Two ranks with two microbatches of two rows: also a whole rank."""
    batch = word_batch(0, 8)
    batch["targets"][masked_rows.start : masked_rows.stop] = -100
    masked = rows_of(batch, masked_rows)
    with torch.no_grad():
        assert math.isnan(word_loss(words()(masked["words"]), masked))
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=2), clip_grad_norm=0.5)
    got = train_on_ranks(
        words, plan, [batch, word_batch(1, 8)], optimizer=adamw, loss=word_loss, loss_weight=count_targets
    )
    assert_close(got, whole_batch([batch, word_batch(1, 8)], clip=0.5, optimizer=adamw))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_split_weighs_targets_as_the_whole_batch(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    k = data.draw(st.integers(1, 4))
    rows = data.draw(st.integers(ranks * k, 24))
    batch = masked_batch(data.draw(st.integers(0, 10**6)), rows)
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), merge=sw.Merge(microbatches=k), clip_grad_norm=0.5)
    got = train_on_ranks(words, plan, [batch], optimizer=sgd, loss=word_loss, loss_weight=count_targets)
    assert_close(got, whole_batch([batch], clip=0.5))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_number_of_microbatches_may_change_from_step_to_step(compute: str, ranks: int) -> None:
    """In bfloat16 the gradients of one microbatch are held in bfloat16, those of several in float32."""
    batches = [word_batch(seed, 24) for seed in range(5)]
    counts = [1, 4, 1, 3, 4]
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=ranks),
        sharding=sw.Sharding(bucket_bytes=600),
        merge=sw.Merge(microbatches=3),
        precision=sw.Precision(compute=compute),
        clip_grad_norm=0.5,
    )
    got = train_on_ranks(words, plan, batches, optimizer=adamw, loss=word_loss, num_microbatches=counts)
    oracle = RankOrder(
        model=words(),
        make_optimizer=adamw,
        loss_of=lambda model, batch: word_loss(model(batch["words"]), batch),
        num_ranks=ranks,
        clip=0.5,
        working=lambda _: torch.bfloat16 if compute == "bfloat16" else torch.float32,
    )
    assert_same_bits(got, oracle.train(batches, counts=counts))


def state_of(engine: sw.Engine) -> dict[Any, torch.Tensor]:
    return {piece: copy.deepcopy(value) for piece, value in engine.state().items()}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(
    bad: float, compute: str, ranks: int
) -> None:
    good = [curve_batch(seed, 12) for seed in range(3)]
    poisoned = curve_batch(9, 12)
    poisoned["y"][5] = bad  # of three ranks with two microbatches, in rank 1's first
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=ranks),
        merge=sw.Merge(microbatches=2),
        precision=sw.Precision(compute=compute),
        clip_grad_norm=0.5,
    )

    def run(channel: sw.Channel) -> Trained:
        model = curve()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=curve_loss, channel=channel)

        def step(batch: Batch) -> sw.StepReport:
            return engine.step(share_of(batch, channel.rank, channel.size))

        step(good[0])
        before = state_of(engine)
        for _ in range(2):
            report = step(poisoned)
            assert report.skipped
            assert math.isnan(report.grad_norm)
            assert not math.isfinite(report.loss)
        after = state_of(engine)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[piece], after[piece]) for piece in before)
        assert (engine.counters.updates, engine.counters.skipped) == (1, 2)
        reports = [step(batch) for batch in good[1:]]
        assert not any(report.skipped for report in reports)
        return Trained(parameters=values_of(model))

    for got in sw.simulate(ranks, run):
        expected = train_on_ranks(curve, plan, good, optimizer=adamw, loss=curve_loss)
        assert_same_bits(got, expected)


def test_a_gradient_too_large_for_float16_skips_the_update_though_the_loss_is_finite() -> None:
    def run(channel: sw.Channel) -> list[sw.StepReport]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute="float16"))
        engine = sw.parallelize(curve(), plan, optimizer=sgd, loss=curve_loss, channel=channel)
        batch = curve_batch(0, 8)
        if channel.rank == 1:
            batch["y"] *= 1e6
        first = engine.step(batch)
        return [first, engine.step(curve_batch(1, 8))]

    for first, second in sw.simulate(2, run):
        assert first.skipped
        assert math.isfinite(first.loss)
        assert not second.skipped


def test_evaluation_is_the_mean_over_all_rows_whatever_rank_has_them() -> None:
    batch = word_batch(0, 12)
    model = words()
    with torch.no_grad():
        expected = float(word_loss(model(batch["words"]), batch))
    rows = [range(0, 7), range(7, 7), range(7, 12)]

    def run(channel: sw.Channel) -> float:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=3), merge=sw.Merge(microbatches=2))
        engine = sw.parallelize(words(), plan, optimizer=sgd, loss=word_loss, channel=channel)
        return engine.evaluate(rows_of(batch, rows[channel.rank])).loss

    losses = sw.simulate(3, run)
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(expected, rel=1e-6)
