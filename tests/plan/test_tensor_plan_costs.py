"""What the plan of a large mixture of experts costs: in proportion to its modules."""

import pytest

from shardwise.plan.outlines import TensorModule, TensorOutline
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_plan import regions_of
from tests.costs import calls_in

FEW, MANY = 40, 160


def outline(num_experts: int, extra: str) -> TensorOutline:
    modules = [TensorModule(name="", kind="Model"), TensorModule(name="experts", kind="ModuleList")]
    shapes, carried = {}, {}
    for at in range(num_experts):
        around = f"experts.{at}"
        modules.append(TensorModule(name=around, kind="Expert"))
        if extra:
            carried[around] = extra
        for name, shape, rule in (("up", (8, 4), "colwise"), ("down", (4, 8), "rowwise")):
            weight = f"{around}.{name}.weight"
            shapes[weight] = shape
            modules.append(
                TensorModule(name=f"{around}.{name}", kind="Linear", computes="linear", parameters={"weight": weight})
            )
            if extra != "sequence":
                carried[f"{around}.{name}"] = rule
    if extra == "sequence":
        carried["experts.0.up"], carried["experts.0.down"] = "column(gather=1)", "row(scatter=1)"
    return TensorOutline(modules=tuple(modules), shapes=shapes, carried=carried)


@pytest.mark.parametrize("extra", ["", "replicate", "sequence"])
def test_it_grows_as_the_modules(extra: str) -> None:
    few, many = (outline(count, extra) for count in (FEW, MANY))

    def calls(given: TensorOutline) -> int:
        given_names = list(given.carried)[1::3] if extra == "replicate" else []
        rules = {"*": "auto", **dict.fromkeys(given_names, "column")}
        return calls_in(lambda: regions_of(plan_tensor(given, rules, num_ranks=2)))

    assert calls(many) < 1.3 * MANY / FEW * calls(few)


def test_regions_have_the_styles_inside_of_them() -> None:
    plan = plan_tensor(outline(3, ""), "auto", num_ranks=2)
    regions = {region.name: region for region in regions_of(plan)}
    for name, region in regions.items():
        inside = [each for each in plan.styles if not name or each == name or each.startswith(f"{name}.")]
        assert list(region.styles) == inside
