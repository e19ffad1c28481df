"""The text form of plans: it parses back, and a bad text is refused with every problem."""

import tomllib

import pytest
from hypothesis import example, given

from shardwise.errors import PlanError
from shardwise.plan import Merge, Pipeline, Plan, Precision, Sharding
from shardwise.space import Mesh
from tests.plan.strategies import plans, proven


@proven
@given(plans)
@example(Plan(precision=Precision(keep=('say "norm"', "it's", "back\\slash", "new\nline\r\n", "\x00\x7f\x85\u2028"))))
@example(Plan(precision=Precision(keep=("\u03b1\u03b2", "\U0001f600", "", " ", "'''", '"""', "#", "a = 1", "[x]"))))
@example(Plan(clip_grad_norm=float("inf")))
@example(Plan(mesh=Mesh(pp=2), pipeline=Pipeline(stages={'"a" = 1, b': 1, "new\nline": 0, "": 0, "\U0001f600.[x]": 1})))
@example(Plan(clip_grad_norm=5e-324))
def test_text_form_parses_back(plan: Plan) -> None:
    assert Plan.parse(plan.text()) == plan


@proven
@given(plans)
def test_text_form_has_a_line_per_setting_and_is_toml(plan: Plan) -> None:
    lines = plan.text().splitlines()
    tables = tomllib.loads(plan.text())
    strategies = [name for name in tables if not name.startswith("clip_grad_")]
    assert len(lines) == len(tables) - len(strategies) + sum(len(tables[name]) for name in strategies)


@proven
@given(plans, plans)
def test_different_plans_have_different_texts(one: Plan, other: Plan) -> None:
    assert (one.text() == other.text()) == (one == other)


def test_text_form_is_toml_in_a_fixed_order() -> None:
    plan = Plan(mesh=Mesh(dp_shard=2), precision=Precision(compute="bfloat16", keep=("*norm*",)), clip_grad_norm=1)
    assert plan.text().splitlines()[:3] == ["clip_grad_norm = 1.0", "mesh.pp = 1", "mesh.dp_replicate = 1"]
    assert plan.text().splitlines()[-5:] == [
        'precision.keep = ["*norm*"]',
        'precision.sums = "exact"',
        'pipeline.schedule = "1f1b"',
        'pipeline.balance = "parameters"',
        "tensor.prove = true",
    ]
    placed = Plan(mesh=Mesh(pp=2), pipeline=Pipeline(stages={"lm_head": 1, "layers.*": 0}))
    assert 'pipeline.stages = {"layers.*" = 0, "lm_head" = 1}' in placed.text().splitlines()


def test_settings_left_out_take_their_defaults() -> None:
    assert Plan.parse("") == Plan()
    text = "clip_grad_norm = 2\n[mesh]\ndp_shard = 4\n[merge]\nmicrobatches = 3\n[sharding]\npartition = 'whole'\n"
    assert Plan.parse(text) == Plan(
        mesh=Mesh(dp_shard=4), merge=Merge(microbatches=3), sharding=Sharding(partition="whole"), clip_grad_norm=2.0
    )


def test_unknown_settings_are_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("clip_grad_nrom = 1\nshardign.stage = 1\n[mesh]\ndp_shrad = 2\n[merge]\nzzz = 1\n")
    assert list(caught.value.problems) == [
        "clip_grad_nrom: unknown setting; did you mean clip_grad_norm?",
        "shardign: unknown setting; did you mean sharding?",
        "mesh.dp_shrad: unknown setting; did you mean mesh.dp_shard?",
        "merge.zzz: unknown setting; known are merge.microbatches, merge.average",
    ]


def test_every_problem_of_a_text_is_listed_at_once() -> None:
    text = "merge = 4\nclip_grad_norm = -1\nmesh.tp = 0\nsharding = {stage = 7, stge = 1}\nprecision.keep = 'norm'\n"
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "merge: 4 is not a table of settings",
        "mesh axis tp has size 0",
        "sharding.stge: unknown setting",
        "sharding.stage: 7 asked",
        "precision.keep: 'norm' is not a tuple of names",
        "clip_grad_norm: -1 is not a number above 0",
    ]
    assert str(caught.value).startswith("6 problems:\n  - merge: 4 is")


def test_a_text_that_is_no_toml_is_refused_with_the_place() -> None:
    with pytest.raises(PlanError, match=r"the plan is not TOML: .*line 2"):
        Plan.parse("mesh.dp_shard = 2\nmesh.dp_shard = \n")
