"""Regions are the smallest modules in which every cut that begins ends; what they cost grows as the modules."""

import pytest

from shardwise.plan.outlines import TensorModule, TensorOutline
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_plan import ParameterCut, Style, TensorPlan, regions_of
from tests.costs import calls_in

RANGES = (((0, 1),), ((1, 2),))
COLUMN, ROW, VOCAB, GATHERED, SPLIT, SUM = (
    (Style(kind=kind, ranges=RANGES, **settings),)  # type: ignore[arg-type]
    for kind, settings in (
        *(("column", {}), ("row", {}), ("vocab", {}), ("column", {"gathers": True}), ("row", {"splits": True})),
        ("sum", {}),
    )
)
CUT = ParameterCut(shape=(2, 2), dim=0, ranges=RANGES)
LAYER: dict[str, tuple[Style, ...]] = {
    "layer.attention.q": COLUMN,
    "layer.attention.o": ROW,
    "layer.up": COLUMN,
    "layer.down": ROW,
}
BLOCK: dict[str, tuple[Style, ...]] = {"block.up": COLUMN, "block.down": ROW}

NEEDED: dict[str, tuple[dict[str, tuple[Style, ...]], list[str], list[str]]] = {
    "a region inside another": (LAYER, [], ["layer", "layer.attention"]),
    "a cut that ends in another module": ({"layer.first.up": COLUMN, "layer.second.last.down": ROW}, [], ["layer"]),
    "the model": ({"up": COLUMN, "down": ROW}, [], [""]),
    "what brings its parts together itself": ({"a.head": GATHERED, "a.map": SPLIT, "words": VOCAB}, [], []),
    "a head that stays cut": ({**BLOCK, "head": COLUMN}, [], ["block"]),
    "a head that stays cut in a module": ({**BLOCK, "top.head": COLUMN}, [], ["block", "top"]),
    "bare parameters and a sum": ({"experts": SUM}, ["experts.gate", "experts.down"], ["experts"]),
    "a bare parameter before a row": ({"mlp.down": ROW}, ["mlp.act.alpha"], ["mlp"]),
    "a bare parameter alone": ({}, ["experts.gate"], ["experts"]),
    "a bare parameter between": ({"mlp.up": COLUMN, "mlp.down": ROW}, ["mlp.act.alpha"], ["mlp"]),
}


@pytest.mark.parametrize("case", NEEDED)
def test_a_region_is_the_smallest_module_in_which_what_begins_ends(case: str) -> None:
    styles, bare, wanted = NEEDED[case]
    held = {f"{name}.weight": CUT for name, each in styles.items() if each[0].kind in ("column", "row", "vocab")}
    plan = TensorPlan(num_ranks=2, cuts={**held, **dict.fromkeys(bare, CUT)}, styles=styles)
    assert [region.name for region in regions_of(plan) if region.is_needed] == wanted


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
    for region in regions:
        inside = [each for each in styles if not region.name or f"{each}.".startswith(f"{region.name}.")]
        assert list(region.styles) == inside


def experts(count: int, extra: str) -> TensorOutline:
    """A mixture; each expert has a rule of its own too, or its parts alone."""
    modules = [TensorModule(name="", kind="Model"), TensorModule(name="experts", kind="ModuleList")]
    shapes: dict[str, tuple[int, ...]] = {}
    carried: dict[str, str] = {}
    for at in range(count):
        around = f"experts.{at}"
        modules.append(TensorModule(name=around, kind="Expert"))
        carried |= {around: extra} if extra else {}
        for name, shape, rule in (("up", (8, 4), "colwise"), ("down", (4, 8), "rowwise")):
            weight = f"{around}.{name}.weight"
            shapes[weight] = shape
            modules.append(
                TensorModule(name=f"{around}.{name}", kind="Linear", computes="linear", parameters={"weight": weight})
            )
            carried |= {f"{around}.{name}": rule} if extra != "sequence" else {}
    if extra == "sequence":
        carried |= {"experts.0.up": "column(gather=1)", "experts.0.down": "row(scatter=1)"}
    return TensorOutline(modules=tuple(modules), shapes=shapes, carried=carried)


@pytest.mark.parametrize("extra", ["", "replicate", "sequence"])
def test_the_plan_of_many_experts_costs_as_many_times_more(extra: str) -> None:
    def calls(count: int) -> int:
        outline = experts(count, extra)
        given_names = list(outline.carried)[1::3] if extra == "replicate" else []
        rules = {"*": "auto", **dict.fromkeys(given_names, "column")}
        return calls_in(lambda: regions_of(plan_tensor(outline, rules, num_ranks=2)))

    assert calls(160) < 1.3 * 4 * calls(40)
