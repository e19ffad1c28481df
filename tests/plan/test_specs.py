"""Specs: every problem of a bad one at once, in words that say what to do."""

import copy
import pickle
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.plan import Merge, Pipeline, Plan, Precision, Sharding, Tensor
from shardwise.plan.schedules import make_schedule
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
    assert plan.pipeline == Pipeline(schedule="1f1b", stages=None, chunks=None, balance="parameters")


def test_every_problem_of_a_sharding_is_listed() -> None:
    assert problems_of(Sharding, stage=4, partition="slices", bucket_bytes=0, owners="tp") == [
        "sharding.stage: 4 asked; the stages are 0, 1, 2 and 3",
        "sharding.partition: 'slices' is not one of 'slice', 'whole'",
        "sharding.owners: 'tp' is not one of 'all', 'dp_shard'",
        "sharding.bucket_bytes: 0 is not a whole number of at least 1",
    ]


@pytest.mark.parametrize("stage", [-1, 4, True, "1", None, 0.5])
def test_an_unknown_stage_is_refused(stage: object) -> None:
    assert problems_of(Sharding, stage=stage) == [f"sharding.stage: {stage!r} asked; the stages are 0, 1, 2 and 3"]


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
    assert problems_of(
        Plan, mesh="dp_shard=2", sharding=1, merge=4, precision="bf16", pipeline=2, clip_grad_norm=0
    ) == [
        "mesh: 'dp_shard=2' is not a Mesh",
        "sharding: 1 is not a Sharding",
        "merge: 4 is not a Merge",
        "precision: 'bf16' is not a Precision",
        "pipeline: 2 is not a Pipeline",
        "clip_grad_norm: 0 is not a number above 0; None switches clipping off",
    ]


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), True, "1.0"])
def test_a_clip_that_is_no_number_above_zero_is_refused(clip: object) -> None:
    assert problems_of(Plan, clip_grad_norm=clip) == [
        f"clip_grad_norm: {clip!r} is not a number above 0; None switches clipping off"
    ]


@pytest.mark.parametrize("rules", [5, ["a"], {1: "column"}, {"a": 1}, "all"])
def test_rules_that_are_no_mapping_of_names_are_refused(rules: object) -> None:
    assert problems_of(Tensor, rules=rules) == [
        f'tensor.rules: {rules!r} is neither "auto" nor a mapping of names to rules; write '
        "rules={'layers.*.up': 'column'}"
    ]


def test_a_plan_with_rules_has_a_text_that_parses_back_and_a_hash() -> None:
    plan = Plan(mesh=Mesh(tp=2), tensor=Tensor(rules={"layers.*.up": "column", 'odd "name"': "row"}))
    assert Plan.parse(plan.text()) == plan
    assert hash(Plan.parse(plan.text())) == hash(plan)


def test_units_and_keeping_are_for_stage_3() -> None:
    findings = problems_of(Sharding, stage=2, units=("a",), keep_gathered=True)
    assert [each.split(",")[0] for each in findings] == [
        "sharding.units: given with stage 2",
        "sharding.keep_gathered: given with stage 2",
    ]
    assert problems_of(Sharding, stage=3, units=()) == [
        "sharding.units: () is not a tuple of names of modules; write units=('layers.*',)"
    ]
    from_a_list: Any = ["layers.*"]
    plan = Plan(sharding=Sharding(stage=3, units=from_a_list, keep_gathered=True))
    assert plan.sharding.units == ("layers.*",)
    assert Plan.parse(plan.text()) == plan


def test_offload_is_of_state_or_at_stage_3_of_parameters() -> None:
    assert problems_of(Sharding, offload="optimizer") == [
        "sharding.offload: 'optimizer' is not one of 'state', 'parameters'"
    ]
    [finding] = problems_of(Sharding, stage=2, offload="parameters")
    assert finding.startswith("sharding.offload: 'parameters' asked with stage 2, ")
    assert "offload" not in Plan().text()
    for stage, offload in ((0, "state"), (3, "parameters")):
        plan = Plan(sharding=Sharding(stage=stage, offload=offload))  # type: ignore[arg-type]
        assert f'sharding.offload = "{offload}"\n' in plan.text()
        assert Plan.parse(plan.text()) == plan


def test_every_problem_of_a_pipeline_is_listed() -> None:
    assert problems_of(Pipeline, schedule="gpipe", chunks=0, balance="time", stages={"a": -1, "b": True, "c": 0}) == [
        "pipeline.schedule: 'gpipe' is not one of 'fthenb', '1f1b', 'interleaved', nor the text of a schedule",
        "pipeline.chunks: 0 is not a whole number of at least 1",
        "pipeline.balance: 'time' is not one of 'parameters', 'flops', 'seconds'",
        "pipeline.stages: 'a' is given -1, which is not a whole number of at least 0",
        "pipeline.stages: 'b' is given True, which is not a whole number of at least 0",
    ]


