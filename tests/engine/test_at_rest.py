"""Parameters that are not gathered: what they tell, what they refuse, and who is told what to do about it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PlanError
from tests.engine.expected import adamw
from tests.engine.models import word_loss
from tests.engine.oracle import share_of
from tests.engine.sharded_nets import BATCHES, WIDTH, net, plan_of
from tests.engine.stages import values_of_all


def test_a_model_under_stage_3_changes_its_plan_by_relayout_only() -> None:
    def run(channel: sw.Channel) -> None:
        model = net("tied")()
        engine = sw.parallelize(model, plan_of(3), optimizer=adamw, loss=word_loss, channel=channel)
        share = share_of(BATCHES[0], channel.rank, channel.size)
        engine.step(share)
        with pytest.raises(ModelError, match=r"Change the plan with sw.relayout"):
            sw.parallelize(model, plan_of(1), optimizer=adamw, loss=word_loss, channel=channel)
        values = values_of_all(model, engine, channel)
        for stage in (1, 3, 3, 2):
            engine = sw.relayout(engine, plan_of(stage))
            for name, value in values_of_all(model, engine, channel).items():
                assert torch.equal(value, values[name]), (stage, name)
        engine.step(share)

    sw.simulate(2, run)


def test_what_is_not_gathered_tells_what_it_is_and_refuses_the_rest() -> None:
    def run(channel: sw.Channel) -> None:
        model = net()()
        engine = sw.parallelize(model, plan_of(3), optimizer=adamw, loss=word_loss, channel=channel)
        weight = model.blocks[0].up.weight  # type: ignore[union-attr, index]
        assert (weight.shape, weight.dtype, weight.numel()) == ((17, WIDTH), torch.float32, 102)
        assert weight.requires_grad
        assert weight.grad is None
        weight.grad = None
        assert isinstance(weight, nn.Parameter)
        assert "not gathered (unit 'blocks.0')" in repr(weight)
        for read in (
            lambda: weight + 1,
            lambda: weight.data,
            lambda: weight.tolist(),
            lambda: torch.stack([weight, weight]),
            lambda: model.blocks[0].up(torch.ones(WIDTH)),  # type: ignore[union-attr, index]
            lambda: weight.data.fill_(1),
            lambda: model.to(torch.float64),
        ):
            with pytest.raises(ModelError, match=r"of unit '.*', which is cut over ranks .* sharding.units"):
                read()
        with pytest.raises(ModelError, match=r"parts of it: '.*' is cut over ranks .* sw.save"):
            model.state_dict()
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))

    sw.simulate(2, run)


def test_a_parameter_may_be_read_past_its_unit() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 4)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.embedding(words) @ self.embedding.weight.T
            return out

    def run(channel: sw.Channel, units: tuple[str, ...] | None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Reads())
        engine = sw.parallelize(model, plan_of(3, units=units), optimizer=adamw, loss=word_loss, channel=channel)
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))

    for units in (None, ("0",), (".",), (".", "0.embedding")):
        sw.simulate(2, partial(run, units=units))


@pytest.mark.parametrize(
    "compiled", [lambda model: model.compile(backend="eager"), partial(torch.compile, backend="eager")]
)
def test_a_model_that_is_compiled_as_a_whole_is_refused_in_words_of_stage_3(
    compiled: Callable[[nn.Module], nn.Module | None],
) -> None:
    def run(channel: sw.Channel) -> None:
        model = net()()
        given = compiled(model)
        model = model if given is None else given
        sw.parallelize(model, plan_of(3), optimizer=adamw, loss=word_loss, channel=channel)

    with pytest.raises(
        ModelError, match=r"compiled as a whole, and stage 3, which .* cannot look inside. Compile the modul"
    ):
        sw.simulate(2, run)


def test_a_write_in_forward_is_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.bias.mul_(0.5)
            return super().forward(input)

    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        model = Writes(3, 3)
        engine = sw.parallelize(
            model, plan_of(3), optimizer=adamw, loss=lambda output, _: output.square().mean(), channel=channel
        )
        engine.step({"input": torch.ones(2, 3)})

    with pytest.raises(ModelError, match="a forward wrote to parameter 'bias': it is gathered for that forward only"):
        sw.simulate(2, run)


def test_units_that_match_nothing_are_refused_on_all_ranks() -> None:
    def run(channel: sw.Channel) -> None:
        sw.parallelize(net()(), plan_of(3, units=("block.*",)), optimizer=adamw, loss=word_loss, channel=channel)

    with pytest.raises(PlanError, match=r"'block.\*' matches none of the .* modules; the nearest module is 'blocks"):
        sw.simulate(2, run)
