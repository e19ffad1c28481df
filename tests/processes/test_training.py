"""Programs train over real processes to the bits of one process, over every transport."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.comm.process.channel import ProcessChannel
from shardwise.errors import CallMismatchError
from shardwise.testing import strict
from tests.engine.matrix_optimizers import deep
from tests.oracle.batches import share_of
from tests.oracle.by_other_ways import swapping
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.layouts import LAYOUTS
from tests.oracle.places import Processes, data_share
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS, on_words
from tests.processes.pool import SHARED_MEMORY, STRICT_DEVICE, TCP, Pool, RankError, Transport

TRANSPORTS = {"shared": SHARED_MEMORY, "tcp": TCP, "strict devices": STRICT_DEVICE}


@pytest.mark.parametrize(
    ("program", "layout", "transport"),
    [
        ("words", "two ranks, k=3, tiny buckets", "shared"),
        ("words", "three ranks, whole", "tcp"),
        ("words", "replicas, k=2", "shared"),
        ("units checkpointed", "stage 2, k=3", "shared"),
        ("units checkpointed", "stage 3, whole, k=2", "tcp"),
        ("units tied", "bfloat16, stage 3", "shared"),
        ("turning", "two stages, k=5", "tcp"),
        ("selecting", "two stages, interleaved", "shared"),
        ("u-net", "stages x data", "shared"),
        ("decoder", "tp x stages", "shared"),
        ("decoder", "tp x stage 3", "tcp"),
        ("words", "stage 2, k=3", "strict devices"),
        ("sharing", "stage 3, kept gathered", "strict devices"),
        ("chain", "four stages", "strict devices"),
    ],
)
def test_a_program_trains_in_processes_like_in_one(pool: Pool, program: str, layout: str, transport: str) -> None:
    plan = plan_of(PROGRAMS[program], **LAYOUTS[layout])
    assert_trains_like_one_process(PROGRAMS[program], plan, Processes(pool, TRANSPORTS[transport]))


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


def test_processes_that_share_memory_update_matrices_to_the_bits_of_messages(pool: Pool) -> None:
    """Simulated ranks share none. More rounds than shared memory has room for, by turns."""
    for mine, other in zip(pool.run(2, deep, transport=SHARED_MEMORY), sw.simulate(2, deep), strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(each, other[name]) for name, each in mine.items())


def swap_on_one_rank(channel: Channel) -> None:
    """One of the ranks swaps two alike layers in the last step (stage 3), where transfers wait for no comparison."""
    program = on_words(swapping)
    engine = program.engine(plan_of(program, "dp_shard=2", stage=3), channel)
    share = share_of(program.batches[0], channel.rank, channel.size)
    for first in (0, 1):  # both orders are known then
        share["words"][:, 0] = first
        engine.step(share)
    before = {piece: value.clone() for piece, value in engine.state().items()}
    share["words"][:, 0] = channel.rank
    try:
        with strict.hanging():  # the watch of the channel has to find it
            engine.step(share)
    finally:
        assert all(torch.equal(value, before[piece]) for piece, value in engine.state().items())


def test_an_order_that_differs_is_known_before_the_update(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(2, swap_on_one_rank, transport=STRICT_DEVICE)
    assert sorted(caught.value.failures) == [0, 1]
    for failure in caught.value.failures.values():
        assert failure.kind == CallMismatchError.__name__, failure.text
        assert "of unit 'layers." in failure.message
