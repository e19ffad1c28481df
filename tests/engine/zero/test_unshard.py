"""How often stage 3 gathers, and around what."""

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.oracle.batches import share_of
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS, on_words


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_unit_is_gathered_twice_per_microbatch_less_what_is_kept(keeps: bool, k: int) -> None:
    """Five units one after the other, and the model's own parameters, which stay all the while."""
    net = PROGRAMS["units"]
    plan = plan_of(net, "dp_shard=2", stage=3, k=k, keep_gathered=keeps, bucket_bytes=1 << 20)

    def run(channel: sw.Channel) -> int:
        recorded = sw.Recorded(channel)
        engine = net.engine(plan, recorded)
        recorded.clear()
        engine.step(share_of(net.batches[0], channel.rank, channel.size))
        return sum(call.purpose.startswith("parameters of unit") for call in recorded.calls)

    assert sw.simulate(2, run) == [1 + (5 if keeps else 2 * 5 * k - k - (k - 1))] * 2


def test_compiled_blocks_are_gathered_around_the_whole_compiled_call() -> None:
    def compiled() -> nn.Module:
        model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11))
        model[1].compile(backend="eager")
        return model

    torch.compiler.reset()
    batches = [{"input": each["words"], "targets": each["targets"]} for each in PROGRAMS["units"].batches]
    program = on_words(compiled, batches=batches)
    assert_trains_like_one_process(program, plan_of(program, "dp_shard=2", stage=3))
