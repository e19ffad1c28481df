"""The engine over real processes: the numbers of simulated ranks, and what happens when a rank dies or raises."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel
from shardwise.comm.processes import ProcessChannel
from shardwise.errors import BatchError, PeerError
from tests.engine.models import word_batch, word_loss, words, words_with_kept_norm
from tests.engine.oracle import share_of
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport
from tests.processes.simulated_bits import assert_bits_of_simulated_ranks

IMPATIENT = Transport(timeout_seconds=5.0)

Outcome = tuple[list[sw.StepReport], float, dict[str, torch.Tensor]]

PLANS = {
    "slices": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(bucket_bytes=600), clip_grad_norm=0.3),
    "whole": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(partition="whole", bucket_bytes=600)),
    "replicas": sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2), sharding=sw.Sharding(owners="dp_shard")),
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=0), clip_grad_norm=0.3),
    "merged in bfloat16": sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        merge=sw.Merge(microbatches=3),
        precision=sw.Precision(compute="bfloat16", keep=("norm",)),
    ),
}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(channel: Channel, text: str) -> Outcome:
    plan = sw.Plan.parse(text)
    torch.manual_seed(0)
    model = words() if plan.precision.compute is None else words_with_kept_norm()
    engine = sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=channel)
    shares = [share_of(word_batch(seed, 24), channel.rank, channel.size) for seed in range(3)]
    reports = [engine.step(share) for share in shares]
    held_out = engine.evaluate(shares[0]).loss
    return reports, held_out, {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("transport", [SHARED_MEMORY, TCP], ids=["shared", "tcp"])
@pytest.mark.parametrize("name", PLANS)
def test_processes_train_to_the_bits_of_simulated_ranks(pool: Pool, name: str, transport: Transport) -> None:
    assert_bits_of_simulated_ranks(pool, train, PLANS[name], transport)


class DiesInForward(nn.Linear):
    """Rank `victim` is killed, or raises, in its second forward."""

    def __init__(self, rank: int, victim: int, *, by_signal: bool) -> None:
        super().__init__(4, 4)
        self.num_forwards = 0
        self.is_victim = rank == victim
        self.by_signal = by_signal

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if self.is_victim and self.num_forwards == 2:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise FloatingPointError("the pressure is too high")
        return super().forward(input)


def lose_a_rank(channel: Channel, victim: int, by_signal: bool) -> str:
    torch.manual_seed(0)
    engine = sw.parallelize(
        DiesInForward(channel.rank, victim, by_signal=by_signal),
        sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)),
        optimizer=adamw,
        loss=lambda output, _: output.square().mean(),
        channel=channel,
    )
    batch: Mapping[str, Any] = {"input": torch.ones(2, 4)}
    engine.step(batch)
    with pytest.raises((PeerError, FloatingPointError)) as caught:
        engine.step(batch)
    with pytest.raises(PeerError):
        engine.step(batch)
    notes = getattr(caught.value, "__notes__", [])
    return "\n".join([f"{type(caught.value).__name__}: {caught.value}", *notes])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_step_is_named_to_the_others(pool: Pool, victim: int) -> None:
    results = pool.run(3, lose_a_rank, victim, True, transport=IMPATIENT, lost=[victim])
    for rank in {0, 1, 2} - {victim}:
        assert results[rank].startswith(
            f"PeerError: rank {victim} is gone (its process died), while rank {rank} was in"
        )


def test_an_exception_in_one_ranks_forward_stops_all_and_is_told_to_all(pool: Pool) -> None:
    results = pool.run(3, lose_a_rank, 1, False, transport=IMPATIENT, poisons=True)
    assert results[1].startswith("FloatingPointError: the pressure is too high")
    assert "shardwise: on rank 1, in microbatch 0 of 1" in results[1]
    for rank in (0, 2):
        assert "rank 1 stopped: FloatingPointError in a step: the pressure is too high" in results[rank]


def refuse_a_batch(channel: Channel) -> tuple[str, bool]:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), merge=sw.Merge(microbatches=2))
    torch.manual_seed(0)
    engine = sw.parallelize(words(), plan, optimizer=adamw, loss=word_loss, channel=channel)
    with pytest.raises(BatchError) as caught:
        engine.step(word_batch(0, 1 if channel.rank == 1 else 4))
    return str(caught.value), engine.step(word_batch(0, 4)).skipped


def test_a_batch_that_one_rank_cannot_split_is_refused_by_all_and_training_goes_on(pool: Pool) -> None:
    first, second = pool.run(2, refuse_a_batch)
    assert first == second
    assert first[0].startswith("rank 1: a batch of 1 rows cannot be split into 2 microbatches")
    assert first[1] is False


def staged_slots(channel: Channel) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), precision=sw.Precision(compute="bfloat16"))
    engine = sw.parallelize(
        model, plan, optimizer=adamw, loss=lambda output, _: output.square().mean(), channel=channel
    )
    for _ in range(2):
        engine.step({"input": torch.ones(4, 256)})
    assert isinstance(channel, ProcessChannel)
    return channel.board.pool.num_slots


def test_gradients_and_parameters_are_read_in_place_and_never_staged(pool: Pool) -> None:
    """Staging slots are made when first needed: none were."""
    assert pool.run(2, staged_slots, transport=Transport(timeout_seconds=21.0)) == [0, 0]
