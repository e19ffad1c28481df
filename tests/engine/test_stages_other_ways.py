"""Stage 3 where values reach a loss, or parameters are read, by other ways than the outputs of modules."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import MismatchError, ModelError
from tests.engine.expected import adamw
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.ranks import assert_same_bits
from tests.engine.sharded_nets import BATCHES, net, plan_of
from tests.engine.stages import train_sharded

WIDTH = 4


class Block(nn.Module):
    """Keeps a loss of its own on itself, computed after its output from parameters that nothing else reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.aside: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x))
        match self.kind:
            case "multiplied":
                aside = x * self.scale
            case "module":
                aside = self.gate(x)
            case "module of a module":
                aside = self.norm(self.gate(x)) * self.scale
            case _:
                aside = self.gate.weight.square() * self.scale.exp()
        self.aside = aside.square().mean()
        return x


class Net(nn.Module):
    """The losses of the blocks go past all outputs of blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out, torch.stack([block.aside for block in self.blocks]).sum()  # type: ignore[misc]


def loss_with_aside(output: Any, batch: Any) -> torch.Tensor:
    logits, aside = output
    total: torch.Tensor = word_loss(logits, batch) + aside
    return total


@pytest.mark.parametrize("units", [None, ("blocks.*", "blocks.*.gate"), (".",)])
@pytest.mark.parametrize("kind", ["multiplied", "module", "module of a module", "parameters only"])
def test_values_that_modules_keep_get_the_gradients_of_stage_2(kind: str, units: tuple[str, ...] | None) -> None:
    if kind == "parameters only" and units is not None and len(units) == 2:
        units = ("blocks.*",)  # whose own forward reads the weight of its gate

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net(kind)

    ours = train_sharded(make, plan_of(3, k=2, units=units), BATCHES, optimizer=adamw, loss=loss_with_aside)
    first = train_sharded(make, plan_of(2, k=2), BATCHES, optimizer=adamw, loss=loss_with_aside)
    assert_same_bits(ours, first)
    assert (ours.losses, ours.grad_norms) == (first.losses, first.grad_norms)


def test_calls_of_the_model_past_the_engine_are_refused_at_any_time() -> None:
    def run(channel: sw.Channel) -> None:
        model = net("tied")()
        engine = sw.parallelize(model, plan_of(3), optimizer=adamw, loss=word_loss, channel=channel)
        words = BATCHES[0]["words"][:2]
        for _ in range(2):
            for module, value in ((model, words), (model.get_submodule("blocks.0"), torch.ones(2, 3, 6))):
                with pytest.raises(ModelError, match=r"called outside of step.*engine.predict\("):
                    module(value)
                with torch.no_grad(), pytest.raises(ModelError, match="called outside of step"):
                    module(value)
            engine.step(share_of(BATCHES[0], channel.rank, channel.size))
            engine.predict({"words": words}, lambda inputs: model(inputs["words"]))

    sw.simulate(2, run)


class Reader(nn.Module):
    """Its own forward reads a parameter of one of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.linear(x, self.embedding.weight)


class Sharing(nn.Module):
    """Blocks that have one layer between them."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    ("kind", "units"),
    [(Reader, (".",)), (Reader, (".", "blocks.*")), (Sharing, None), (Sharing, ("blocks.*", ".")), (Sharing, (".",))],
)
def test_the_model_itself_and_blocks_that_share_a_layer_are_units(
    kind: type[nn.Module], units: tuple[str, ...] | None
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    ours = train_sharded(make, plan_of(3, units=units), BATCHES, optimizer=adamw, loss=word_loss)
    assert_same_bits(ours, train_sharded(make, plan_of(2), BATCHES, optimizer=adamw, loss=word_loss))


class Experts(nn.Module):
    """Runs the experts that its words ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 11) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        expert = self.experts[int(words[0, 0])]
        out: torch.Tensor = expert(self.embedding(words))
        return out


def test_ranks_whose_data_choose_other_units_are_told_to_make_one_of_them() -> None:
    batch = word_batch(0, 8)

    def run(channel: sw.Channel, units: tuple[str, ...] | None) -> float:
        torch.manual_seed(0)
        share = share_of(batch, channel.rank, channel.size)
        share["words"] = share["words"].clone()
        share["words"][:, 0] = channel.rank
        engine = sw.parallelize(Experts(), plan_of(3, units=units), optimizer=adamw, loss=word_loss, channel=channel)
        return engine.step(share).loss

    with pytest.raises(MismatchError, match=r"(?s)unit 'experts.0'.*name one module around all of them in sharding.un"):
        sw.simulate(2, lambda channel: run(channel, None))
    first, second = sw.simulate(2, lambda channel: run(channel, (".",)))
    assert first == second


class Writer(nn.Module):
    """Writes to parameters in forward: what words ask for, or the same on all ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(11, WIDTH, max_norm=1.0 if kind == "max_norm" else None)
        self.head = nn.Linear(WIDTH, 11)
        self.slow = nn.Linear(WIDTH, 11).requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.kind == "clamped":
                self.head.weight.clamp_(-0.3, 0.3)
            if self.kind == "momentum" and self.training:
                self.slow.weight.lerp_(self.head.weight, 0.1)
        x = self.embedding(words)
        out: torch.Tensor = self.head(x) + self.slow(x)
        return out


def writer(kind: str, channel: sw.Channel, stage: int, compute: str | None = None) -> sw.Engine:
    torch.manual_seed(0)
    precision = sw.Precision(compute=compute)
    plan = plan_of(stage, ranks=channel.size, precision=precision)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return word_loss(output.float(), batch)

    return sw.parallelize(Writer(kind), plan, optimizer=adamw, loss=loss, channel=channel)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_forwards_write_otherwise_on_each_rank_are_refused(stage: int, evaluates: bool) -> None:
    def run(channel: sw.Channel) -> None:
        engine = writer("max_norm", channel, stage)
        share = share_of(BATCHES[0], channel.rank, channel.size)
        share["words"] = torch.full_like(share["words"], channel.rank)
        (engine.evaluate if evaluates else engine.step)(share)

    with pytest.raises(ModelError, match=r"a forward wrote to parameter 'embedding\.weight'.*ranks?"):
        sw.simulate(2, run)


def test_parameters_that_forwards_write_are_kept_where_nothing_is_lost() -> None:
    def trained(channel: sw.Channel, kind: str) -> tuple[list[float], torch.Tensor]:
        engine = writer(kind, channel, 1)
        losses = [engine.step(share_of(batch, channel.rank, channel.size)).loss for batch in BATCHES]
        return losses, dict(sw.full(engine, channel=channel))["slow.weight"].clone()

    for kind in ("clamped", "momentum"):  # alike on all ranks
        (alone, slow), *_ = sw.simulate(1, partial(trained, kind=kind))
        for losses, values in sw.simulate(2, partial(trained, kind=kind)):
            # Two halves of the batch, and so two sums of other orders.
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=2**-20, atol=0)
            torch.testing.assert_close(values, slow, rtol=2**-18, atol=2**-20)
    sw.simulate(1, lambda channel: trained(channel, "max_norm"))
    with pytest.raises(ModelError, match=r"'embedding\.weight'.*it is a cast of a master"):
        sw.simulate(1, lambda channel: writer("max_norm", channel, 1, "bfloat16").step(BATCHES[0]))
