"""Rules of tensor parallelism that do not go together, without torch."""

import pytest

from shardwise.plan.outlines import TensorModule, TensorOutline
from shardwise.plan.tensor_cuts import plan_tensor
from tests.plan.test_tensor import TWO, findings, linear


def block() -> TensorOutline:
    """A block of two linear maps, and a norm beside them."""
    return TensorOutline(
        modules=(
            TensorModule(name="", kind="Model"),
            TensorModule(name="b", kind="Block"),
            linear("b.up", 8, 4),
            linear("b.down", 4, 8),
            TensorModule(name="norm", kind="Norm", parameters={"weight": "norm.weight"}),
        ),
        shapes={
            "b.up.weight": (8, 4),
            "b.up.bias": (8,),
            "b.down.weight": (4, 8),
            "b.down.bias": (4,),
            "norm.weight": (4,),
        },
    )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"up": "column", "down": "row", "down.bias": "once"}, "'down.bias' (once): the rule of its module adds it"),
        (
            {"up": "column", "down": "row", "down.bias": "column(dim=0)"},
            "'down.bias' (column(dim=0)): the rule of its module adds it whole, after the sum",
        ),
        ({"up": "column", "down": "row", "up.weight": "once"}, "'up.weight' (once): it is cut over the ranks"),
        ({"up": "column", "down.weight": "row"}, "'down.weight' (row): cut alone, it leaves 'down' (Linear) to give"),
        ({"up.weight": "column", "down": "row"}, "'up.weight' (column): cut alone, it leaves 'up' (Linear) to give"),
        (
            {"up": "column", "down.weight": "row", "down": "sum"},
            "'down' (Linear, sum): it computes one map from its parameters, and a bias would be summed too",
        ),
    ],
)
def test_rules_of_a_parameter_go_with_that_of_its_module(rules: dict[str, str], said: str) -> None:
    assert said in findings(TWO, rules)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"b.up": "column", "b.down": "row(scatter=1)"}, "'b.up' has the style 'column' inside of 'b'"),
        ({"b.up": "column(gather=1)", "b.down": "row"}, "'b.down' has the style 'row' inside of 'b'"),
        ({"b.up": "column(gather=0)", "b.down": "row(scatter=1)"}, "'b.up' has the style 'column' inside of 'b'"),
    ],
)
def test_positions_of_one_rank_do_not_meet_those_of_others(rules: dict[str, str], said: str) -> None:
    assert said in findings(block(), {"b": "sequence", **rules})


@pytest.mark.parametrize(
    "rules",
    [
        {"b": "sequence", "b.up": "column(gather=1)", "b.down": "row(scatter=1)"},
        {
            "b": "sum",
            "b.up.weight": "column",
            "b.up.bias": "column",
            "b.down.weight": "row",
            "b.down.bias": "once",
        },
        {"norm": "sequence", "b.up": "column", "b.down": "row", "b.down.bias": "row"},
    ],
)
def test_rules_that_go_together_are_taken(rules: dict[str, str]) -> None:
    assert "b.down.weight" in plan_tensor(block(), rules, num_ranks=2).cuts
