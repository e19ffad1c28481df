"""Plans and their texts, which parse back; tests/golden has the order of lines and the defaults."""

import copy
import pickle
import tomllib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.plan import Activations, Merge, Pipeline, Plan, Precision, Sharding, split_rows
from shardwise.plan.schedules import make_schedule
from shardwise.space import Mesh
from tests.plan.strategies import plans, proven


@proven
@given(plans)
@example(Plan(precision=Precision(keep=('say "norm"', "it's", "back\\slash", "new\nline\r\n", "\x00\x7f\x85\u2028"))))
@example(Plan(precision=Precision(keep=("\u03b1\u03b2", "\U0001f600", "", " ", "'''", '"""', "#", "a = 1", "[x]"))))
@example(Plan(clip_grad_norm=float("inf")))
@example(Plan(mesh=Mesh(pp=2), pipeline=Pipeline(stages={'"a" = 1, b': 1, "new\nline": 0, "": 0, "\U0001f600.[x]": 1})))
@example(Plan(clip_grad_norm=5e-324))
def test_a_text_parses_back_and_has_a_line_per_setting(plan: Plan) -> None:
    assert Plan.parse(plan.text()) == plan
    assert hash(Plan.parse(plan.text())) == hash(plan)
    tables = tomllib.loads(plan.text())
    strategies = [name for name in tables if not name.startswith("clip_grad_")]
    num_settings = len(tables) - len(strategies) + sum(len(tables[name]) for name in strategies)
    assert len(plan.text().splitlines()) == num_settings


@proven
@given(plans, plans)
def test_different_plans_have_different_texts(one: Plan, other: Plan) -> None:
    assert (one.text() == other.text()) == (one == other)


def test_stages_stand_in_the_text_in_one_order() -> None:
    placed = Plan(mesh=Mesh(pp=2), pipeline=Pipeline(stages={"lm_head": 1, "layers.*": 0}))
    assert 'pipeline.stages = {"layers.*" = 0, "lm_head" = 1}' in placed.text().splitlines()


def test_settings_left_out_take_their_defaults() -> None:
    assert Plan.parse("") == Plan()
    text = "clip_grad_norm = 2\n[mesh]\ndp_shard = 4\n[merge]\nmicrobatches = 3\n[sharding]\npartition = 'whole'\n"
    assert Plan.parse(text) == Plan(
        mesh=Mesh(dp_shard=4), merge=Merge(microbatches=3), sharding=Sharding(partition="whole"), clip_grad_norm=2.0
    )


def test_a_list_of_names_becomes_a_tuple() -> None:
    listed: Any = ["layers.*"]
    for one, other in (
        (Precision(keep=listed), Precision(keep=("layers.*",))),
        (Sharding(stage=3, units=listed), Sharding(stage=3, units=("layers.*",))),
        (Activations(checkpoint=listed), Activations(checkpoint=("layers.*",))),
    ):
        assert one == other
        assert hash(one) == hash(other)


def test_the_number_of_chunks_follows_the_schedule_unless_given() -> None:
    written = make_schedule("interleaved", num_ranks=2, num_chunks=3, num_microbatches=4).text()
    pipelines = {
        1: [Pipeline(), Pipeline(schedule="fthenb"), Pipeline(schedule="interleaved", chunks=1)],
        2: [Pipeline(schedule="interleaved"), Pipeline(schedule="fthenb", chunks=2)],
        3: [Pipeline(schedule=written)],
    }
    for num_chunks, each in pipelines.items():
        assert [pipeline.num_chunks for pipeline in each] == [num_chunks] * len(each)


def test_stages_stay_as_they_were_when_given() -> None:
    stages = {"layers.0": 0, "head": 1}
    pipeline = Pipeline(stages=stages)
    stages["head"] = 0
    assert pipeline.stages == {"layers.0": 0, "head": 1}
    assert hash(pipeline) == hash(Pipeline(stages={"head": 1, "layers.0": 0}))
    assert pickle.loads(pickle.dumps(pipeline)) == copy.deepcopy(pipeline) == pipeline
    with pytest.raises(TypeError):
        pipeline.stages["head"] = 0  # type: ignore[index]


def test_masters_are_cut_over_all_data_axes_unless_told_otherwise() -> None:
    both = ("dp_replicate", "dp_shard")
    assert (Sharding().owner_axes, Sharding().replica_axes) == (both, ())
    by_shard = Sharding(owners="dp_shard")
    assert (by_shard.owner_axes, by_shard.replica_axes) == (("dp_shard",), ("dp_replicate",))
    for replicated in (Sharding(stage=0), Sharding(stage=0, owners="dp_shard")):
        assert (replicated.owner_axes, replicated.replica_axes) == ((), both)


@proven
@given(st.integers(0, 60), st.integers(1, 20))
def test_microbatches_hold_every_row_once_in_order_and_differ_by_one_at_most(num_rows: int, count: int) -> None:
    parts = split_rows(num_rows, count)
    assert len(parts) == count
    assert [row for part in parts for row in part] == list(range(num_rows))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
