"""Units: blocks are found by their repetition, all else by who holds it."""

from typing import Any

import pytest
from hypothesis import given

from shardwise.plan import Outline
from shardwise.plan.units import meant_modules, plan_units
from tests.costs import calls_in
from tests.plan.outlines import Tree, layers, model, trees
from tests.plan.strategies import proven

STAGE = "model.embed model.layers.0 model.layers.1.attention model.layers.1.mlp model.layers.2"
BLOCK: Tree = {"attention": {"q": 4, "k": 4}, "mlp": 8}
LLAMA: Tree = {"model": {"embed": 9, "layers[]": {"0": BLOCK, "1": BLOCK, "2": BLOCK}, "norm": 1}, "head": 9}


def firsts(outline: Outline) -> dict[str, str]:
    return {name: name for module in outline.modules() for name, _ in module.own_parameters}


def units_of(outline: Outline, **settings: object) -> dict[str, tuple[str, ...]]:
    first_names = {**firsts(outline), **settings.pop("ties", {})}  # type: ignore[dict-item]
    planned = plan_units(outline, first_names=first_names, **settings)  # type: ignore[arg-type]
    return {unit.name: unit.modules for unit in planned}


def own(*found: str) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in found}


TOWER: Tree = {"block[]": {"0": BLOCK, "1": BLOCK}, "norm": 1}
EXPERTS: Tree = {"experts[]": layers(3, 3), "a": 2}
AROUND = "model.embed model.layers.0 model.layers.1 model.layers.2 model.norm head"

FOUND: dict[str, tuple[Tree, dict[str, Any], str]] = {
    "members of a list, and what lies around": (LLAMA, {}, AROUND),
    "not what repeats inside of a block": ({"layers[]": {"0": EXPERTS, "1": EXPERTS}}, {}, "layers.0 layers.1"),
    "not towers of blocks": (
        {"encoder": TOWER, "decoder": TOWER},
        *({}, " ".join(f"{side}.{each}" for side in ("encoder", "decoder") for each in ("block.0", "block.1", "norm"))),
    ),
    "blocks that are attributes": ({"first": BLOCK, "second": BLOCK, ".scale": 1}, {}, " first second"),
    "parameters in lists": ({"net": {"scales[]": {".0": 1, ".1": 1}, "linear": 3}}, {}, "net net.linear"),
    "blocks that are named": (LLAMA, {"patterns": ["model.layers.*"]}, AROUND),
    "a module that is named": (LLAMA, {"patterns": ["model"]}, "model head"),
    "the model": (LLAMA, {"patterns": ["."]}, ""),
    "the model beside blocks": (
        *(LLAMA, {"patterns": [".", "model.layers.*"]}),
        " model.layers.0 model.layers.1 model.layers.2",
    ),
    "a part of a named module": (
        *(LLAMA, {"patterns": ["model.layers.0", "model.layers.0.mlp"]}),
        "model.embed model.layers.0 model.layers.0.mlp model.layers.1.attention.q model.layers.1.attention.k "
        "model.layers.1.mlp model.layers.2.attention.q model.layers.2.attention.k model.layers.2.mlp model.norm head",
    ),
    "none beyond a stage": (
        LLAMA,
        {"placed": STAGE.split()},
        STAGE,
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_units_are_the_blocks_that_repeat_or_what_is_named(case: str) -> None:
    tree, settings, wanted = FOUND[case]
    found = units_of(model(tree), **settings)
    assert found == own(*wanted.split(" "))


def test_finding_units_takes_four_times_as_many_calls_for_four_times_as_many() -> None:
    # Two outlines are compared with all that is in them: a search in a list takes the square.
    few, many = (model({"layers[]": {str(at): BLOCK for at in range(count)}}) for count in (30, 120))
    assert calls_in(lambda: units_of(many)) < 4.1 * calls_in(lambda: units_of(few))


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


@proven
@given(trees)
def test_every_parameter_has_one_unit_that_holds_it(tree: Tree) -> None:
    outline = model(tree)
    planned = plan_units(outline, first_names=firsts(outline))
    found = [name for unit in planned for name in unit.parameters]
    assert sorted(found) == sorted(firsts(outline))
    for unit in planned:
        assert all(name.startswith(f"{unit.name}." if unit.name else "") for name in unit.parameters)


ATTENTION: Tree = {"attention": {".in": 4}, "up": 4}
NET: Tree = {"embedding": 4, "layers[]": {"0": ATTENTION, "1": ATTENTION}}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("blocks", ["layers.0", "layers.1"]),
        (("*.up", "layers.0"), ["layers.0", "layers.1.up"]),
        (("layers.*",), ["layers.0", "layers.1"]),
        (("*.attention", "embedding"), ["embedding", "layers.0.attention", "layers.1.attention"]),
        ((".",), [""]),
        ((".", "layers.0"), [""]),
    ],
)
def test_of_modules_to_run_again_inside_each_other_the_outermost_is_meant(asked: Any, meant: list[str]) -> None:
    assert meant_modules(model(NET), asked, setting="activations.checkpoint") == meant
