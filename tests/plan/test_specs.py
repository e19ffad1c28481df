"""Specs: every problem of a bad one at once, in words that say what to do."""

from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.plan import Merge, Plan, Precision, Sharding
from shardwise.space import Mesh


def problems_of(kind: type, **settings: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        kind(**settings)
    return list(caught.value.problems)


def test_defaults_are_one_rank_stage_one_slices_of_64_mib_in_float32() -> None:
    plan = Plan()
    assert plan.mesh.size == 1
    assert plan.sharding == Sharding(stage=1, partition="slice", bucket_bytes=64 * 1024 * 1024, owners="all")
    assert plan.merge == Merge(microbatches=1, average=True)
    assert plan.precision == Precision(master="float32", accumulate="float32", reduce="float32", compute=None, keep=())
    assert plan.clip_grad_norm is None


def test_every_problem_of_a_sharding_is_listed() -> None:
    assert problems_of(Sharding, stage=2, partition="slices", bucket_bytes=0, owners="tp") == [
        "sharding.stage: 2 asked; this version has the stages 0 and 1",
        "sharding.partition: 'slices' is not one of 'slice', 'whole'",
        "sharding.owners: 'tp' is not one of 'all', 'dp_shard'",
        "sharding.bucket_bytes: 0 is not a whole number of at least 1",
    ]


@pytest.mark.parametrize("stage", [-1, 3, True, "1", None, 0.5])
def test_a_stage_that_is_neither_0_nor_1_is_refused(stage: object) -> None:
    assert problems_of(Sharding, stage=stage) == [
        f"sharding.stage: {stage!r} asked; this version has the stages 0 and 1"
    ]


@pytest.mark.parametrize("count", [0, -3, 1.0, True, "2", None])
def test_a_count_that_is_no_whole_number_of_at_least_one_is_refused(count: object) -> None:
    assert problems_of(Sharding, bucket_bytes=count) == [
        f"sharding.bucket_bytes: {count!r} is not a whole number of at least 1"
    ]
    assert problems_of(Merge, microbatches=count, average=1) == [
        f"merge.microbatches: {count!r} is not a whole number of at least 1",
        "merge.average: 1 is neither True nor False",
    ]


def test_every_problem_of_a_precision_is_listed() -> None:
    choices = "float16, bfloat16, float32, float64"
    assert problems_of(Precision, compute="bf16", master=None, accumulate="int8", reduce=32, keep="*norm*") == [
        f"precision.compute: 'bf16' is not one of {choices}",
        f"precision.master: None is not one of {choices}",
        f"precision.accumulate: 'int8' is not one of {choices}",
        f"precision.reduce: 32 is not one of {choices}",
        "precision.keep: '*norm*' is not a tuple of names; write keep=('*norm*',)",
    ]


@pytest.mark.parametrize("keep", ["norm", ("norm", 1), None, 5, {"norm": 1}])
def test_names_to_keep_that_are_no_tuple_of_strings_are_refused(keep: object) -> None:
    assert problems_of(Precision, keep=keep) == [
        f"precision.keep: {keep!r} is not a tuple of names; write keep=('*norm*',)"
    ]


def test_a_list_of_names_to_keep_becomes_a_tuple() -> None:
    assert Precision(keep=["*norm*"]) == Precision(keep=("*norm*",))  # type: ignore[arg-type]
    assert hash(Precision(keep=["*norm*"])) == hash(Precision(keep=("*norm*",)))  # type: ignore[arg-type]


def test_every_problem_of_a_plan_is_listed() -> None:
    assert problems_of(Plan, mesh="dp_shard=2", sharding=1, merge=4, precision="bf16", clip_grad_norm=0) == [
        "mesh: 'dp_shard=2' is not a Mesh",
        "sharding: 1 is not a Sharding",
        "merge: 4 is not a Merge",
        "precision: 'bf16' is not a Precision",
        "clip_grad_norm: 0 is not a number above 0; None switches clipping off",
    ]


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), True, "1.0"])
def test_a_clip_that_is_no_number_above_zero_is_refused(clip: object) -> None:
    assert problems_of(Plan, clip_grad_norm=clip) == [
        f"clip_grad_norm: {clip!r} is not a number above 0; None switches clipping off"
    ]


def test_axes_that_this_version_does_not_run_are_refused_by_name() -> None:
    assert problems_of(Plan, mesh=Mesh(pp=2, tp=4, dp_shard=2)) == [
        "mesh.pp=2: this version runs the axes dp_replicate and dp_shard; leave pp at 1",
        "mesh.tp=4: this version runs the axes dp_replicate and dp_shard; leave tp at 1",
    ]


def test_masters_are_cut_over_all_data_axes_unless_told_otherwise() -> None:
    both = ("dp_replicate", "dp_shard")
    assert (Sharding().owner_axes, Sharding().replica_axes) == (both, ())
    assert (Sharding(owners="dp_shard").owner_axes, Sharding(owners="dp_shard").replica_axes) == (
        ("dp_shard",),
        ("dp_replicate",),
    )
    for replicated in (Sharding(stage=0), Sharding(stage=0, owners="dp_shard")):
        assert (replicated.owner_axes, replicated.replica_axes) == ((), both)
