"""Plans of tensor parallelism: what rules come to, and every reason why not, without torch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan.outlines import Computes, TensorModule, TensorOutline
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_rules import RULES, read_rule, rule_problems
from tests.plan.strategies import proven
from tests.plan.texts import tensor_plan_from
from tests.refusals import Refusals


def linear(name: str, *, has_bias: bool = True, computes: Computes = "linear") -> TensorModule:
    parameters = {"weight": f"{name}.weight"} | ({"bias": f"{name}.bias"} if has_bias else {})
    return TensorModule(name=name, kind="Linear", computes=computes, parameters=parameters)


def outline_of(*modules: TensorModule, **shapes: tuple[int, ...]) -> TensorOutline:
    """An outline with a model around the modules; names of parameters are written with __ for the dot."""
    return TensorOutline(
        modules=(TensorModule(name="", kind="Model"), *modules),
        shapes={name.replace("__", "."): shape for name, shape in shapes.items()},
    )


TWO = outline_of(
    *(linear("up"), linear("down")), up__weight=(33, 8), up__bias=(33,), down__weight=(8, 33), down__bias=(8,)
)
FUSED = outline_of(linear("up", has_bias=False), up__weight=(20, 8))
BLOCK = outline_of(
    *(TensorModule(name="b", kind="Block"), linear("b.up"), linear("b.down")),
    TensorModule(name="norm", kind="Norm", parameters={"weight": "norm.weight"}),
    **{"b.up.weight": (8, 4), "b.up.bias": (8,), "b.down.weight": (4, 8), "b.down.bias": (4,), "norm.weight": (4,)},
)
TIED = outline_of(
    TensorModule(name="embedding", kind="Embedding", computes="embedding", parameters={"weight": "embedding.weight"}),
    TensorModule(name="head", kind="Linear", computes="linear", parameters={"weight": "embedding.weight"}),
    embedding__weight=(11, 8),
)


def attention(**numbers: int) -> TensorOutline:
    """Twelve heads of four outputs in three groups; by the configuration, or by `numbers`."""
    if numbers:
        own: dict[str, Any] = {"numbers": numbers}
    else:
        own = {
            "numbers": {"head_dim": 4, "num_key_value_groups": 4},
            "configured": {"num_attention_heads": 12, "num_key_value_heads": 3},
            "parameters": {"sinks": "a.sinks"},
        }
    return outline_of(
        TensorModule(name="a", kind="Attention", **own),
        *(linear(f"a.{name}", has_bias=False) for name in "qko"),
        a__sinks=(12,),
        a__q__weight=(48, 8),
        a__k__weight=(12, 8),
        a__o__weight=(8, 48),
    )


MAPS = {"a.q": "column", "a.k": "column", "a.o": "row"}
HEADS = {**MAPS, "a.sinks": "column"}
COUNTED = attention(num_heads=12, num_kv_heads=3, odd=7)

CUT: dict[str, tuple[TensorOutline, dict[str, str], dict[str, Any]]] = {
    "a column and the row after it, unevenly": (
        *(TWO, {"up": "column", "down": "row"}),
        {
            **{"up.weight": (0, (((0, 17),), ((17, 33),))), "up.bias": (0, (((0, 17),), ((17, 33),)))},
            "down.weight": (1, (((0, 17),), ((17, 33),))),
        },
    ),
    "the other dim of a transposed column": (
        outline_of(linear("up", computes="transposed linear"), up__weight=(8, 6), up__bias=(6,)),
        {"up": "column"},
        {"up.weight": (1, (((0, 3),), ((3, 6),))), "up.bias": (0, (((0, 3),), ((3, 6),)))},
    ),
    "the other dim of a transposed row": (
        outline_of(linear("up", has_bias=False, computes="transposed linear"), up__weight=(8, 6)),
        *({"up": "row"}, {"up.weight": (0, (((0, 4),), ((4, 8),)))}),
    ),
    "packed": (
        *(FUSED, {"up": "packed_colwise"}),
        {"up.weight": (0, (((0, 5), (10, 15)), ((5, 10), (15, 20))))},
    ),
    "parts": (
        *(FUSED, {"up": "column(parts=12+4+4, unit=2)"}),
        {"up.weight": (0, (((0, 6), (12, 14), (16, 18)), ((6, 12), (14, 16), (18, 20))))},
    ),
    "groups of heads": (
        *(attention(), HEADS),
        {
            "a.q.weight": (0, (((0, 32),), ((32, 48),))),  # two groups of four heads, and one
            "a.k.weight": (0, (((0, 8),), ((8, 12),))),
            "a.o.weight": (1, (((0, 32),), ((32, 48),))),
            "a.sinks": (0, (((0, 8),), ((8, 12),))),
        },
    ),
    "a unit beats heads": (attention(), {"a.q": "column(unit=4)"}, {"a.q.weight": (0, (((0, 24),), ((24, 48),)))}),
    "a tie": (
        *(TIED, {"embedding": "vocab", "head": "vocab"}),
        {"embedding.weight": (0, (((0, 6),), ((6, 11),)))},
    ),
    "columns of an embedding": (
        *(TIED, {"embedding": "column", "head": "row"}),
        {"embedding.weight": (1, (((0, 4),), ((4, 8),)))},
    ),
    "bare parameters that are summed": (
        BLOCK,
        {
            **{"b": "sum", "b.up.weight": "column", "b.up.bias": "column"},
            **{"b.down.weight": "row", "b.down.bias": "once"},
        },
        {
            **{"b.up.weight": (0, (((0, 4),), ((4, 8),))), "b.up.bias": (0, (((0, 4),), ((4, 8),)))},
            "b.down.weight": (1, (((0, 4),), ((4, 8),))),
        },
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_rules_cut_parameters_along_a_dim_into_ranges_of_each_rank(case: str) -> None:
    outline, rules, wanted = CUT[case]
    cuts = plan_tensor(outline, rules, num_ranks=2).cuts
    assert {name: (cut.dim, cut.ranges) for name, cut in cuts.items()} == wanted


def test_a_module_may_count_the_heads_of_the_rank() -> None:
    (style,) = plan_tensor(COUNTED, {**MAPS, "a": "heads"}, num_ranks=2).styles["a"]
    assert (style.attributes, style.size, style.ranges) == (("num_heads", "num_kv_heads"), 3, (((0, 2),), ((2, 3),)))


def test_an_own_name_beats_a_glob_and_any_rule_beats_what_the_model_carries() -> None:
    carried_rules = {"up": "colwise_gather_output", "down": "rowwise_split_input"}
    outline = TensorOutline(modules=TWO.modules, shapes=TWO.shapes, carried=carried_rules)
    carried = plan_tensor(outline, "auto", num_ranks=2)
    assert carried == plan_tensor(outline, outline.carried, num_ranks=2)
    assert carried.styles["up"][0].gathers
    plan = plan_tensor(outline, {"*": "auto", "u*": "replicate", "up": "column"}, num_ranks=2)
    assert not plan.styles["up"][0].gathers
    assert plan.styles["down"][0].splits
    assert "down.weight" not in plan_tensor(outline, {"*": "auto", "down": "replicate"}, num_ranks=2).cuts
    assert list(plan_tensor(outline, {"up": "auto"}, num_ranks=2).styles) == ["up"]


def test_a_rule_is_read_with_its_settings() -> None:
    rule = read_rule(" column( parts = 8+2+2 , unit=2 ) ")
    assert (rule.kind, rule.parts, rule.unit) == ("column", (8, 2, 2), 2)
    assert (read_rule("sequence").dim, read_rule("sequence(dim=0)").dim) == (1, 0)


def test_every_style_of_transformers_is_a_rule() -> None:
    tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    expert_parallel = {"grouped_gemm", "ep_dispatch_experts", "ep_router"}
    styles = set(tensor_parallel.ALL_PARALLEL_STYLES) - expert_parallel
    assert {"colwise", "moe_tp_experts"} <= styles
    assert {each for each in styles if not each.startswith(("ep_", "grouped"))} <= set(RULES)


@proven
@given(
    num_ranks=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    unit=st.integers(1, 3),
    rule=st.sampled_from(["column", "row", "colwise_gather_output", "rowwise_split_input"]),
)
def test_cuts_cover_every_index_once_and_the_text_parses_back(
    num_ranks: int, sizes: list[int], unit: int, rule: str
) -> None:
    lengths = [(num_ranks + size) * unit for size in sizes]
    size = sum(lengths)
    outline = outline_of(linear("up"), up__weight=(size, size), up__bias=(size,))
    parts = f"parts={'+'.join(map(str, lengths))}, " if len(lengths) > 1 else ""
    plan = plan_tensor(outline, {"up": f"{rule}({parts}unit={unit})"}, num_ranks=num_ranks)
    for cut in plan.cuts.values():
        taken = [at for ranges in cut.ranges for start, stop in ranges for at in range(start, stop)]
        assert sorted(taken) == list(range(size))
        held = [sum(stop - start for start, stop in ranges) for ranges in cut.ranges]
        assert max(held) - min(held) <= unit * len(sizes)
        assert all(start % unit == 0 for ranges in cut.ranges for start, _ in ranges)
    assert tensor_plan_from(plan.text()) == plan
    assert tensor_plan_from(plan.text()).text() == plan.text()


def unread(*rules: str) -> None:
    raise PlanError(*(problem for rule in rules for problem in rule_problems({"up": rule, "down": "row"})))


UNREAD = ("colum", "column(size=3)", "replicate(unit=1)", "column(unit=0)", "column(unit=1+2)", "column(parts=)")
OF_TWO: Mapping[str, dict[str, str]] = {
    "a name of nothing, and more": {"upp": "column", "up": "vocab", "down": "column(parts=3)", "up.bias": "sequence"},
    "two globs": {"*p": "column", "u*": "row"},
    "a module and its parameter": {"up": "column", "up.weight": "row"},
    "no embedding": {"up": "embedding_rowwise"},
    "parts of a unit": {"up": "column(unit=2)"},
    "fewer units than ranks": {"up": "column(unit=11)", "down": "replicate"},
    "a dim of a module": {"up": "column(dim=0)"},
    "no compressed keys": {"up": "mla_kv_a_proj", "down": "row"},
    "a sum of nothing": {"": "all_reduce"},
    "a sum of a sum": {"": "all_reduce", "up": "column"},
    "a dim that is not there": {"up.weight": "row(dim=2)"},
    "nothing is cut": {"*": "replicate"},
    "nothing is carried": {"*": "auto"},
    "the model itself": {"": "column"},
    "no heads": {"up": "heads"},
    "a bias that is added once": {"up": "column", "down": "row", "down.bias": "once"},
    "a bias that is cut": {"up": "column", "down": "row", "down.bias": "column(dim=0)"},
    "a weight that counts once": {"up": "column", "down": "row", "up.weight": "once"},
    "a row alone": {"up": "column", "down.weight": "row"},
    "a column alone": {"up.weight": "column", "down": "row"},
    "a sum of a map": {"up": "column", "down.weight": "row", "down": "sum"},
}
OF_SEQUENCES = {
    "positions gathered nowhere": {"b.up": "column", "b.down": "row(scatter=1)"},
    "positions scattered nowhere": {"b.up": "column(gather=1)", "b.down": "row"},
    "another dim": {"b.up": "column(gather=0)", "b.down": "row(scatter=1)"},
}
REFUSED = Refusals(
    "plan.tensor_cuts",
    {
        **{case: partial(plan_tensor, TWO, rules, num_ranks=4) for case, rules in OF_TWO.items()},
        **{
            case: partial(plan_tensor, BLOCK, {"b": "sequence", **rules}, num_ranks=2)
            for case, rules in OF_SEQUENCES.items()
        },
        "rules in bad words": lambda: unread(*UNREAD, "column(unit=2"),
        "fewer groups than ranks": partial(plan_tensor, attention(), HEADS, num_ranks=4),
        "an odd number of heads": partial(plan_tensor, COUNTED, {**MAPS, "a": "heads(attributes=odd)"}, num_ranks=2),
        "half of a tie": partial(plan_tensor, TIED, {"embedding": "vocab"}, num_ranks=2),
        "a tie in two ways": partial(
            plan_tensor, TIED, {"embedding": "embedding_colwise", "head": "column"}, num_ranks=2
        ),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_rules_that_do_not_hold_are_refused(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize(
    "rules",
    [
        {"b": "sequence", "b.up": "column(gather=1)", "b.down": "row(scatter=1)"},
        {"norm": "sequence", "b.up": "column", "b.down": "row", "b.down.bias": "row"},
    ],
)
def test_rules_that_go_together_are_taken(rules: dict[str, str]) -> None:
    assert "b.down.weight" in plan_tensor(BLOCK, rules, num_ranks=2).cuts
