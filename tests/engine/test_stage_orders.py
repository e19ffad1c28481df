"""Data ranks gather and reduce in one order under stage 3: those that do not are stopped before anything is updated."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import Work
from shardwise.errors import CallMismatchError, ModelError, PeerError, ShardwiseError
from tests.engine.channels import GoesOnAlone
from tests.engine.expected import adamw
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.sharded_nets import BATCHES, net, plan_of


class Trusting(GoesOnAlone):
    """Moves tensors wherever the numbers of elements agree, and no rank can read what another has."""

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return Trusting(self._channel.over(ranks))

    def share(self, num_bytes: int) -> None:
        return None

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        return self._channel.all_gather(output, input, purpose="something", counts=counts)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        return self._channel.reduce_scatter(output, input, purpose="something", counts=counts)


class Swapping(nn.Module):
    """Runs two alike layers, one before the other by the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers if words[0, 0] % 2 else reversed(self.layers):
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def errors_of(run: Callable[[sw.Channel], object], *, ranks: int) -> list[ShardwiseError]:
    """What every rank ends with."""

    def tried(channel: sw.Channel) -> ShardwiseError:
        with pytest.raises(ShardwiseError) as caught:
            run(channel)
        return caught.value

    return sw.simulate(ranks, tried)


@pytest.mark.parametrize("wrapped", [lambda channel: channel, GoesOnAlone], ids=["", "goes on alone"])
def test_ranks_that_run_their_modules_in_other_orders_are_stopped(wrapped: Any) -> None:
    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        engine = sw.parallelize(Swapping(), plan_of(3), optimizer=adamw, loss=word_loss, channel=wrapped(channel))
        share = share_of(word_batch(0, 8), channel.rank, channel.size)
        share["words"][:, 0] = channel.rank
        before = {piece: value.clone() for piece, value in engine.state().items()}
        try:
            engine.step(share)
        finally:
            assert all(torch.equal(value, before[piece]) for piece, value in engine.state().items())

    for error in errors_of(run, ranks=2):
        assert isinstance(error, CallMismatchError)
        assert "unit 'layers." in str(error)


def test_ranks_that_tell_another_one_different_things_are_stopped() -> None:
    """The last rank has nothing to compute in the microbatch, and follows the others, which do not agree."""

    def loss_weight(batch: Mapping[str, Any]) -> float:
        return float((batch["targets"] != -100).sum())

    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        engine = sw.parallelize(
            Swapping(),
            plan_of(3, ranks=3),
            optimizer=adamw,
            loss=word_loss,
            loss_weight=loss_weight,
            channel=Trusting(channel),
        )
        share = share_of(word_batch(0, 6), channel.rank, channel.size)
        share["words"][:, 0] = channel.rank
        if channel.rank == 2:
            share["targets"][:] = -100
        engine.step(share)

    errors = errors_of(run, ranks=3)
    assert {type(error) for error in errors} == {CallMismatchError}
    assert str(errors[0]).splitlines()[:3] == [
        "data ranks go through a microbatch in different ways:",
        "  - rank 0: use unit 'layers.1' in forward",
        "  - rank 1: use unit 'layers.0' in forward",
    ]
    assert "name one module around all of them in sharding.units" in str(errors[0])


def test_a_prediction_of_one_data_rank_alone_is_an_error() -> None:
    def run(channel: sw.Channel) -> None:
        model = net()()
        engine = sw.parallelize(model, plan_of(3), optimizer=adamw, loss=word_loss, channel=channel)
        if channel.rank == 0:
            engine.predict({"words": BATCHES[0]["words"][:2]}, lambda inputs: model(inputs["words"]))
        else:
            engine.step(share_of(BATCHES[0], channel.rank, channel.size))

    for error in errors_of(run, ranks=2):
        assert isinstance(error, CallMismatchError)
        assert "exchange for 'parameters are written'" in str(error)


class Twice(nn.Module):
    """Calls a layer twice, and computes its activations again by a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        out: torch.Tensor = self.head(x)
        return out


def test_a_gradient_that_comes_after_those_of_its_unit_is_told_with_the_unit() -> None:
    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        engine = sw.parallelize(Twice(), plan_of(3), optimizer=adamw, loss=word_loss, channel=channel)
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))

    errors = errors_of(run, ranks=2)
    told = [error for error in errors if isinstance(error, ModelError)]
    assert told
    assert all(isinstance(error, ModelError | PeerError) for error in errors)
    assert "once more, after the gradients of its unit 'layer' had been summed" in str(told[0])
    assert "name the module around all uses of the unit in sharding.units" in str(told[0])
