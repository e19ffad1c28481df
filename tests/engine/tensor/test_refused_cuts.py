"""Rules that do not fit a model are refused with all findings at once, on all ranks alike; the model stays as it is."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.engine.refusals import same_error_everywhere
from tests.oracle.decoder import RULES
from tests.oracle.programs import PROGRAMS
from tests.refusals import Refusals

PROGRAM = PROGRAMS["decoder"]

RULED: Mapping[str, tuple[str, Any]] = {
    "a name of nothing": ("pp=2,dp_shard=2,tp=2", {"layers.*": "column"}),
    "no plan to carry": ("pp=2,dp_shard=2,tp=2", "auto"),
    "half of a tie": ("pp=2,dp_shard=2,tp=2", {"embedding": "vocab"}),
    "several findings": ("tp=4", {**RULES, "nothing": "row"}),
}


def refused(mesh: str, rules: Any) -> None:
    """On all ranks; raises what all said."""
    plan = sw.Plan(mesh=sw.Mesh.parse(mesh), tensor=sw.Tensor(rules=rules))

    def run(channel: sw.Channel) -> None:
        model = PROGRAM.make()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        try:
            sw.parallelize(model, plan, optimizer=PROGRAM.optimizer, loss=PROGRAM.loss, channel=channel)
        except ShardwiseError:
            after = dict(model.named_parameters())
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], value) for name, value in before.items()), "the model is as it was"
            assert torch.isfinite(PROGRAM.loss_of(model, PROGRAM.batches[0]))
            raise

    raise same_error_everywhere(plan.mesh.size, run)


REFUSED = Refusals("engine.tensor_cuts", {case: partial(refused, *given) for case, given in RULED.items()})


@pytest.mark.parametrize("case", REFUSED)
def test_rules_that_do_not_fit_are_refused(case: str) -> None:
    REFUSED.check(case)
