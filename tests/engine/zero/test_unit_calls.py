"""Stage 3 around the calls of modules: what is refused at any time, and what a save and a compiled call gather."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.oracle.batches import share_of
from tests.oracle.by_other_ways import Writer
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import Program, plan_of
from tests.oracle.programs import PROGRAMS, on_words

TIED = PROGRAMS["units tied"]


def test_calls_of_the_model_past_the_engine_are_refused_at_any_time() -> None:
    def run(channel: sw.Channel) -> None:
        engine = TIED.engine(plan_of(TIED, "dp_shard=2", stage=3), channel)
        model: Any = engine.model
        words = TIED.batches[0]["words"][:2]
        for _ in range(2):
            for module, value in ((model, words), (model.get_submodule("blocks.0"), torch.ones(2, 3, 6))):
                with pytest.raises(ModelError, match=r"called outside of step.*engine.predict\("):
                    module(value)
                with torch.no_grad(), pytest.raises(ModelError, match="called outside of step"):
                    module(value)
            engine.step(share_of(TIED.batches[0], channel.rank, channel.size))
            engine.predict({"words": words})

    sw.simulate(2, run)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_forwards_write_otherwise_on_each_rank_are_refused(stage: int, evaluates: bool) -> None:
    program = on_words(lambda: Writer("max_norm"))

    def run(channel: sw.Channel) -> None:
        engine = program.engine(plan_of(program, "dp_shard=2", stage=stage), channel)
        share = share_of(program.batches[0], channel.rank, channel.size)
        share["words"] = torch.full_like(share["words"], channel.rank)
        (engine.evaluate if evaluates else engine.step)(share)

    with pytest.raises(ModelError, match=r"a forward wrote to parameter 'embedding\.weight'.*ranks?"):
        sw.simulate(2, run)


def test_a_write_to_a_cast_is_refused_because_its_master_would_not_have_it() -> None:
    program = on_words(lambda: Writer("max_norm"))

    def run(channel: sw.Channel, compute: str | None) -> None:
        program.engine(plan_of(program, precision=sw.Precision(compute=compute)), channel).step(program.batches[0])

    sw.simulate(1, lambda channel: run(channel, None))
    with pytest.raises(ModelError, match=r"'embedding\.weight'.*it is a cast of a master"):
        sw.simulate(1, lambda channel: run(channel, "bfloat16"))


def test_saving_gathers_nothing(tmp_path: Any) -> None:
    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = TIED.engine(plan_of(TIED, "dp_shard=2", stage=3), recorded)
        engine.step(share_of(TIED.batches[0], channel.rank, channel.size))
        recorded.clear()
        engine.state()
        assert not recorded.calls
        sw.save(tmp_path / "saved", engine, channel=recorded)
        assert not [call for call in recorded.calls if call.operation in ("all_gather", "reduce_scatter")]

    sw.simulate(2, run)


def test_compiled_blocks_are_gathered_around_the_whole_compiled_call() -> None:
    def compiled() -> nn.Module:
        model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11))
        model[1].compile(backend="eager")
        return model

    torch.compiler.reset()
    batches = [{"input": each["words"], "targets": each["targets"]} for each in TIED.batches]
    program: Program = on_words(compiled, batches=batches)
    assert_trains_like_one_process(program, plan_of(program, "dp_shard=2", stage=3))
