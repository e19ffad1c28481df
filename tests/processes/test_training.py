"""Programs train over real processes to the bits of one process, over every transport; also through a relayout."""

import functools
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.comm.processes import ProcessChannel
from shardwise.errors import ModelError
from tests.oracle.comparison import assert_same, assert_trains_like_one_process
from tests.oracle.layouts import LAYOUTS
from tests.oracle.places import Processes, data_share, train
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS
from tests.processes.pool import SHARED_MEMORY, STRICT_DEVICE, TCP, Pool, Transport

TRANSPORTS = {"shared": SHARED_MEMORY, "tcp": TCP, "strict devices": STRICT_DEVICE}


@pytest.mark.parametrize(
    ("program", "layout", "transport"),
    [
        ("words", "two ranks, k=3, tiny buckets", "shared"),
        ("words", "three ranks, whole", "tcp"),
        ("words", "replicas, k=2", "shared"),
        ("words", "stage 0, k=2", "tcp"),
        ("words", "bfloat16, narrow sums", "shared"),
        ("units checkpointed", "stage 2, k=3", "shared"),
        ("units checkpointed", "stage 3, whole, k=2", "tcp"),
        ("units tied", "bfloat16, stage 3", "shared"),
        ("llama", "two stages", "shared"),
        ("u-net", "two stages, k=5", "tcp"),
        ("selecting", "two stages, interleaved", "shared"),
        ("turning", "two stages, k=5", "tcp"),
        ("u-net", "stages x data", "shared"),
        ("decoder", "tp x stages", "shared"),
        ("decoder", "tp x stage 3", "tcp"),
        ("words", "stage 2, k=3", "strict devices"),
        ("sharing", "stage 3, kept gathered", "strict devices"),
        ("chain", "four stages", "strict devices"),
        ("decoder", "stages x stage 3", "strict devices"),
    ],
)
def test_a_program_trains_in_processes_like_in_one(pool: Pool, program: str, layout: str, transport: str) -> None:
    plan = plan_of(PROGRAMS[program], **LAYOUTS[layout])
    assert_trains_like_one_process(PROGRAMS[program], plan, Processes(pool, TRANSPORTS[transport]))


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("layout", ["bfloat16, stage 3", "stages x stage 3"])
def test_averages_evaluations_and_predictions_between_updates_change_no_bit(
    pool: Pool, layout: str, transport: str
) -> None:
    program = PROGRAMS["units checkpointed"]
    plan = plan_of(program, **LAYOUTS[layout], average=sw.Average(decay=0.5))
    assert_same(train(program, plan, Processes(pool, TRANSPORTS[transport], between=True)), train(program, plan))


ROUND = ["pp=2,tp=2", "dp_shard=2,tp=2", "pp=2,dp_shard=2", "pp=2,tp=2"]

Moves = tuple[list[float], list[dict[sw.Piece, torch.Tensor]]]


def move(channel: Channel) -> Moves:
    """One update under each layout; the state after each move."""
    program = PROGRAMS["decoder with dropout"]
    losses: list[float] = []
    states = []
    engine: Any = None
    for stage, (mesh, batch) in enumerate(zip(ROUND, [*program.batches, *program.batches], strict=True)):
        plan = plan_of(program, mesh, stage=stage if "dp" in mesh else 1, k=2)
        before, engine = engine, program.engine(plan, channel, seed=3) if engine is None else sw.relayout(engine, plan)
        if before is not None:
            with pytest.raises(ModelError):
                before.step(batch)
        states.append({piece: tensor.clone() for piece, tensor in engine.state().items()})
        losses.append(engine.step(data_share(batch, plan.mesh, channel.rank)).loss)
    return losses, states


@functools.cache
def simulated_moves() -> list[Moves]:
    return sw.simulate(4, move)


@pytest.mark.parametrize(
    "transport", [SHARED_MEMORY, pytest.param(TCP, marks=pytest.mark.stress)], ids=["shared", "tcp"]
)
def test_a_relayout_between_processes_is_that_of_simulated_ranks(pool: Pool, transport: Transport) -> None:
    for (losses, states), (wanted, others) in zip(
        pool.run(4, move, transport=transport), simulated_moves(), strict=True
    ):
        assert losses == wanted
        for state, other in zip(states, others, strict=True):
            assert state.keys() == other.keys()
            assert all(torch.equal(tensor, other[piece]) for piece, tensor in state.items())


def staged_slots(channel: Channel) -> int:
    program = PROGRAMS["words"]
    plan = plan_of(program, "dp_shard=2", precision=sw.Precision(compute="bfloat16"))
    engine = program.engine(plan, channel)
    for batch in program.batches:
        engine.step(data_share(batch, plan.mesh, channel.rank))
    assert isinstance(channel, ProcessChannel)
    return channel.board.pool.num_slots


def test_gradients_and_parameters_are_read_in_place_and_never_staged(pool: Pool) -> None:
    """Staging slots are made when first needed: none were, by a channel of its own."""
    assert pool.run(2, staged_slots, transport=Transport(timeout_seconds=21.0)) == [0, 0]
