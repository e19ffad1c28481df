"""Data ranks that gather and reduce in different orders (stage 3), where transfers wait for no comparison."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.errors import CallMismatchError
from shardwise.testing import strict
from tests.engine.expected import adamw
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.sharded_nets import plan_of
from tests.engine.test_stage_orders import Swapping
from tests.processes.pool import STRICT_DEVICE, Pool, RankError


def swap_on_one_rank(channel: Channel) -> None:
    """One of the ranks swaps two alike layers in the last step."""
    torch.manual_seed(0)
    engine = sw.parallelize(Swapping(), plan_of(3), optimizer=adamw, loss=word_loss, channel=channel)
    share = share_of(word_batch(0, 8), channel.rank, channel.size)
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
