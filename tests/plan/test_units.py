"""Units: blocks are found by their repetition, all else by who holds it; and how often they are gathered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan import Outline
from shardwise.plan.gathers import Use, count_gathers, one_by_one
from shardwise.plan.units import Units, plan_units
from tests.costs import calls_in
from tests.plan.outlines import Tree, layers, model, trees
from tests.plan.strategies import names, proven
from tests.plan.texts import units_from

BLOCK: Tree = {"attention": {"q": 4, "k": 4}, "mlp": 8}
LLAMA: Tree = {"model": {"embed": 9, "layers[]": {"0": BLOCK, "1": BLOCK, "2": BLOCK}, "norm": 1}, "head": 9}


def firsts(outline: Outline) -> dict[str, str]:
    return {name: name for module in outline.modules() for name, _ in module.own_parameters}


def units_of(outline: Outline, **settings: object) -> dict[str, tuple[str, ...]]:
    first_names = {**firsts(outline), **settings.pop("ties", {})}  # type: ignore[dict-item]
    planned = plan_units(outline, first_names=first_names, **settings)  # type: ignore[arg-type]
    return {unit.name: unit.modules for unit in planned.units}


def own(*found: str) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in found}


def test_members_of_a_list_are_blocks_and_what_lies_around_is_gathered_apart() -> None:
    found = units_of(model(LLAMA))
    assert found == own("model.embed", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "head")


def test_finding_units_takes_four_times_as_many_calls_for_four_times_as_many() -> None:
    # Two outlines are compared with all that is in them: a search in a list takes the square.
    few, many = (model({"layers[]": {str(at): BLOCK for at in range(count)}}) for count in (30, 120))
    assert calls_in(lambda: units_of(many)) < 4.1 * calls_in(lambda: units_of(few))


def test_what_repeats_inside_of_a_block_is_no_block() -> None:
    block: Tree = {"experts[]": layers(3, 3), "a": 2}
    assert units_of(model({"layers[]": {"0": block, "1": block}})) == own("layers.0", "layers.1")


def test_towers_with_blocks_are_no_blocks_themselves() -> None:
    tower: Tree = {"block[]": {"0": BLOCK, "1": BLOCK}, "norm": 1}
    found = units_of(model({"encoder": tower, "decoder": tower}))
    assert list(found) == [
        *("encoder.block.0", "encoder.block.1", "encoder.norm"),
        *("decoder.block.0", "decoder.block.1", "decoder.norm"),
    ]


def test_blocks_that_are_attributes_are_found() -> None:
    assert units_of(model({"first": BLOCK, "second": BLOCK, ".scale": 1})) == own("", "first", "second")


def test_parameters_in_lists_belong_to_the_module_that_reads_them() -> None:
    assert units_of(model({"net": {"scales[]": {".0": 1, ".1": 1}, "linear": 3}})) == own("net", "net.linear")


def test_a_tie_belongs_to_its_first_place_and_is_gathered_for_the_others_too() -> None:
    found = units_of(
        model({"embed": 9, "layers[]": layers(2, 2), "head": {".weight": 0}}),
        ties={"head.weight": "embed.weight"},
    )
    assert found == {"embed": ("embed", "head"), **own("layers.0", "layers.1")}


def test_a_module_of_several_blocks_is_gathered_for_each_of_them() -> None:
    shared = Outline(
        name="b.0.l", kind="Linear", own_parameters=(("b.0.l.weight", 4),), aliases=("b.1.l", "b.2.inner.l")
    )
    inner = Outline(name="b.2.inner", kind="Inner")
    children = {"b.0": (shared,), "b.1": (), "b.2": (inner,)}
    blocks = tuple(
        Outline(name=name, kind="B", children=held, own_parameters=((f"{name}.w", 1),))
        for name, held in children.items()
    )
    whole = Outline(name="", kind="Net", children=(Outline(name="b", kind="List", is_container=True, children=blocks),))
    assert units_of(whole) == {"b.0": ("b.0", "b.1", "b.2"), **own("b.1", "b.2")}
    assert units_of(whole, patterns=["b.*", "b.*.l"]) == {"b.0": ("b.0",), **own("b.0.l", "b.1", "b.2")}


def test_torchs_own_modules_are_not_taken_apart() -> None:
    attention = Outline(
        name="attention",
        kind="MultiheadAttention",
        is_indivisible=True,
        children=(Outline(name="attention.out", kind="Linear", own_parameters=(("attention.out.weight", 4),)),),
        own_parameters=(("attention.in", 4),),
    )
    whole = Outline(name="", kind="Net", children=(attention,))
    assert units_of(whole) == own("attention")
    outer = Outline(
        name="", kind="Net", children=(attention, Outline(name="z", kind="Z", own_parameters=(("z.w", 1),)))
    )
    assert units_of(outer, patterns=["z"]) == own("attention", "z")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (
            ["model.layers.*"],
            ["model.embed", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "head"],
        ),
        (["model"], ["model", "head"]),
        (["."], [""]),
        ([".", "model.layers.*"], ["", "model.layers.0", "model.layers.1", "model.layers.2"]),
        (
            ["model.layers.0", "model.layers.0.mlp"],
            [
                *("model.embed", "model.layers.0", "model.layers.0.mlp"),
                *(f"model.layers.{at}.{part}" for at in (1, 2) for part in ("attention.q", "attention.k", "mlp")),
                *("model.norm", "head"),
            ],
        ),
    ],
)
def test_patterns_say_what_is_a_unit(patterns: list[str], expected: list[str]) -> None:
    assert list(units_of(model(LLAMA), patterns=patterns)) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("model.layer.*", "matches none of the 20 modules; the nearest module is 'model.layers"),
        ("model.layers", "without a call of its forward; name its modules \\('model.layers.\\*'\\)"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        units_of(model(LLAMA), patterns=[pattern])


def test_no_unit_reaches_beyond_a_stage() -> None:
    placed = ["model.embed", "model.layers.0", "model.layers.1.attention", "model.layers.1.mlp", "model.layers.2"]
    found = units_of(model(LLAMA), placed=placed)
    assert list(found) == [
        *("model.embed", "model.layers.0", "model.layers.1.attention", "model.layers.1.mlp", "model.layers.2"),
    ]


@proven
@given(trees)
def test_every_parameter_has_one_unit_that_holds_it(tree: Tree) -> None:
    outline = model(tree)
    planned = plan_units(outline, first_names=firsts(outline))
    found = [name for unit in planned.units for name in unit.parameters]
    assert sorted(found) == sorted(firsts(outline))
    for unit in planned.units:
        assert all(name.startswith(f"{unit.name}." if unit.name else "") for name in unit.parameters)
    assert units_from(planned.text()) == planned


@proven
@given(st.lists(st.tuples(names, st.lists(names, max_size=2), st.lists(names, min_size=1, max_size=2)), max_size=3))
def test_any_name_comes_back_from_the_text(drawn: list[tuple[str, list[str], list[str]]]) -> None:
    from shardwise.plan.units import Unit

    units = Units(units=tuple(Unit(name=a, modules=tuple(b), parameters=tuple(c)) for a, b, c in drawn))
    assert units_from(units.text()) == units


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_units_one_after_the_other_are_gathered_as_the_formula_says(n: int, k: int) -> None:
    found = count_gathers({0: one_by_one(n)}, [("F", 0), ("B", 0)] * k, keeps=False)
    assert sum(found.values()) == 2 * n * k - k - (k - 1)
    assert set(count_gathers({0: one_by_one(n)}, [("F", 0), ("B", 0)] * k, keeps=True).values()) == {1}
    ahead = count_gathers({0: one_by_one(n)}, [("F", 0), ("B", 0)] * k, keeps=False, ahead=True)
    assert sum(ahead.values()) == 2 * n * k - 2 * k - 2 * (k - 1)


def test_what_lies_around_others_stays_and_what_has_no_backward_is_gathered_once() -> None:
    nested = [Use(9, True), *one_by_one(3), Use(9, False)]
    found = count_gathers({0: nested}, [("F", 0), ("B", 0)], keeps=False)
    assert found == {9: 1, 0: 2, 1: 2, 2: 1}
    assert count_gathers({0: nested}, [("F", 0), ("B", 0)], keeps=False, backward={2, 9}) == {9: 1, 0: 1, 1: 1, 2: 1}


def test_stages_of_one_rank_take_turns() -> None:
    forward = {0: one_by_one(1), 2: [Use(5, True), Use(5, False)]}
    actions = [("F", 0), ("F", 2), ("B", 2), ("B", 0)]
    assert count_gathers(forward, actions, keeps=False) == {0: 2, 5: 1}