@pytest.mark.parametrize("stages", [5, ["a"], {1: 0}, "a"])
def test_stages_that_are_no_mapping_of_names_are_refused(stages: object) -> None:
    assert problems_of(Pipeline, stages=stages) == [
        f"pipeline.stages: {stages!r} is not a mapping of names to stages; write stages={{'layers.0': 0}}"
    ]


def test_settings_of_a_pipeline_that_contradict_each_other_are_refused() -> None:
    assert problems_of(Pipeline, chunks=2, stages={"a": 0}, balance="flops") == [
        "pipeline.chunks: 2 asked of the schedule '1f1b', which runs one stage per rank; 'interleaved' runs several",
        "pipeline.balance: 'flops' asked, but pipeline.stages gives each module its stage; leave one of them out",
    ]
    assert problems_of(Pipeline, stages={}) == [
        "pipeline.stages: places no module; leave it out for a balanced placement"
    ]


def test_a_stage_that_no_rank_of_the_mesh_has_is_refused() -> None:
    pipeline = Pipeline(schedule="fthenb", chunks=2, stages={"a": 0, "b": 3, "c": 4})
    assert Plan(mesh=Mesh(pp=4), pipeline=pipeline).pipeline is pipeline
    assert problems_of(Plan, mesh=Mesh(pp=2), pipeline=pipeline) == [
        "pipeline.stages: 'c' is given stage 4, but pp=2 with 2 stages per rank has the stages 0 to 3"
    ]


def test_the_number_of_chunks_follows_the_schedule_unless_given() -> None:
    written = make_schedule("interleaved", num_ranks=2, num_chunks=3, num_microbatches=4).text()
    pipelines = {
        1: [Pipeline(), Pipeline(schedule="fthenb"), Pipeline(schedule="interleaved", chunks=1)],
        2: [Pipeline(schedule="interleaved"), Pipeline(schedule="fthenb", chunks=2)],
        3: [Pipeline(schedule=written)],
    }
    for num_chunks, each in pipelines.items():
        assert [pipeline.num_chunks for pipeline in each] == [num_chunks] * len(each)
    assert Plan(pipeline=Pipeline(schedule="interleaved")).mesh.pp == 1  # all stages on one rank


def test_a_written_schedule_that_cannot_be_read_is_refused_with_its_problems() -> None:
    problems = problems_of(Pipeline, schedule="own: 2 stages, 2 ranks, 1 microbatch\nrank 0: F0.0 X\n")
    assert all(problem.startswith("pipeline.schedule") for problem in problems)
    assert len(problems) == 2


def test_stages_stay_as_they_were_when_given() -> None:
    stages = {"layers.0": 0, "head": 1}
    pipeline = Pipeline(stages=stages)
    stages["head"] = 0
    assert pipeline.stages == {"layers.0": 0, "head": 1}
    assert pipeline == Pipeline(stages={"head": 1, "layers.0": 0})
    assert hash(pipeline) == hash(Pipeline(stages={"head": 1, "layers.0": 0}))
    assert pickle.loads(pickle.dumps(pipeline)) == copy.deepcopy(pipeline) == pipeline
    with pytest.raises(TypeError):
        pipeline.stages["head"] = 0  # type: ignore[index]


def test_masters_are_cut_over_all_data_axes_unless_told_otherwise() -> None:
    both = ("dp_replicate", "dp_shard")
    assert (Sharding().owner_axes, Sharding().replica_axes) == (both, ())
    assert (Sharding(owners="dp_shard").owner_axes, Sharding(owners="dp_shard").replica_axes) == (
        ("dp_shard",),
        ("dp_replicate",),
    )
    for replicated in (Sharding(stage=0), Sharding(stage=0, owners="dp_shard")):
        assert (replicated.owner_axes, replicated.replica_axes) == ((), both)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"clip_grad_value": 0}, "clip_grad_value: 0 is not a number above 0; None switches clipping off"),
        ({"clip_grad_norm": {}}, "clip_grad_norm: names nothing to clip; leave it out, and nothing is clipped"),
        ({"clip_grad_norm": {"a": -1}}, "clip_grad_norm: 'a' is given -1, which is not a number above 0"),
    ],
)
def test_clips_of_parts_and_by_value_are_numbers_above_zero(settings: Any, problem: str) -> None:
    assert problems_of(Plan, **settings) == [problem]
