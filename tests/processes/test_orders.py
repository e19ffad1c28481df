"""Data ranks that gather and reduce in different orders (stage 3), where transfers wait for no comparison."""

from collections.abc import Sequence

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel, Work
from shardwise.comm.channel import Signature, all_gather_signature, reduce_scatter_signature
from shardwise.comm.processes import ProcessChannel, _lane
from shardwise.errors import CallMismatchError
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.test_backward import GoesOnAlone
from tests.engine.test_stage_orders import Swapping
from tests.engine.test_stages import adamw, plan_of
from tests.processes.pool import Pool, RankError


class ComparesLater(GoesOnAlone):
    """As the channel between GPUs: a signature that was seen before is compared while its transfer goes on."""

    def __init__(self, control: ProcessChannel) -> None:
        super().__init__(control)
        self._control = control
        self._known: set[Signature] = set()
        self._data = ProcessChannel(control._board, control.members)
        self._data._collectives = _lane(control.members, "data")

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return ComparesLater(self._control.subset(ranks)) if len(ranks) < self.size else self

    def share(self, num_bytes: int) -> None:
        return None

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        self._compare(all_gather_signature(self, output, input, purpose=purpose, counts=counts))
        return self._data.all_gather(output, input, purpose="data", counts=counts)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        self._compare(reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts))
        return self._data.reduce_scatter(output, input, purpose="data", counts=counts)

    def _compare(self, signature: Signature) -> None:
        work = self._control.compare(signature)
        if signature not in self._known:
            work.wait()
            self._known.add(signature)


def swap_on_one_rank(channel: Channel) -> None:
    """One of the ranks swaps two alike layers in the last step."""
    assert isinstance(channel, ProcessChannel)
    torch.manual_seed(0)
    engine = sw.parallelize(Swapping(), plan_of(3), optimizer=adamw, loss=word_loss, channel=ComparesLater(channel))
    share = share_of(word_batch(0, 8), channel.rank, channel.size)
    for first in (0, 1):  # both orders are known then
        share["words"][:, 0] = first
        engine.step(share)
    before = {piece: value.clone() for piece, value in engine.state().items()}
    share["words"][:, 0] = channel.rank
    try:
        engine.step(share)
    finally:
        assert all(torch.equal(value, before[piece]) for piece, value in engine.state().items())


def test_an_order_that_differs_is_known_before_the_update(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(2, swap_on_one_rank)
    assert sorted(caught.value.failures) == [0, 1]
    for failure in caught.value.failures.values():
        assert failure.kind == CallMismatchError.__name__
        assert "of unit 'layers." in failure.message
