"""Data ranks gather and reduce in one order under stage 3: those that do not are stopped before anything is updated."""

from collections.abc import Callable, Sequence

import pytest
import torch

import shardwise as sw
from shardwise.comm import Work
from shardwise.errors import CallMismatchError, MismatchError, ModelError, PeerError, ShardwiseError
from tests.engine.channels import GoesOnAlone
from tests.oracle.batches import share_of
from tests.oracle.by_other_ways import one_expert, swapping, twice
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS, count_targets, on_words

SWAPPING = on_words(swapping)


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


def own_first_word(channel: sw.Channel) -> dict[str, torch.Tensor]:
    """A share whose rows begin with the rank."""
    share = share_of(SWAPPING.batches[0], channel.rank, channel.size)
    share["words"] = share["words"].clone()
    share["words"][:, 0] = channel.rank
    return share


def errors_of(run: Callable[[sw.Channel], object], *, ranks: int) -> list[ShardwiseError]:
    """What every rank ends with."""

    def tried(channel: sw.Channel) -> ShardwiseError:
        with pytest.raises(ShardwiseError) as caught:
            run(channel)
        return caught.value

    return sw.simulate(ranks, tried)


@pytest.mark.parametrize("wrapped", [lambda channel: channel, GoesOnAlone], ids=["", "goes on alone"])
def test_ranks_that_run_their_modules_in_other_orders_are_stopped(wrapped: Callable[[sw.Channel], sw.Channel]) -> None:
    def run(channel: sw.Channel) -> None:
        engine = SWAPPING.engine(plan_of(SWAPPING, "dp_shard=2", stage=3), wrapped(channel))
        before = {piece: value.clone() for piece, value in engine.state().items()}
        try:
            engine.step(own_first_word(channel))
        finally:
            assert all(torch.equal(value, before[piece]) for piece, value in engine.state().items())

    for error in errors_of(run, ranks=2):
        assert isinstance(error, CallMismatchError)
        assert "unit 'layers." in str(error)


def test_ranks_that_tell_another_one_different_things_are_stopped() -> None:
    """The last rank has nothing to compute in the microbatch, and follows the others, which do not agree."""

    def run(channel: sw.Channel) -> None:
        plan = plan_of(SWAPPING, "dp_shard=3", stage=3)
        engine = SWAPPING.engine(plan, Trusting(channel), loss_weight=count_targets)
        share = own_first_word(channel)
        if channel.rank == 2:
            share["targets"] = torch.full_like(share["targets"], -100)
        engine.step(share)

    errors = errors_of(run, ranks=3)
    assert {type(error) for error in errors} == {CallMismatchError}
    assert str(errors[0]).splitlines()[:3] == [
        "data ranks go through a microbatch in different ways:",
        "  - rank 0: use unit 'layers.1' in forward",
        "  - rank 1: use unit 'layers.0' in forward",
    ]
    assert "name one module around all of them in sharding.units" in str(errors[0])


def test_ranks_whose_data_choose_other_units_are_told_to_make_one_of_them() -> None:
    program = on_words(one_expert)

    def run(channel: sw.Channel, units: tuple[str, ...] | None) -> float:
        engine = program.engine(plan_of(program, "dp_shard=2", stage=3, units=units), channel)
        return engine.step(own_first_word(channel)).loss

    with pytest.raises(MismatchError, match=r"(?s)unit 'experts.0'.*name one module around all of them in sharding.un"):
        sw.simulate(2, lambda channel: run(channel, None))
    first, second = sw.simulate(2, lambda channel: run(channel, (".",)))
    assert first == second


def test_a_prediction_of_one_data_rank_alone_is_an_error() -> None:
    program = PROGRAMS["units"]

    def run(channel: sw.Channel) -> None:
        engine = program.engine(plan_of(program, "dp_shard=2", stage=3), channel)
        share = share_of(program.batches[0], channel.rank, channel.size)
        engine.predict({"words": share["words"]}) if channel.rank == 0 else engine.step(share)

    for error in errors_of(run, ranks=2):
        assert isinstance(error, CallMismatchError)
        assert "exchange for 'parameters are written'" in str(error)


def test_a_gradient_that_comes_after_those_of_its_unit_is_told_with_the_unit() -> None:
    program = on_words(twice)

    def run(channel: sw.Channel) -> None:
        engine = program.engine(plan_of(program, "dp_shard=2", stage=3), channel)
        engine.step(share_of(program.batches[0], channel.rank, channel.size))

    errors = errors_of(run, ranks=2)
    told = [error for error in errors if isinstance(error, ModelError)]
    assert told
    assert all(isinstance(error, ModelError | PeerError) for error in errors)
    assert "once more, after the gradients of its unit 'layer' had been summed" in str(told[0])
    assert "name the module around all uses of the unit in sharding.units" in str(told[0])
