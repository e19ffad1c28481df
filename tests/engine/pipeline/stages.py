"""Until all have moved: `tests.oracle`, with the old arguments."""

from dataclasses import replace
from typing import Any

import shardwise as sw
from tests.oracle.comparison import assert_same, largest_difference
from tests.oracle.one_process import Trained, expected
from tests.oracle.places import OfRank, data_share, put_together, whole_state
from tests.oracle.places import train as train_at
from tests.oracle.places import train_on as train_rank
from tests.oracle.program import Optimizers, Program, plan_of

share_of = data_share

__all__ = [
    "assert_equals_one_process",
    "assert_same",
    "largest_difference",
    "plan_for",
    "put_together",
    "share_of",
    "train",
    "train_on",
    "whole_state",
]


def plan_for(
    case: Program,
    *,
    schedule: str = "1f1b",
    pp: int = 2,
    k: int = 1,
    chunks: int | None = None,
    mesh: sw.Mesh | None = None,
    **settings: Any,
) -> sw.Plan:
    """`plan_of` for `pp` stages, with the buckets of a user."""
    settings = {"sharding": sw.Sharding(), "clip": settings.pop("clip_grad_norm", None), **settings}
    return plan_of(case, mesh or sw.Mesh(pp=pp), k=k, schedule=schedule, chunks=chunks, **settings)


def train_on(channel: sw.Channel, case: Program, plan: sw.Plan, optimizer: Optimizers | None = None) -> OfRank:
    """One rank's part."""
    return train_rank(channel, replace(case, optimizer=optimizer or case.optimizer), plan)


def train(case: Program, plan: sw.Plan, optimizer: Optimizers | None = None) -> Trained:
    """The training on simulated ranks, put together."""
    return train_at(replace(case, optimizer=optimizer or case.optimizer), plan)


def assert_equals_one_process(case: Program, **layout: Any) -> None:
    """The pipeline trains to the bits that one process gives."""
    plan = plan_for(case, **layout)
    clip = plan.clip_grad_norm
    assert isinstance(clip, float | None)
    assert_same(train(case, plan), expected(case, plan.merge.microbatches, clip=clip))
