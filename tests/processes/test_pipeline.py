"""Stages over real processes: the bits of one process, and what the others are told when a rank fails or dies."""

import os
import signal

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel
from shardwise.errors import PeerError
from tests.engine.pipeline import models, path_models
from tests.engine.pipeline.models import CHAIN, Chain, case, vectors
from tests.engine.pipeline.oracle import Case, Trajectory, adamw, expected
from tests.engine.pipeline.stages import assert_same, plan_for, put_together, train, train_on
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport

IMPATIENT = Transport(timeout_seconds=5.0)


def case_named(name: str) -> Case:
    """By a name, which travels to the processes."""
    nets = {**models.CASES, **path_models.CASES}
    if name in nets:
        return nets[name]
    from tests.engine.pipeline.transformers_models import case_of  # seconds, in every process that has to

    return case_of(name, tied=True if name == "llama" else None)


def train_here(channel: Channel, name: str, text: str) -> tuple[object, ...]:
    return train_on(channel, case_named(name), sw.Plan.parse(text))


def train_in_processes(pool: Pool, name: str, plan: sw.Plan, transport: Transport = SHARED_MEMORY) -> Trajectory:
    return put_together(pool.run(plan.mesh.size, train_here, name, plan.text(), transport=transport))


@pytest.mark.parametrize(
    ("name", "schedule", "pp", "k", "transport"),
    [
        ("llama", "1f1b", 2, 1, SHARED_MEMORY),
        ("t5", "1f1b", 2, 1, SHARED_MEMORY),
        ("u-net", "1f1b", 2, 4, TCP),
        ("selecting", "interleaved", 2, 3, SHARED_MEMORY),
        ("feedback over three", "1f1b", 3, 5, SHARED_MEMORY),
        ("turning", "1f1b", 2, 4, TCP),
        ("chain", "interleaved", 2, 5, TCP),
    ],
    ids=lambda value: ("tcp" if value is TCP else "shared") if isinstance(value, Transport) else str(value),
)
def test_processes_train_to_the_bits_of_one(
    pool: Pool, name: str, schedule: str, pp: int, k: int, transport: Transport
) -> None:
    net = case_named(name)
    plan = plan_for(net, schedule=schedule, pp=pp, k=k)
    assert_same(train_in_processes(pool, name, plan, transport), expected(net, k))


def test_stages_and_data_ranks_train_to_the_bits_of_simulated_ones(pool: Pool) -> None:
    net = case_named("u-net")
    plan = plan_for(
        net,
        mesh=sw.Mesh(pp=2, dp_shard=2),
        k=2,
        sharding=sw.Sharding(stage=1, bucket_bytes=300),
        clip_grad_norm=0.1,
    )
    assert_same(train_in_processes(pool, "u-net", plan), train(net, plan))


class Failing(nn.Linear):
    """Its third call with gradients raises, or kills the process, where it is executed."""

    def __init__(self, *, by_signal: bool) -> None:
        super().__init__(9, 7)
        self.num_calls = 0
        self.by_signal = by_signal
        self.home = os.getpid()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Elsewhere only shapes are inferred from it.
        self.num_calls += type(input) is torch.Tensor
        if self.num_calls == 3:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise FloatingPointError("the pressure is too high")
        return super().forward(input)


def failing(*, by_signal: bool) -> Chain:
    model = Chain()
    model.blocks[1].outer = Failing(by_signal=by_signal)
    return model


def fail_in_a_module(channel: Channel, by_signal: bool) -> str:
    net = case(lambda: failing(by_signal=by_signal), CHAIN, num_stages=4)
    engine = sw.parallelize(net.make(), plan_for(net, pp=4, k=5), optimizer=adamw, loss=net.loss, channel=channel)
    with pytest.raises((PeerError, FloatingPointError)) as caught:
        engine.step(vectors(0))
    with pytest.raises(PeerError):
        engine.step(vectors(1))
    return "\n".join([f"{type(caught.value).__name__}: {caught.value}", *getattr(caught.value, "__notes__", [])])


def test_an_exception_inside_one_stages_module_is_told_to_all(pool: Pool) -> None:
    results = pool.run(4, fail_in_a_module, False, transport=IMPATIENT, poisons=True)
    assert results[1].startswith("FloatingPointError: the pressure is too high")
    for words in ("rank 1", "stage 1", "blocks.1", "microbatch 2"):
        assert words in results[1]
    for rank in (0, 2, 3):
        assert "rank 1 stopped: FloatingPointError in a step: the pressure is too high" in results[rank]


def test_a_rank_killed_in_the_middle_of_a_schedule_is_named_to_the_others(pool: Pool) -> None:
    results = pool.run(4, fail_in_a_module, True, transport=IMPATIENT, lost=[1])
    for rank in (0, 2, 3):
        assert results[rank].startswith("PeerError: rank 1 is gone (its process died)")
