"""Random numbers depend on the seed, the update, the microbatch and the call, never on where a module is computed.

That layouts give the masks of one rank is in `tests/oracle`: its programs with dropout. Here is what may change a mask.
"""

from dataclasses import replace

import pytest
import torch

import shardwise as sw
from tests.oracle.one_process import Trained
from tests.oracle.places import train
from tests.oracle.program import Program, plan_of
from tests.oracle.programs import PROGRAMS

DROPPING = PROGRAMS["dropout"]


def trained(program: Program, *, k: int = 2) -> Trained:
    """On two stages."""
    return train(program, plan_of(program, "pp=2", k=k))


def test_another_seed_gives_other_masks_and_the_same_one_the_same() -> None:
    def losses(seed: int) -> list[float]:
        def run(channel: sw.Channel) -> list[float]:
            engine = DROPPING.engine(plan_of(DROPPING, "pp=2", k=2), channel, seed=seed)
            return [engine.step(batch).loss for batch in DROPPING.batches]

        return sw.simulate(2, run)[0]

    assert losses(7) == losses(7)
    assert losses(7)[0] != losses(8)[0]


@pytest.mark.parametrize(("name", "num_different"), [("chain", 1), ("dropout", 3)])
def test_updates_and_microbatches_draw_masks_of_their_own(name: str, num_different: int) -> None:
    """The same row in every microbatch and update; a net without dropout has one loss for all."""
    row = {key: value[:1] for key, value in DROPPING.batches[0].items()}
    twice = {key: value.expand(2, -1) for key, value in row.items()}
    still = replace(PROGRAMS[name], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    first, second = trained(replace(still, batches=[row, row]), k=1).losses
    [both] = trained(replace(still, batches=[twice])).losses
    assert len({first, second, both}) == num_different


@pytest.mark.parametrize("num_evaluations", [0, 2])
def test_evaluations_draw_alike_and_change_no_later_mask(num_evaluations: int) -> None:
    first, other, last = DROPPING.batches

    def run(channel: sw.Channel) -> list[float]:
        engine = DROPPING.engine(plan_of(DROPPING, "pp=2"), channel)
        losses = [engine.step(first).loss]
        assert len({engine.evaluate(other).loss for _ in range(num_evaluations)}) == min(num_evaluations, 1)
        return [*losses, engine.step(last).loss]

    assert sw.simulate(2, run) == [trained(replace(DROPPING, batches=[first, last]), k=1).losses] * 2
