"""Regions are the smallest modules in which every cut that begins ends."""

from collections.abc import Mapping

from shardwise.plan.tensor_plan import ParameterCut, Style, TensorPlan, regions_of

RANGES = (((0, 1),), ((1, 2),))
COLUMN: tuple[Style, ...] = (Style(kind="column", ranges=RANGES),)
ROW: tuple[Style, ...] = (Style(kind="row", ranges=RANGES),)
CUT = ParameterCut(shape=(2, 2), dim=0, ranges=RANGES)


def needed(styles: Mapping[str, tuple[Style, ...]], *bare: str) -> list[str]:
    held = {f"{name}.weight": CUT for name, each in styles.items() if each[0].kind in ("column", "row", "vocab")}
    plan = TensorPlan(num_ranks=2, cuts={**held, **dict.fromkeys(bare, CUT)}, styles=styles)
    return [region.name for region in regions_of(plan) if region.is_needed]


def test_a_region_inside_another_is_one_too() -> None:
    layer = {"layer.attention.q": COLUMN, "layer.attention.o": ROW, "layer.up": COLUMN, "layer.down": ROW}
    assert needed(layer) == ["layer", "layer.attention"]


def test_a_cut_that_ends_in_another_module_belongs_to_the_one_around_both() -> None:
    assert needed({"layer.first.up": COLUMN, "layer.second.last.down": ROW}) == ["layer"]
    assert needed({"up": COLUMN, "down": ROW}) == [""]


def test_what_brings_its_parts_together_itself_needs_no_region() -> None:
    gathered = (Style(kind="column", ranges=RANGES, gathers=True),)
    split = (Style(kind="row", ranges=RANGES, splits=True),)
    assert needed({"a.head": gathered, "a.map": split, "words": (Style(kind="vocab", ranges=RANGES),)}) == []


def test_a_head_that_stays_cut_is_looked_at_where_it_is_held_unless_that_is_the_model() -> None:
    block = {"block.up": COLUMN, "block.down": ROW}
    assert needed({**block, "head": COLUMN}) == ["block"]
    assert needed({**block, "top.head": COLUMN}) == ["block", "top"]


def test_bare_parameters_begin_a_cut_and_a_sum_ends_it() -> None:
    assert needed({"experts": (Style(kind="sum"),)}, "experts.gate", "experts.down") == ["experts"]
    assert needed({"mlp.down": ROW}, "mlp.act.alpha") == ["mlp"]
    assert needed({}, "experts.gate") == ["experts"]
    assert needed({"mlp.up": COLUMN, "mlp.down": ROW}, "mlp.act.alpha") == ["mlp"]


def test_modules_around_are_listed_from_the_outside_in_with_the_dims_of_positions() -> None:
    styles = {
        "a.b.up": (Style(kind="column", ranges=RANGES, gather=1),),
        "a.b.down": (Style(kind="row", ranges=RANGES, scatter=2),),
        "a.norm": (Style(kind="sequence", dim=1),),
    }
    plan = TensorPlan(num_ranks=2, cuts={"a.b.up.weight": CUT, "a.b.down.weight": CUT}, styles=styles)
    regions = regions_of(plan)
    assert [each.name for each in regions] == ["", "a", "a.b", "a.norm", "a.b.down", "a.b.up"]
    assert {each.name for each in regions if each.is_needed} == {"a.b", "a.norm"}
    dims = {each.name: each.dims for each in regions}
    assert dims["a.b"] == dims[""] == (1, 2)
    assert dims["a.norm"] == ()
