"""What the others are told when a rank raises, dies or refuses, in a step or a relayout over real processes."""

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel
from shardwise.errors import ModelError, PeerError
from tests.engine.tensor import planted_faults
from tests.oracle.pipeline_programs import Chain
from tests.oracle.places import data_share
from tests.oracle.program import Program, plan_of, seeded
from tests.oracle.programs import PROGRAMS
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport


class Failing(nn.Linear):
    """Its third call with gradients raises on one rank, or kills its process."""

    def __init__(self, *, by_signal: bool, is_victim: bool) -> None:
        super().__init__(9, 7)
        self.num_calls = 0
        self.by_signal, self.is_victim = by_signal, is_victim

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Elsewhere only shapes are inferred from it.
        self.num_calls += type(input) is torch.Tensor
        if self.is_victim and self.num_calls == 3:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise FloatingPointError("the pressure is too high")
        return super().forward(input)


def failing(*, by_signal: bool, is_victim: bool) -> Program:
    def make() -> Chain:
        model = Chain()
        model.blocks[1].outer = Failing(by_signal=by_signal, is_victim=is_victim)
        return model

    return replace(PROGRAMS["chain"], make=seeded(make))


def told(call: Callable[[], object]) -> str:
    """The error of a rank with its notes."""
    with pytest.raises((PeerError, FloatingPointError)) as caught:
        call()
    return "\n".join([f"{type(caught.value).__name__}: {caught.value}", *getattr(caught.value, "__notes__", [])])


def lose_a_rank(channel: Channel, mesh: str, victim: int, by_signal: bool) -> str:
    program = failing(by_signal=by_signal, is_victim=channel.rank == victim)
    plan = plan_of(program, mesh, k=5 if channel.size == 4 else 2)
    engine = program.engine(plan, channel)

    def both() -> None:  # on data ranks the third microbatch is in the second step
        for batch in program.batches[:2]:
            engine.step(data_share(batch, plan.mesh, channel.rank))

    said = told(both)
    with pytest.raises(PeerError):
        engine.step(program.batches[0])
    return said


@pytest.mark.parametrize(("mesh", "victim"), [("dp_shard=3", 0), ("pp=4", 1)])
def test_a_rank_killed_in_the_middle_of_a_step_is_named_to_the_others(pool: Pool, mesh: str, victim: int) -> None:
    size = sw.Mesh.parse(mesh).size
    results = pool.run(size, lose_a_rank, mesh, victim, True, lost=[victim])
    for rank in set(range(size)) - {victim}:
        assert results[rank].startswith(f"PeerError: rank {victim} is gone (its process died)")


@pytest.mark.parametrize(
    ("mesh", "where"),
    [("dp_shard=3", ("on rank 1, in microbatch 0 of 2",)), ("pp=4", ("rank 1", "stage 1", "blocks.1", "microbatch 2"))],
)
def test_an_exception_in_one_ranks_forward_stops_all_and_is_told_to_all(
    pool: Pool, mesh: str, where: tuple[str, ...]
) -> None:
    size = sw.Mesh.parse(mesh).size
    results = pool.run(size, lose_a_rank, mesh, 1, False, poisons=True)
    assert results[1].startswith("FloatingPointError: the pressure is too high")
    assert [word for word in where if word not in results[1]] == []
    for rank in set(range(size)) - {1}:
        assert "rank 1 stopped: FloatingPointError in a step: the pressure is too high" in results[rank]


def refuse_a_tensor_plan(channel: Channel) -> str:
    make, rules = planted_faults.FAULTS["softmax"]
    with pytest.raises(ModelError) as caught:
        planted_faults.train(channel, make, planted_faults.plan_of(rules))
    return str(caught.value)


def test_a_wrong_plan_of_tensor_parallelism_is_refused_alike_by_all(pool: Pool) -> None:
    first, second = pool.run(2, refuse_a_tensor_plan, poisons=True)
    assert first == second
    assert "'block' (Between) gives other numbers when it is cut" in first


def break_a_relayout(channel: Channel) -> str:
    """Rank 2 fails while the others wait for it."""
    program = PROGRAMS["decoder"]
    engine = program.engine(plan_of(program, "pp=2,tp=2"), channel)
    channel.exchange(b"", purpose="all have an engine")
    if channel.rank == 2:

        def fail() -> dict[str, Any]:
            raise FloatingPointError("the pressure is too high")

        engine.settings = fail  # type: ignore[method-assign]
    return told(lambda: sw.relayout(engine, plan_of(program, "dp_shard=2,tp=2")))


def test_a_rank_that_fails_in_a_relayout_stops_the_others(pool: Pool) -> None:
    results = pool.run(4, break_a_relayout, poisons=True)
    assert results[2].startswith("FloatingPointError: the pressure is too high")
    for rank in (0, 1, 3):
        assert results[rank].startswith("PeerError: ")
        assert "rank 2 stopped: FloatingPointError in sw.relayout: the pressure is too high" in results[rank]


def train_until_a_rank_dies(channel: Channel, victim: int, delay_seconds: float) -> str:
    program = PROGRAMS["words"]
    engine = program.engine(plan_of(program, f"dp_shard={channel.size}", bucket_bytes=600), channel)
    if channel.rank == victim:
        threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        try:
            engine.step(program.batches[0])
        except PeerError as error:
            return str(error)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", [SHARED_MEMORY, TCP], ids=["shared", "tcp"])
def test_a_rank_killed_at_any_instant_is_named_to_every_survivor(pool: Pool, transport: Transport) -> None:
    instants = random.Random(0)
    for _ in range(40):
        victim = instants.randrange(3)
        delay_seconds = instants.uniform(0.0, 0.3)
        results = pool.run(
            3, train_until_a_rank_dies, victim, delay_seconds, transport=transport, lost=[victim], patience_seconds=60
        )
        for rank in {0, 1, 2} - {victim}:
            assert results[rank].startswith(f"rank {victim} is gone (its process died)")
