"""Plans of tensor parallelism: what rules come to, and every reason why not, without torch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan.outlines import Computes, TensorModule, TensorOutline
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_rules import RULES, read_rule, rule_problems
from tests.plan.strategies import proven
from tests.plan.texts import tensor_plan_from


def linear(
    name: str, outputs: int, inputs: int, *, has_bias: bool = True, computes: Computes = "linear"
) -> TensorModule:
    parameters = {"weight": f"{name}.weight"} | ({"bias": f"{name}.bias"} if has_bias else {})
    return TensorModule(name=name, kind="Linear", computes=computes, parameters=parameters)


def outline_of(
    *modules: TensorModule, carried: dict[str, str] | None = None, **shapes: tuple[int, ...]
) -> TensorOutline:
    """An outline with a model around the modules; names of parameters are written with __ for the dot."""
    return TensorOutline(
        modules=(TensorModule(name="", kind="Model"), *modules),
        shapes={name.replace("__", "."): shape for name, shape in shapes.items()},
        carried=carried or {},
    )


TWO = outline_of(
    linear("up", 33, 8),
    linear("down", 8, 33),
    up__weight=(33, 8),
    up__bias=(33,),
    down__weight=(8, 33),
    down__bias=(8,),
)


def attention(num_heads: int, groups: int, head_size: int = 4) -> TensorOutline:
    width = num_heads * head_size
    narrow = groups * head_size
    return outline_of(
        TensorModule(
            name="a",
            kind="Attention",
            numbers={"head_dim": head_size, "num_key_value_groups": num_heads // groups},
            configured={"num_attention_heads": num_heads, "num_key_value_heads": groups},
            parameters={"sinks": "a.sinks"},
        ),
        *(linear(f"a.{name}", size, 8, has_bias=False) for name, size in (("q", width), ("k", narrow))),
        linear("a.o", 8, width, has_bias=False),
        a__sinks=(num_heads,),
        a__q__weight=(width, 8),
        a__k__weight=(narrow, 8),
        a__o__weight=(8, width),
    )


HEADS = {"a.q": "column", "a.k": "column", "a.o": "row", "a.sinks": "column"}


def findings(outline: TensorOutline, rules: dict[str, str], num_ranks: int = 2) -> str:
    with pytest.raises(PlanError) as caught:
        plan_tensor(outline, rules, num_ranks=num_ranks)
    return str(caught.value)


def test_a_column_and_the_row_after_it_are_cut_alike_and_unevenly() -> None:
    plan = plan_tensor(TWO, {"up": "column", "down": "row"}, num_ranks=2)
    assert {name: portion.shape for name, portion in plan.portions(0).items()} == {
        "up.weight": (17, 8),
        "up.bias": (17,),
        "down.weight": (8, 17),
    }
    assert {name: portion.shape for name, portion in plan.portions(1).items()} == {
        "up.weight": (16, 8),
        "up.bias": (16,),
        "down.weight": (8, 16),
    }
    assert [style.kind for styles in plan.styles.values() for style in styles] == ["column", "row"]


def test_a_transposed_weight_is_cut_along_the_other_dim() -> None:
    outline = outline_of(linear("up", 6, 8, computes="transposed linear"), up__weight=(8, 6), up__bias=(6,))
    assert plan_tensor(outline, {"up": "column"}, num_ranks=2).portions(1)["up.weight"].shape == (8, 3)
    assert plan_tensor(outline, {"up": "row"}, num_ranks=2).portions(1)["up.weight"].shape == (4, 6)


def test_packed_parts_are_cut_each_for_itself() -> None:
    outline = outline_of(linear("up", 20, 8, has_bias=False), up__weight=(20, 8))
    assert plan_tensor(outline, {"up": "packed_colwise"}, num_ranks=2).cuts["up.weight"].ranges == (
        ((0, 5), (10, 15)),
        ((5, 10), (15, 20)),
    )
    plan = plan_tensor(outline, {"up": "column(parts=12+4+4, unit=2)"}, num_ranks=2)
    assert plan.cuts["up.weight"].ranges == (((0, 6), (12, 14), (16, 18)), ((6, 12), (14, 16), (18, 20)))


def test_heads_are_cut_in_groups() -> None:
    plan = plan_tensor(attention(12, 3), HEADS, num_ranks=2)
    assert plan.cuts["a.q.weight"].ranges == (((0, 32),), ((32, 48),))  # two groups of four heads, and one
    assert plan.cuts["a.k.weight"].ranges == (((0, 8),), ((8, 12),))
    assert plan.cuts["a.o.weight"].ranges == (((0, 32),), ((32, 48),))
    assert plan.cuts["a.sinks"].ranges == (((0, 8),), ((8, 12),))


def test_grouped_heads_fewer_than_ranks_are_refused_with_both_numbers() -> None:
    said = findings(attention(12, 3), HEADS, num_ranks=4)
    assert said.count("works with 3 key-value heads, which cannot be cut over 4 ranks") == 4
    assert "give mesh.tp at most 3" in said


def test_a_unit_beats_what_the_module_says_of_heads() -> None:
    plan = plan_tensor(attention(12, 3), {"a.q": "column(unit=4)"}, num_ranks=2)
    assert plan.cuts["a.q.weight"].ranges == (((0, 24),), ((24, 48),))


def test_a_module_may_count_the_heads_of_the_rank() -> None:
    outline = attention(12, 3)
    counting = TensorModule(name="a", kind="Attention", numbers={"num_heads": 12, "num_kv_heads": 3, "odd": 7})
    outline = TensorOutline(modules=(outline.modules[0], counting, *outline.modules[2:]), shapes=outline.shapes)
    rules = {name: rule for name, rule in HEADS.items() if name != "a.sinks"}
    (style,) = plan_tensor(outline, {**rules, "a": "heads"}, num_ranks=2).styles["a"]
    assert (style.attributes, style.size, style.ranges) == (("num_heads", "num_kv_heads"), 3, (((0, 2),), ((2, 3),)))
    assert "odd is no whole number, or none for each of 3" in findings(outline, {**rules, "a": "heads(attributes=odd)"})
    found = findings(TWO, {"up": "heads"})
    assert "none of the attributes that count heads" in found
    assert "heads(attributes=NAME, groups=N)" in found


TIED = outline_of(
    TensorModule(name="embedding", kind="Embedding", computes="embedding", parameters={"weight": "embedding.weight"}),
    TensorModule(name="head", kind="Linear", computes="linear", parameters={"weight": "embedding.weight"}),
    embedding__weight=(11, 8),
)


def test_a_tie_is_cut_alike_for_both_or_refused() -> None:
    plan = plan_tensor(TIED, {"embedding": "vocab", "head": "vocab"}, num_ranks=2)
    assert plan.cuts["embedding.weight"].ranges == (((0, 6),), ((6, 11),))
    assert {name: styles[0].kind for name, styles in plan.styles.items()} == {"embedding": "vocab", "head": "column"}
    assert "are one parameter (a tie). The first is cut along dim 0 at 6, the second is whole" in findings(
        TIED, {"embedding": "vocab"}
    )
    assert "the second is cut along dim 0 at 6" in findings(TIED, {"embedding": "embedding_colwise", "head": "column"})


def test_columns_of_an_embedding_may_stay_apart() -> None:
    plan = plan_tensor(TIED, {"embedding": "column", "head": "row"}, num_ranks=2)
    assert plan.cuts["embedding.weight"].dim == 1
    assert [style.gathers for styles in plan.styles.values() for style in styles] == [False, False]


def test_every_finding_is_told_at_once() -> None:
    said = findings(TWO, {"upp": "column", "up": "vocab", "down": "column(parts=3)", "up.bias": "sequence"})
    assert "'upp' means none of the" in said
    assert "the nearest name is 'up'" in said
    assert "'up' (Linear, vocab)" not in said  # a head may have the rule
    assert "'down' (column(parts=3)): 8 indices are not 3 equal parts" in said
    assert "'up.bias' (sequence): this rule is not for a bare parameter" in said


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"*p": "column", "u*": "row"}, "'up' is meant by '*p' (column) and 'u*' (row); give it one rule"),
        ({"up": "column", "up.weight": "row"}, "'up.weight' is cut by the rule of its module and in another way"),
        ({"up": "embedding_rowwise"}, "it is no embedding; a linear map is cut by 'column' or 'row'"),
        ({"up": "column(unit=2)"}, "33 indices are no whole number of units of 2"),
        ({"up": "column(unit=11)", "down": "replicate"}, "33 indices in units of 11 are 3 for 4 ranks"),
        ({"up": "column(dim=0)"}, "the setting dim is for bare parameters"),
        ({"up": "mla_kv_a_proj", "down": "row"}, "no module around it has qk_rope_head_dim"),
        ({"": "all_reduce"}, "but cuts no parameter in it"),
        ({"": "all_reduce", "up": "column"}, "'up' in it has a rule that sums already"),
        ({"up.weight": "row(dim=2)"}, "it has no dim 2, but (33, 8)"),
        ({"*": "replicate"}, "no rule cuts a parameter over the 4 ranks"),
        ({"*": "auto"}, "it carries none"),
        ({"": "column"}, "the model itself (Model, column): it is not a linear map"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_hold_is_refused(rules: dict[str, str], said: str) -> None:
    assert said in findings(TWO, rules, num_ranks=4)


def test_an_own_name_beats_a_glob_and_any_rule_beats_what_the_model_carries() -> None:
    outline = TensorOutline(
        modules=TWO.modules, shapes=TWO.shapes, carried={"up": "colwise_gather_output", "down": "rowwise_split_input"}
    )
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
    assert read_rule("sequence").dim == 1
    assert read_rule("sequence(dim=0)").dim == 0


def test_every_style_of_transformers_is_a_rule() -> None:
    tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    expert_parallel = {"grouped_gemm", "ep_dispatch_experts", "ep_router"}
    styles = set(tensor_parallel.ALL_PARALLEL_STYLES) - expert_parallel
    assert {"colwise", "moe_tp_experts"} <= styles
    assert {each for each in styles if not each.startswith(("ep_", "grouped"))} <= set(RULES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colum", "the rule 'colum' is unknown; the rules are column, row"),
        ("column(size=3)", "of the settings of 'column', it knows dim, gather, groups, parts, unit"),
        ("replicate(unit=1)", "it knows none"),
        ("column(unit=0)", "unit='0', which is no number from 1 on; write unit=1"),
        ("column(unit=1+2)", "unit='1+2'"),
        ("column(parts=)", "write parts=3, or parts=4096+1024+1024"),
        ("column(unit=2", "is unknown"),
    ],
)
def test_a_rule_that_nobody_knows_is_refused(text: str, said: str) -> None:
    (problem,) = rule_problems({"up": text, "down": "row"})
    assert problem.startswith("'up': ")
    assert said in problem


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
    outline = outline_of(linear("up", size, size), up__weight=(size, size), up__bias=(size,))
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
