"""An engine as the target of a stream: it computes with the trainer's weights, whatever both plans are."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PlanError
from tests.covering import covering
from tests.engine.expected import adamw, seeded
from tests.engine.refusals import same_error_everywhere


class Tied(nn.Module):
    """A tie and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6, bias=False)
        self.again = nn.Linear(6, 8, bias=False)
        self.again.weight = self.first.weight
        self.scale = nn.Buffer(torch.rand(1) + 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.again(self.second(torch.tanh(self.first(input))) * self.scale)
        return output[:, :6]


def plan(text: str, stage: int = 1, compute: Any = None) -> sw.Plan:
    return sw.Plan(mesh=sw.Mesh.parse(text), sharding=sw.Sharding(stage=stage), precision=sw.Precision(compute=compute))


def shifted() -> Tied:
    """Other values of the same model."""
    model = seeded(Tied)()
    with torch.no_grad():
        for each in (*model.parameters(), model.scale):
            each.add_(0.5)
    return model


def to_one(output: torch.Tensor, _: Any) -> torch.Tensor:
    loss: torch.Tensor = (output - 1).square().mean()
    return loss


TRAINERS = [plan("single"), plan("dp_shard=2", 3), plan("pp=2"), plan("dp_shard=2", 2, "bfloat16")]
RECEIVERS = [plan("single"), plan("dp_shard=2", 3), plan("pp=2", 0), plan("dp_shard=2", 1, "bfloat16")]
INPUT = torch.linspace(-1, 1, 24).view(4, 6)


@pytest.mark.parametrize(
    ("trainers", "receivers", "is_frozen", "is_apart"),
    covering(TRAINERS, RECEIVERS, (True, False), (True, False), strength=2),
    ids=lambda each: f"{each.mesh} {each.sharding.stage}" if isinstance(each, sw.Plan) else str(each),
)
def test_it_computes_with_the_weights_of_each_update(
    trainers: sw.Plan, receivers: sw.Plan, is_frozen: bool, is_apart: bool
) -> None:
    """On other ranks, or on the same ones."""
    first = trainers.mesh.size if is_apart else 0
    givers, takers = range(trainers.mesh.size), range(first, first + receivers.mesh.size)
    size = max(givers.stop, takers.stop)

    def run(world: sw.Channel) -> Any:
        source = target = last = None
        if world.rank in givers:
            source = sw.parallelize(seeded(Tied)(), trainers, optimizer=adamw, loss=to_one, channel=world.over(givers))
        if world.rank in takers:
            model = shifted().requires_grad_(not is_frozen)
            optimizer = None if is_frozen else adamw
            target = sw.parallelize(model, receivers, optimizer=optimizer, loss=to_one, channel=world.over(takers))
        told = []
        for step in range(3):
            if source is not None and step < 2:
                source.step({"input": INPUT + step + trainers.mesh.data_rank(world.rank)})
            last = sw.stream(source, target, channel=world, delta=True, last=last)
            held = [{} if each is None else dict(sw.full(each)) for each in (source, target)]
            weights = [{name: tensor.cpu() for name, tensor in each.items()} for each in held]
            output = None if target is None else target.predict({"input": INPUT}).cpu()
            told.append((last, *weights, output))
        return told

    ranks = sw.simulate(size, run)
    for step in range(3):
        report, given, *_ = ranks[0][step]
        _, _, taken, output = ranks[first][step]
        assert all(each[step][0] == report for each in ranks)
        assert taken.keys() == given.keys()
        # Of a trainer that computes in bfloat16 travels what it computes with; buffers are as they are.
        dtype = getattr(torch, trainers.precision.compute or "float32")
        computed = {name: each if name == "scale" else each.to(dtype) for name, each in given.items()}
        assert all(torch.equal(taken[name], computed[name].to(taken[name].dtype)) for name in taken)
        assert report.sent_bytes <= report.needed_bytes + 64 * size
        assert step < 2 or report.sent_bytes - 64 * size <= 0
        plain = seeded(Tied)()
        plain.load_state_dict({name: each.float() for name, each in taken.items()}, strict=False)
        exact = receivers.precision.compute is None
        assert torch.allclose(output.float(), plain(INPUT), atol=1e-6 if exact else 2e-2)


def test_a_receiver_that_trains_goes_on_from_the_weights() -> None:
    """Its master, moments and working copies are those of an engine that was built with these weights."""

    def run(world: sw.Channel, streams: bool) -> dict[str, torch.Tensor]:
        weights = shifted().state_dict()
        bf16 = plan("dp_shard=2", 1, "bfloat16")
        model = seeded(Tied)()
        if not streams:
            model.load_state_dict(weights)
        engine = sw.parallelize(model, bf16, optimizer=adamw, loss=to_one, channel=world)
        if streams:
            sw.stream(weights if world.rank == 0 else None, engine, channel=world)
        for _ in range(2):
            engine.step({"input": INPUT + world.rank})
        return {str(piece): tensor.clone() for piece, tensor in engine.state().items()}

    streamed, built = (sw.simulate(2, partial(run, streams=streams)) for streams in (True, False))
    for one, other in zip(streamed, built, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_without_an_engine_keeps_the_state_of_its_optimizer() -> None:
    def run(world: sw.Channel) -> None:
        model = seeded(Tied)()
        optimizer = adamw(list(model.parameters()))
        model(INPUT).mean().backward()
        optimizer.step()
        moments = [each["exp_avg"].clone() for each in optimizer.state.values()]
        target = sw.checkpoint.TorchState(model, optimizer)
        sw.stream(shifted().state_dict() if world.rank else None, None if world.rank else target, channel=world)
        assert world.rank or all(map(torch.equal, model.state_dict().values(), shifted().state_dict().values()))
        assert all(map(torch.equal, moments, (each["exp_avg"] for each in optimizer.state.values())))

    sw.simulate(2, run)


def test_what_is_no_target_is_refused_by_all() -> None:
    def run(world: sw.Channel, target: Any, *, inside: bool = False) -> None:
        averaged = sw.Plan(mesh=sw.Mesh(dp_shard=2), average=sw.Average(decay=0.5))
        engine = sw.parallelize(seeded(Tied)(), averaged, optimizer=adamw, loss=to_one, channel=world)
        weights = seeded(Tied)().state_dict()
        if inside:
            with engine.averaged():
                sw.stream(weights if world.rank else None, engine, channel=world)
        sw.stream(weights, target, channel=world)

    error = same_error_everywhere(2, lambda world: run(world, nn.Linear(2, 2)))
    assert isinstance(error, PlanError)
    assert "the target is a Linear; give an engine, or the tensors to fill, by Piece" in str(error)
    error = same_error_everywhere(2, lambda world: run(world, None, inside=True))
    assert isinstance(error, ModelError)
    assert "engine.averaged()" in str(error)
