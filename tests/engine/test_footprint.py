"""Bytes held: what the plan says is what the live buffers take, and optimizer state is that of the owned slice."""

import pytest

import shardwise as sw
from shardwise.engine.zero.grad_reduce import GradReduce
from tests.engine.expected import adamw, points, seeded, square_loss
from tests.engine.memory import distinct_bytes, tensor_bytes_alive
from tests.engine.test_counters import PRECISIONS, SHARDINGS, Tower


def measured(engine: sw.Engine) -> tuple[int, int, int, int]:
    """Bytes of working copies, gradients and masters held apart; number of elements of one moment."""
    buffers, gradients = engine._buffers, engine._gradients
    assert isinstance(gradients, GradReduce)
    arena = gradients._arena
    working = distinct_bytes([bucket.working for bucket in buffers.buckets])
    both = distinct_bytes([each for bucket in buffers.buckets for each in (bucket.working, bucket.master)])
    moments = [state["exp_avg"].numel() for state in engine.optimizer.state.values()]
    return working, arena.untyped_storage().nbytes(), both - working, sum(moments)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_live_buffers_take_what_the_plan_says(
    num_ranks: int, k: int, sharding: sw.Sharding, precision: sw.Precision
) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=num_ranks), sharding=sharding, precision=precision, merge=sw.Merge(microbatches=k)
    )

    def run(channel: sw.Channel) -> int:
        model = seeded(Tower)()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        for seed in range(2):
            engine.step(points(seed, k))
        planned = engine.footprint()
        assert measured(engine) == (
            planned.working_bytes,
            planned.gradient_bytes,
            planned.master_bytes,
            planned.owned_elements,
        )
        assert all(parameter.grad is None for parameter in model.parameters())
        working = {bucket.working.untyped_storage().data_ptr() for bucket in engine._buffers.buckets}
        assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} <= working
        return planned.owned_elements

    owned = sw.simulate(num_ranks, run)
    num_elements = sum(parameter.numel() for parameter in Tower().parameters())
    assert sum(owned) == num_elements * (num_ranks if sharding.stage == 0 else 1)


def test_in_float32_there_is_no_second_copy() -> None:
    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(seeded(Tower)(), plan, optimizer=adamw, loss=square_loss, channel=channel)
        assert engine.footprint().master_bytes == 0
        for bucket in engine._buffers.buckets:
            assert bucket.working.untyped_storage().data_ptr() == bucket.master.untyped_storage().data_ptr()

    sw.simulate(2, run)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("k", "bytes_of_gradient"), [(1, 2), (4, 4)])
def test_in_bfloat16_bytes_are_those_of_the_formula(num_ranks: int, k: int, bytes_of_gradient: int) -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=num_ranks), precision=PRECISIONS["bf16"], merge=sw.Merge(microbatches=k))
    num_elements = sum(parameter.numel() for parameter in Tower().parameters())
    padding = 8 * 16 + 16 * num_ranks

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(seeded(Tower)(), plan, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(0, k))
        working, gradients, masters, moments = measured(engine)
        assert 2 * num_elements <= working <= 2 * (num_elements + padding)
        one_bucket = 2 * (num_elements + padding) * (2 if num_ranks == 1 else 1)
        assert bytes_of_gradient * num_elements <= gradients
        assert gradients <= bytes_of_gradient * (num_elements + padding) + (one_bucket if k == 1 else 0)
        assert masters <= 4 * (num_elements + padding) / num_ranks
        assert moments <= (num_elements + padding) / num_ranks

    sw.simulate(num_ranks, run)


def test_training_leaves_no_tensors_behind() -> None:
    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(precision=PRECISIONS["bf16"], merge=sw.Merge(microbatches=2))
        engine = sw.parallelize(seeded(Tower)(), plan, optimizer=adamw, loss=square_loss, channel=channel)
        batch = points(0, 4)
        engine.step(batch)
        before = tensor_bytes_alive()
        for _ in range(3):
            engine.step(batch)
            engine.evaluate(batch)
        assert tensor_bytes_alive() == before

    sw.simulate(1, run)
