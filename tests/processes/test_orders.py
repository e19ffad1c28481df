"""Data ranks that gather and reduce in different orders (stage 3), where transfers wait for no comparison."""

import pytest
import torch

from shardwise.comm import Channel
from shardwise.errors import CallMismatchError
from shardwise.testing import strict
from tests.oracle.batches import share_of
from tests.oracle.by_other_ways import swapping
from tests.oracle.program import plan_of
from tests.oracle.programs import on_words
from tests.processes.pool import STRICT_DEVICE, Pool, RankError


def swap_on_one_rank(channel: Channel) -> None:
    """One of the ranks swaps two alike layers in the last step."""
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
