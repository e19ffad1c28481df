"""Ranks along tp that compute other losses of the same samples are stopped, before anything is updated."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import MismatchError


def train(channel: sw.Channel, rules: dict[str, str], call: str, factor: float = 1.0) -> None:
    """`factor`: times the loss of the last rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    engine = sw.parallelize(
        model,
        sw.Plan(mesh=sw.Mesh(tp=channel.size), tensor=sw.Tensor(rules=rules)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, batch: output.square().mean() * (factor if channel.rank == channel.size - 1 else 1.0),
        channel=channel,
    )
    batch = {"x": torch.arange(8.0).view(2, 4)}
    held = {piece: tensor.clone() for piece, tensor in engine.state().items()}
    with pytest.raises(MismatchError, match=r"rank 0 and rank 1 are peers along tp .* tensor\.rules: .* sw\.verify"):
        getattr(engine, call)(batch)
    assert all(torch.equal(tensor, held[piece]) for piece, tensor in engine.state().items())


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_last_column_whose_parts_are_taken_for_the_whole_is_refused_on_all_ranks(call: str) -> None:
    sw.simulate(2, lambda channel: train(channel, {"2": "column"}, call))


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_loss_that_differs_in_its_last_bits_is_refused_on_all_ranks(call: str) -> None:
    sw.simulate(2, lambda channel: train(channel, {"0": "column", "2": "row"}, call, factor=1 + 2**-22))
