"""Placements: what is given is taken at its word, what is balanced is as even as any cut can be."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan import Outline, Pipeline, Placement, place
from shardwise.plan.balance import cut_evenly, least_largest_load
from tests.plan.outlines import Tree, layers, model, shared_embedding, trees
from tests.plan.strategies import names, proven
from tests.plan.texts import placement_from


def given_stages(tree: Tree | Outline, stages: dict[str, int], num_ranks: int = 2) -> Placement:
    outline = tree if isinstance(tree, Outline) else model(tree)
    return place(outline, Pipeline(stages=stages), num_ranks=num_ranks)


def balanced(tree: Tree | Outline, num_ranks: int, **settings: Any) -> Placement:
    outline = tree if isinstance(tree, Outline) else model(tree)
    return place(outline, Pipeline(), num_ranks=num_ranks, **settings)


def loads_of(outline: Outline, placement: Placement) -> list[int]:
    """Elements of each stage; every parameter must have exactly one."""
    loads = [0] * placement.num_stages
    for module in outline.modules():
        inside = [name for name in placement.modules if f"{module.name}.".startswith(f"{name}.")]
        for parameter, elements in module.own_parameters:
            assert len(inside) + (parameter in placement.parameters) == 1, parameter
            stage = placement.modules[inside[0]] if inside else placement.parameters[parameter]
            loads[stage] += elements
    return loads


def told(placement: Placement) -> str:
    """Of each stage the modules, then the parameters."""
    placed = [*placement.modules.items(), *placement.parameters.items()]
    stages = range(placement.num_stages)
    return " | ".join(" ".join(name for name, at in placed if at == stage) for stage in stages)


def all_cuts(loads: Sequence[int], num_runs: int) -> Iterator[tuple[list[int], list[int]]]:
    """Every way to cut into non-empty runs: (ends, loads of the runs)."""
    for inner in combinations(range(1, len(loads)), num_runs - 1):
        ends = [*inner, len(loads)]
        yield ends, [sum(loads[start:end]) for start, end in pairwise([0, *ends])]


rows = st.lists(st.integers(0, 12), min_size=1, max_size=9).flatmap(
    lambda loads: st.tuples(st.just(loads), st.integers(1, len(loads)))
)


@proven
@given(rows)
@example(([0, 0, 0], 3))
@example(([5, 0, 0, 5], 3))
def test_a_cut_has_the_least_largest_load_of_all_cuts_and_then_the_most_even(case: tuple[list[int], int]) -> None:
    loads, num_runs = case

    def cost(runs: Sequence[int]) -> tuple[int, int, int]:
        return max(runs), sum(run * run for run in runs), runs[0] + (runs[-1] if num_runs > 1 else 0)

    costs = {tuple(ends): cost(runs) for ends, runs in all_cuts(loads, num_runs)}
    assert least_largest_load(loads, num_runs) == min(costs.values())[0]
    assert costs[tuple(cut_evenly(loads, num_runs))] == min(costs.values())


@proven
@given(rows, st.sampled_from([0.1, 1 / 3, 1e-7, 1e20]))
def test_a_cut_of_measured_loads_is_as_good_as_any_to_rounding(case: tuple[list[int], int], unit: float) -> None:
    loads, num_runs = [load * unit for load in case[0]], case[1]
    least = min(max(runs) for _, runs in all_cuts(case[0], num_runs)) * unit
    assert least_largest_load(loads, num_runs) == pytest.approx(least, rel=1e-12)
    ends = cut_evenly(loads, num_runs)
    assert len(ends) == num_runs
    assert max(sum(loads[start:end]) for start, end in pairwise([0, *ends])) == pytest.approx(least, rel=1e-12)


def test_a_cut_of_large_numbers_is_exact() -> None:
    loads = [(1 << 60) + at for at in (0, 3, 1, 2)]
    assert least_largest_load(loads, 2) == (1 << 61) + 3


@proven
@given(trees, st.integers(1, 5))
def test_a_balanced_placement_gives_every_parameter_one_stage_and_every_stage_a_module(tree: Tree, pp: int) -> None:
    outline = model(tree)
    if num_placeable(outline) < pp and pp > 1:
        with pytest.raises(PlanError, match=f"{pp} stages asked, but the model has only"):
            balanced(outline, pp)
        return
    placement = balanced(outline, pp)
    loads_of(outline, placement)
    if placement.modules:
        assert set(placement.modules.values()) == set(range(pp))
        assert list(placement.modules.values()) == sorted(placement.modules.values())
    else:
        assert num_placeable(outline) == 0
        assert pp == 1


def num_placeable(outline: Outline) -> int:
    """How many modules with parameters there are when each that holds others is opened."""
    inside = sum(num_placeable(child) for child in outline.children)
    return inside or int(bool(outline.name) and not outline.is_container and bool(outline.own_parameters))


@proven
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 4))
def test_whole_layers_are_cut_as_evenly_as_any_cut(sizes: list[int], pp: int) -> None:
    pp = min(pp, len([size for size in sizes if size]) or 1)
    outline = model({"model": {"layers[]": layers(*sizes)}})
    if any(sizes):
        best = min(max(runs) for _, runs in all_cuts([size for size in sizes if size], pp))
        assert max(loads_of(outline, balanced(outline, pp))) == best


LAYER: Tree = {"attention": 3, "mlp": 6, "norm": 1}
DECODER: Tree = {"embed": 4, "layers[]": dict.fromkeys("0123", LAYER), "head": 4}
HALVES: Tree = {"embed": 1, "layers[]": {at: {"attention": 5, "mlp": 5} for at in "01"}, "head": 1}
TOWERS: Tree = {"text": layers(40, 40, 40), "image": layers(40, 40, 40), "head": 1}
FIGURE: Tree = {"embed": 10, "layers[]": {at: {"x": 2, "y": 2} for at in "012"}, "head": 10}
DEEP: Tree = {"a": {"b": {"c": {"embed": 20, "encoder": layers(10, 10, 10, 10, 10, 10), "pool": 5}}}, "classifier": 1}
UNEVEN: Tree = {
    **{"embed": 32, "encoder": layers(82, 82), "decoder": {"0": {"norm": 3, "mlp": 121}, "1": 120}, "head": 1}
}
HOLDING: Tree = {"holding": {".p": 90, "x": 10, "y": 10}, "plain": {"x": 10, "y": 10}, "head": 1}
WORK = {"": 99.0, "a": 1.0, "b": 8.0, "b.x": 1.5, "b.y": 1.5, "c": 1.0}
WORKING: Tree = {"a": 1, "b": {".p": 1, "x": 1, "y": 1}, "c": 1}
TURNED: Tree = {"head": 4, "unused": 1, "layers[]": layers(5, 5), "embed": 4}

BALANCED: dict[str, tuple[Tree | Outline, int, dict[str, Any], str]] = {
    "layers stay whole": (DECODER, 2, {}, "embed layers.0 layers.1 | layers.2 layers.3 head"),
    "layers are opened where that evens the loads by a quarter": (
        *(HALVES, 4, {}),
        "embed layers.0.attention | layers.0.mlp | layers.1.attention | layers.1.mlp head",
    ),
    "the figure": (FIGURE, 2, {}, "embed layers.0 layers.1 | layers.2 head"),
    "towers stay whole": (TOWERS, 2, {}, "text | image head"),
    "towers are opened": (TOWERS, 3, {}, "text.0 text.1 | text.2 image.0 | image.1 image.2 head"),
    "inside of many others": (
        *(DEEP, 2, {}),
        "a.b.c.embed a.b.c.encoder.0 a.b.c.encoder.1 | "
        "a.b.c.encoder.2 a.b.c.encoder.3 a.b.c.encoder.4 a.b.c.encoder.5 a.b.c.pool classifier",
    ),
    # Opening decoder.0 too would bring the largest load from 124 to 121 only.
    "what opening brings next to nothing": (UNEVEN, 4, {}, "embed encoder.0 | encoder.1 | decoder.0 | decoder.1 head"),
    "own parameters lie with the module that follows": (
        {".scale": 1, "embeddings": {".position": 2, "patches": 8, "norm": 1}, "t[]": {".0": 3}, "a": 9},
        *(3, {}, "embeddings.patches embeddings.position scale | embeddings.norm | a t.0"),
    ),
    "a module with own parameters": (HOLDING, 4, {}, "holding | plain.x | plain.y | head"),
    "is opened last": (HOLDING, 5, {}, "holding.x holding.p | holding.y | plain.x | plain.y | head"),
    "no modules": ({".p": 1, "t[]": {".0": 1}}, 1, {}, "p t.0"),
    "work": (WORKING, 3, {"work": WORK}, "a | b | c"),
    "work of opened modules": (WORKING, 4, {"work": WORK}, "a | b.x b.p | b.y | c"),
    "work of own parameters": ({**WORKING, "c": 8}, 3, {"work": {**WORK, "c": 6.5}}, "a | b | c"),
    "work, not elements": ({"a": 90, "b": 1, "c": 1}, 2, {"work": {"a": 1, "b": 2, "c": 4}}, "a b | c"),
    "by registration": (TURNED, 2, {}, "head unused layers.0 | layers.1 embed"),
    "by execution": (
        TURNED,
        *(2, {"order": ["", "embed", "layers.0", "layers.1", "head"]}, "embed layers.0 | layers.1 head unused"),
    ),
    "own parameters lie with the first call": (
        {".scale": 1, "head": 4, "body": 4},
        *(2, {"order": ["", "body", "head"]}, "body scale | head"),
    ),
    "never called itself": (
        {"decoder": {"a": 1, "b": 1}, "c": 9},
        *(2, {"order": ["", "decoder.a", "decoder.b", "c"]}, "decoder.a decoder.b | c"),
    ),
    "a module that two others hold": (
        shared_embedding(),
        *(2, {}, "shared encoder.blocks.0 encoder.blocks.1 | decoder.blocks.0 decoder.blocks.1 head"),
    ),
}


@pytest.mark.parametrize("case", BALANCED)
def test_a_model_is_balanced(case: str) -> None:
    tree, num_stages, settings, wanted = BALANCED[case]
    assert told(balanced(tree, num_stages, **settings)) == wanted


KEYS: Tree = {
    **{".scale": 1, "embed": 3, "layers[]": layers(1, 2, 3), "extra": {"[d]": 1, "d": 2, "act": 0}},
    "list[]": {".0": 1, ".1": 1},
}
GIVEN: dict[str, tuple[Tree | Outline, dict[str, int], str]] = {
    "modules, containers, globs and parameters": (
        KEYS,
        {"embed": 0, "layers": 1, "extra.[d]": 0, "extra.d": 1, "list": 1, "sc*": 0, "extra.act": 0},
        "embed extra.[d] extra.act scale | layers.0 layers.1 layers.2 extra.d list.0 list.1",
    ),
    "everything": (
        {**KEYS, "head": 1},
        {"*": 0, "*embed": 0, "embed": 0},
        "embed layers.0 layers.1 layers.2 extra head scale list.0 list.1",
    ),
    "nothing without parameters": (
        {"a": 1, "activation": 0, "b": {"act": 0, "c": 1}},
        *({"a": 0, "b.c": 1}, "a | b.c"),
    ),
    "one module under two names": (
        shared_embedding(),
        {"encoder.embed": 0, "encoder.blocks": 0, "decoder.blocks": 1, "head": 1},
        "shared encoder.blocks.0 encoder.blocks.1 | decoder.blocks.0 decoder.blocks.1 head",
    ),
    # Held by a placed module and also called outside it: it belongs to that stage, and is listed itself.
    "one module under two names, one of them placed": (
        shared_embedding(),
        *({"encoder": 0, "decoder.blocks": 1, "head": 1}, "shared encoder | decoder.blocks.0 decoder.blocks.1 head"),
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_given_stages_are_taken_at_their_word(case: str) -> None:
    tree, stages, wanted = GIVEN[case]
    assert told(given_stages(tree, stages, num_ranks=1 + max(stages.values()))) == wanted


@proven
@given(trees, st.dictionaries(st.sampled_from(["*", "a", "b", "c*", "?", "*.a", "e", "e.*", "*.p"]), st.integers(0, 2)))
def test_given_stages_that_are_not_refused_give_every_parameter_one_stage(tree: Tree, stages: dict[str, int]) -> None:
    outline = model(tree)
    if not stages:
        return
    try:
        placement = given_stages(outline, stages, num_ranks=max(stages.values()) + 1)
    except PlanError:
        return
    loads_of(outline, placement)
    assert {*placement.modules.values(), *placement.parameters.values()} == set(range(placement.num_stages))


def test_stages_are_dealt_out_to_ranks_in_turns() -> None:
    placement = place(model(layers(1, 1, 1, 1)), Pipeline(schedule="interleaved"), num_ranks=2)
    assert told(placement) == "0 | 1 | 2 | 3"
    assert [placement.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]


@proven
@given(st.dictionaries(names, st.integers(0, 5)), st.dictionaries(names, st.integers(0, 5)))
def test_the_text_of_a_placement_parses_back(modules: dict[str, int], parameters: dict[str, int]) -> None:
    placement = Placement(num_ranks=3, num_stages=6, modules=modules, parameters=parameters)
    assert placement_from(placement.text()) == placement
    assert len(placement.text().splitlines()) == 2 + len(modules) + len(parameters)
