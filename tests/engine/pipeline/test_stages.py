"""Which parameters are whose, what a rank lets go of, and what all ranks still know of the whole model."""

import gc
import weakref
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError
from tests.engine.formed import formed, linear
from tests.oracle.batches import points, square_loss
from tests.oracle.program import adamw, seeded


class Net(nn.Module):
    """Ties of two and three stages, a parameter outside of placed modules, a recurrent net, buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)])
        for block in self.blocks[1:]:
            block[0].bias = self.blocks[0][0].bias  # type: ignore[index]
        self.memory = nn.LSTM(6, 6, batch_first=True)
        self.scale = nn.Parameter(torch.ones(6))
        table, mask = torch.arange(6.0), torch.ones(6)
        self.register_buffer("table", table)
        self.blocks[0].register_buffer("table", table)
        self.blocks[1].register_buffer("mask", mask)
        self.blocks[2].register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.memory(self.blocks[1](self.blocks[0](self.embed(x)))[:, None])[0][:, 0]
        out: torch.Tensor = self.blocks[2](h * self.scale) + self.head(x)
        return out[:, :1]


STAGES = {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "memory": 1, "head": 2, "scale": 1}
HELD = {
    0: "embed head blocks.0 blocks.1.0.bias blocks.2.0.bias table",
    1: "blocks.1 memory scale blocks.0.0.bias blocks.2.0.bias blocks.2.mask table blocks.0.table",
    2: "blocks.2 embed head blocks.0.0.bias blocks.1.0.bias blocks.1.mask table blocks.0.table",
}
"""Prefixes of what each rank keeps: its stages, ties by any name, and buffers of the model itself."""
OWNED = {0: "embed blocks.0", 1: "blocks.1.0.weight blocks.1.1 memory scale", 2: "blocks.2.0.weight blocks.2.1"}
"""Ties are those of the first stage that has them."""


def begins(name: str, prefixes: str) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes.split())


def test_a_rank_keeps_what_its_stages_hold_and_not_a_byte_of_the_rest() -> None:
    """It optimizes what it owns."""

    def run(channel: sw.Channel) -> set[str]:
        model: Any = seeded(Net)()
        model.embed.weight.note = "kept"
        before = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
        parameters = {name: weakref.ref(each) for name, each in model.named_parameters()}
        engine = parallelized(channel, sw.Pipeline(stages=STAGES), model)
        gc.collect()
        for name, value in model.state_dict(keep_vars=True).items():
            assert value.is_meta is not begins(name, HELD[channel.rank]), name
            assert (value.shape, value.dtype) == (before[name].shape, before[name].dtype)
            assert value.requires_grad is isinstance(value, nn.Parameter)
            assert value.is_meta or torch.equal(value, before[name])
        alive = {name for name, reference in parameters.items() if reference() is not None}
        assert alive == {name for name in parameters if begins(name, HELD[channel.rank])}  # lists of the LSTM let go
        assert model.embed.weight is model.head.weight
        assert model.get_buffer("blocks.1.mask") is model.get_buffer("blocks.2.mask")
        assert model.embed.weight.note == "kept", "notes of the user stay, also on what is elsewhere"
        engine.step(points(0, 4))
        owned = {name for name in parameters if begins(name, OWNED[channel.rank])}
        elements = sum(before[name].numel() for name in owned)
        [group] = engine.optimizer.param_groups
        assert engine.footprint().owned_elements == sum(each.numel() for each in group["params"]) == elements
        assert engine.settings()["optimizers"][0]["groups"][0]["parameters"] == list(parameters)
        assert {piece.name for piece in engine.state()} >= {*owned, *(f"optimizer/{each}/exp_avg" for each in owned)}
        return {piece.name for piece in engine.state() if piece.name in parameters}

    held = sw.simulate(3, run)
    assert sorted(chain(*held)) == sorted(name for name, _ in Net().named_parameters())


def three_layers() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 1)))()


TWO = sw.Pipeline(stages={"0": 0, "1": 1, "2": 1})


def parallelized(channel: sw.Channel, pipeline: sw.Pipeline = TWO, model: Any = None, **settings: Any) -> sw.Engine:
    mesh = sw.Mesh(pp=channel.size) if channel.size < 4 else sw.Mesh(pp=2, dp_shard=2)
    model = model or three_layers()
    plan = sw.Plan(mesh=mesh, pipeline=pipeline if channel.size > 1 else sw.Pipeline())
    return sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel, **settings)


def test_a_rank_that_trains_nothing_takes_part_and_data_ranks_have_batches_of_their_own() -> None:
    def run(channel: sw.Channel) -> tuple[float, float, float]:
        model = three_layers()
        model[0].requires_grad_(False)
        engine = parallelized(channel, model=model)
        report = engine.step(points(channel.rank % 2 if channel.size == 4 else 0, 3))
        assert channel.size == 4 or engine.footprint().owned_elements == (0 if channel.rank == 0 else 49)
        return report.loss, report.grad_norm, report.weight

    for size, weight in ((2, 3.0), (4, 6.0)):
        first, *others = sw.simulate(size, run)
        assert first[2] == weight
        assert all(other == first for other in others)


@pytest.mark.parametrize("balance", ["parameters", "flops", "seconds"])
def test_a_sample_tells_the_order_in_which_modules_are_cut_and_moves_nothing(balance: Any) -> None:
    """The layers are registered in another order than that in which they are called. Rank 0 measures."""
    last_first = formed(
        lambda net, x: net.last(torch.tanh(net.middle(net.first(x)))),
        **{"last": linear(6, 1), "middle": linear(6, 6), "first": linear(4, 6)},
    )

    def run(channel: sw.Channel, sample: Any) -> tuple[set[str], float]:
        engine = parallelized(channel, sw.Pipeline(balance=balance), seeded(last_first)(), sample=sample)
        return {piece.name.split(".")[0] for piece in engine.state()}, engine.step(points(0, 4)).loss

    (first, loss), (second, other) = sw.simulate(2, lambda channel: run(channel, points(1, 4)))
    assert "first" in first
    assert first.isdisjoint(second)
    assert loss == other
    if balance == "parameters":
        assert "last" in sw.simulate(2, lambda channel: run(channel, None))[0][0], "control: by registration"


# -- buffers that several stages have


def write(net: Any, x: torch.Tensor) -> Any:
    if net.training and net.writes:
        net.shared += x.detach().mean(0)
    return net.linear(x) + net.shared


def counting(net: Any, x: torch.Tensor) -> Any:
    """A count between the stages, and a buffer that two stages have and one writes to."""
    net.count += 1
    return net.last(torch.tanh(net.first(x)))[:, :1]


def put_buffers(net: Any) -> None:
    net.first.writes = True
    net.last.shared = net.first.shared
    net.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_buffers_that_several_stages_have_stay_equal() -> None:
    part = formed(
        write,
        lambda net: net.register_buffer("shared", torch.zeros(4)),
        linear=lambda: nn.Linear(4, 4),
        writes=lambda: False,
    )

    def run(channel: sw.Channel) -> list[dict[str, torch.Tensor]]:
        model = seeded(formed(counting, put_buffers, first=part, last=part))()
        engine = parallelized(channel, sw.Pipeline(stages={"first": 0, "last": 1}), model)
        seen = []
        for step in range(2):
            engine.step(points(step, 4))
            seen.append({name: each.clone() for name, each in model.named_buffers()})
        return seen

    first, last = sw.simulate(2, run)
    for one, other in zip(first, last, strict=True):
        assert one.keys() == other.keys() == {"count", "first.shared"}
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert first[1]["count"] == 2
    assert torch.equal(first[0]["first.shared"], points(0, 4)["x"].mean(0))


# -- checkpoints of random numbers


def test_settings_without_random_numbers_are_taken_and_damaged_ones_refused() -> None:
    def run(channel: sw.Channel) -> None:
        engine = parallelized(channel, seed=5)
        engine.step(points(0, 4))
        stored = {piece.name: piece for piece in engine.state()}
        settings = dict(engine.settings())
        assert settings["random"] == {"seed": 5, "step": 1}
        restoration = engine.restore(stored, {key: each for key, each in settings.items() if key != "random"})
        assert not restoration.findings
        restoration.finish()
        assert engine.settings()["random"] == {"seed": 5, "step": 1}
        engine.restore(stored, {**settings, "random": {"seed": 9, "step": 4}}).finish()
        assert engine.settings()["random"] == {"seed": 9, "step": 4}
        for damaged in (3, {"seed": 1}, {"seed": "1", "step": 2}, [1, 2]):
            with pytest.raises(CheckpointError, match="random="):
                engine.restore(stored, {**settings, "random": damaged})

    sw.simulate(1, run)
