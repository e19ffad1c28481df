"""What an engine says of inputs: the same on all ranks, without a trace in the model."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardwise.comm import Channel, simulate
from shardwise.engine import parallelize
from shardwise.errors import ModelError
from shardwise.plan import Merge, Pipeline, Plan
from shardwise.space import Mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.relu(layer(x)))
        out: torch.Tensor = self.norm(x)
        return out


def built() -> Net:
    torch.manual_seed(2)
    net = Net()
    net.drop.eval()  # a mode of its own, which is to stay
    return net


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(mesh=Mesh(pp=2), merge=Merge(microbatches=2)),
        Plan(mesh=Mesh(pp=2, dp_shard=2)),
        Plan(mesh=Mesh(pp=2), pipeline=Pipeline(schedule="interleaved"), merge=Merge(microbatches=2)),
    ],
    ids=lambda plan: f"{plan.mesh} {plan.pipeline.schedule}",
)
def test_every_rank_gets_what_the_model_gives_in_evaluation_mode(plan: Plan) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    expected = built().eval()(x)[2:].detach()

    def on_rank(channel: Channel) -> tuple[torch.Tensor, torch.Tensor, list[bool], Any]:
        net = built()
        engine = parallelize(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), channel=channel, loss=square)
        told = engine.predict({"x": x}, lambda inputs: net(inputs["x"])[2:])
        nothing = engine.predict({"x": x}, lambda inputs: torch.zeros(0))
        engine.step({"x": x})
        return told, nothing, [module.training for module in net.modules()], engine.pipeline

    for told, nothing, modes, pipeline in simulate(plan.mesh.size, on_rank):
        assert torch.equal(told, expected)
        assert not told.requires_grad
        assert nothing.shape == (0,)
        assert modes == [module.training for module in built().modules()]
        assert (pipeline is None) == (plan.mesh.pp * plan.pipeline.num_chunks == 1)


def square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


TURN = {"x": torch.randn(5, 6, generator=torch.Generator().manual_seed(1))}


class Told(NamedTuple):
    last: torch.Tensor
    rows: int


class Telling(Net):
    """Gives what it computed on the way, nested."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = [x]
        for layer in self.layers:
            hidden.append(torch.relu(layer(hidden[-1])))
        return {"hidden": tuple(hidden), "told": Told(self.norm(hidden[-1]), len(x)), "weight": self.layers[0].weight}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2), Mesh(pp=4)], ids=str)
def test_any_nesting_of_tensors_comes_to_every_rank(mesh: Mesh) -> None:
    def make() -> Telling:
        torch.manual_seed(2)
        return Telling()

    wanted = make().eval()(TURN["x"])

    def on_rank(channel: Channel) -> tuple[Any, Any]:
        net = make()
        engine = parallelize(
            net, Plan(mesh=mesh), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), channel=channel, loss=square
        )
        named = engine.predict({**TURN, "label": 3}, lambda inputs: [net(inputs["x"])["hidden"][2], inputs["label"]])
        return engine.predict(TURN), named

    for output, named in simulate(mesh.size, on_rank):
        assert output.keys() == wanted.keys()
        assert type(output["told"]) is Told
        assert output["told"].rows == 5
        given = [*output["hidden"], output["told"].last, output["weight"], named[0]]
        expected = [*wanted["hidden"], wanted["told"].last, wanted["weight"], wanted["hidden"][2]]
        assert all(map(torch.equal, given, expected))
        assert named[1] == 3


class Kept:
    """An object that shardwise cannot look into."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Keeping(nn.Linear):
    def forward(self, x: torch.Tensor, kept: Any = None) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        kept.seen.append(out)
        return out


class KeepingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        kept, other = Kept(), Kept()
        for layer in self.layers:
            x = layer(x, kept=kept)
        return x, kept, other


def test_an_object_that_ranks_have_in_parts_is_none_in_a_prediction() -> None:
    def on_rank(channel: Channel) -> Any:
        plan = Plan(mesh=Mesh(pp=channel.size))
        engine = parallelize(
            KeepingNet(), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), channel=channel, loss=square
        )
        return engine.predict(TURN)

    torch.manual_seed(0)
    [(alone, kept, _)] = simulate(1, on_rank)
    assert len(kept.seen) == 4
    for output, kept, other in simulate(2, on_rank):
        assert output.shape == alone.shape
        assert kept is None
        assert type(other) is Kept


class Generating(Net):
    """Goes on by what it gave."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        while self(x).mean() < 0:
            x = x + 1
        return x


def built_to_generate(channel: Channel) -> tuple[Any, Any]:
    net: Any = Generating()
    return net, parallelize(
        net, Plan(mesh=Mesh(pp=2)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), channel=channel, loss=square
    )


def test_a_loop_that_looks_at_values_runs_around_predict() -> None:
    def on_rank(channel: Channel) -> float:
        net, engine = built_to_generate(channel)
        x = TURN["x"]
        while (mean := engine.predict({"x": x}, lambda inputs: net(inputs["x"]).mean())) < -1e-3:
            x = x + 1
        return float(mean)

    one, other = simulate(2, on_rank)
    assert one == other >= -1e-3


@pytest.mark.parametrize(
    "read",
    [lambda net, turn: net.generate(turn["x"]), lambda net, turn: net(turn["x"]).sum().item()],
    ids=["loop", "item"],
)
def test_a_prediction_may_read_values_of_stages(read: Any) -> None:
    torch.manual_seed(2)
    expected = read(Generating().eval(), TURN)

    def on_rank(channel: Channel) -> Any:
        torch.manual_seed(2)
        net, engine = built_to_generate(channel)
        return engine.predict(TURN, lambda turn: read(net, turn))

    for found in simulate(2, on_rank):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class GeneratingWithCache(KeepingNet):
    """Its loop keeps what layers gave, which other ranks have not."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        kept = Kept()
        for _ in range(2):
            for layer in self.layers:
                x = layer(x, kept=kept)
            if x.mean() > 100:
                break
        return x


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (
            lambda net, engine: engine.predict(TURN, lambda turn: net.generate(turn["x"])),
            "is given a Kept again, in a loop that reads values of a stage",
        ),
        (lambda net, engine: net.generate(TURN["x"]), "engine.generate(inputs) runs it over stages"),
    ],
    ids=["loop", "loop outside"],
)
def test_a_loop_with_a_cache_is_refused_with_a_way_that_works(body: Any, wanted: str) -> None:
    def run(channel: Channel) -> None:
        net: Any = GeneratingWithCache()
        plan = Plan(mesh=Mesh(pp=2))
        optimizer = partial(torch.optim.SGD, lr=0.1)
        body(net, parallelize(net, plan, optimizer=optimizer, channel=channel, loss=square))

    with pytest.raises(ModelError) as caught:
        simulate(2, run)
    assert wanted in str(caught.value)
