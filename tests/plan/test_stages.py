"""Placements: what is given is taken at its word, what is balanced is as even as any cut can be."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan import Outline, Pipeline, Placement, place
from shardwise.plan.balance import cut_evenly, least_largest_load
from tests.plan.outlines import Tree, layers, model, trees
from tests.plan.strategies import names, proven
from tests.plan.texts import placement_from


def stages_of(tree: Tree | Outline, stages: dict[str, int], num_ranks: int = 2) -> Placement:
    outline = tree if isinstance(tree, Outline) else model(tree)
    return place(outline, Pipeline(stages=stages), num_ranks=num_ranks)


def problems_of(tree: Tree | Outline, stages: dict[str, int], num_ranks: int = 2) -> list[str]:
    with pytest.raises(PlanError) as caught:
        stages_of(tree, stages, num_ranks)
    return list(caught.value.problems)


def balanced(tree: Tree | Outline, num_ranks: int, **settings: object) -> Placement:
    outline = tree if isinstance(tree, Outline) else model(tree)
    return place(outline, Pipeline(), num_ranks=num_ranks, **settings)  # type: ignore[arg-type]


def loads_of(outline: Outline, placement: Placement) -> list[int]:
    """Elements of each stage; every parameter must have exactly one."""
    loads = [0] * placement.num_stages
    seen = 0
    for module in outline.modules():
        inside = [name for name in placement.modules if f"{module.name}.".startswith(f"{name}.")]
        for parameter, elements in module.own_parameters:
            assert len(inside) + (parameter in placement.parameters) == 1, parameter
            stage = placement.modules[inside[0]] if inside else placement.parameters[parameter]
            loads[stage] += elements
            seen += 1
    num_inside = sum(len(each.own_parameters) for each in outline.modules())
    assert seen == num_inside
    return loads


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


def test_the_first_and_last_stage_are_the_lighter_ones_where_all_else_is_equal() -> None:
    assert cut_evenly([1, 1, 1, 1, 1, 1], 4) == [1, 3, 5, 6]


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


def test_modules_are_opened_only_where_that_evens_the_loads_by_a_quarter() -> None:
    layer: Tree = {"attention": 3, "mlp": 6, "norm": 1}
    net: Tree = {"model": {"embed": 4, "layers[]": {"0": layer, "1": layer, "2": layer, "3": layer}}, "head": 4}
    two = balanced(net, 2)
    assert dict(two.modules) == {
        "model.embed": 0,
        "model.layers.0": 0,
        "model.layers.1": 0,
        "model.layers.2": 1,
        "model.layers.3": 1,
        "head": 1,
    }
    assert "model.layers.0" in balanced(net, 4).modules  # 12 of the best 12: nothing to win
    halves: Tree = {"embed": 1, "layers[]": {str(at): {"attention": 5, "mlp": 5} for at in range(4)}, "head": 1}
    assert loads_of(model(halves), balanced(halves, 8)) == [6, 5, 5, 5, 5, 5, 5, 6]
    towers: Tree = {"text": layers(40, 40, 40), "image": layers(40, 40, 40), "head": 1}
    assert list(balanced(towers, 2).modules) == ["text", "image", "head"]
    assert loads_of(model(towers), balanced(towers, 3)) == [80, 80, 81]


def test_the_figure_of_balance_holds() -> None:
    layer: Tree = {"x": 2, "y": 2}
    layered: Tree = {"embed": 10, "layers[]": {"0": layer, "1": layer, "2": layer}, "head": 10}
    outline = model(layered)
    assert loads_of(outline, balanced(outline, 2)) == [18, 14]
    assert list(balanced(outline, 2).modules) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    outline = model({"embed": 2, "layer": {"a": 5, "b": 5, "c": 5, "d": 5}, "head": 2})
    assert loads_of(outline, balanced(outline, 2)) == [12, 12]


def test_a_module_inside_many_others_is_found() -> None:
    deep: Tree = {"wrapper": {"model": {"bert": {"embed": 20, "encoder": layers(10, 10, 10, 10, 10, 10), "pool": 5}}}}
    outline = model({**deep, "classifier": 1})
    assert sorted(loads_of(outline, balanced(outline, 2))) == [40, 46]


def test_what_opening_brought_next_to_nothing_is_whole_again() -> None:
    decoder: Tree = {"0": {"norm": 3, "mlp": 121}, "1": 120}
    outline = model({"embed": 32, "encoder": layers(82, 82), "decoder": decoder, "head": 1})
    placement = balanced(outline, 4)
    # Opening decoder.0 too would bring the largest load from 124 to 121 only.
    assert list(placement.modules) == ["embed", "encoder.0", "encoder.1", "decoder.0", "decoder.1", "head"]
    assert loads_of(outline, placement) == [114, 82, 124, 121]


def test_parameters_of_opened_modules_lie_with_the_module_that_follows_them() -> None:
    net: Tree = {".scale": 1, "embeddings": {".position": 2, "patches": 8, "norm": 1}, "t[]": {".0": 3}, "a": 9}
    placement = balanced(net, 3)
    assert dict(placement.modules) == {"embeddings.patches": 0, "embeddings.norm": 1, "a": 2}
    assert dict(placement.parameters) == {"scale": 0, "embeddings.position": 0, "t.0": 2}


def test_a_module_with_parameters_of_its_own_is_opened_last() -> None:
    plain: Tree = {"x": 10, "y": 10}
    outline = model({"holding": {".p": 90, **plain}, "plain": plain, "head": 1})
    assert list(balanced(outline, 4).modules) == ["holding", "plain.x", "plain.y", "head"]
    assert list(balanced(outline, 5).modules) == ["holding.x", "holding.y", "plain.x", "plain.y", "head"]
    assert dict(balanced(outline, 5).parameters) == {"holding.p": 0}


def test_more_stages_than_modules_are_refused_with_both_numbers_and_the_names() -> None:
    with pytest.raises(PlanError) as caught:
        balanced({"a": 1, "activation": 0, "b": {"c": 1, "d": 1}}, 4)
    assert list(caught.value.problems) == [
        "pipeline: 4 stages asked, but the model has only 3 modules that can be placed: a, b.c, b.d; use fewer stages "
        "(mesh.pp, pipeline.chunks)"
    ]
    with pytest.raises(PlanError, match="only 0 modules that can be placed; use fewer"):
        balanced({".p": 1}, 2)


def test_a_model_without_placeable_modules_lies_on_one_stage() -> None:
    placement = balanced({".p": 1, "t[]": {".0": 1}}, 1)
    assert dict(placement.parameters) == {"p": 0, "t.0": 0}
    assert not placement.modules


def test_given_work_counts_instead_of_elements_and_holds_that_of_a_modules_own_parameters() -> None:
    net: Tree = {"a": 1, "b": {".p": 1, "x": 1, "y": 1}, "c": 1}
    work = {"": 99.0, "a": 1.0, "b": 8.0, "b.x": 1.5, "b.y": 1.5, "c": 1.0}
    assert dict(balanced(net, 3, work=work).modules) == {"a": 0, "b": 1, "c": 2}
    four = balanced(net, 4, work=work)
    assert dict(four.modules) == {"a": 0, "b.x": 1, "b.y": 2, "c": 3}
    even = balanced({"a": 1, "b": {".p": 1, "x": 1, "y": 1}, "c": 8}, 3, work={**work, "c": 6.5})
    assert dict(even.modules) == {"a": 0, "b": 1, "c": 2}
    assert dict(balanced({"a": 90, "b": 1, "c": 1}, 2, work={"a": 1, "b": 2, "c": 4}).modules) == {
        "a": 0,
        "b": 0,
        "c": 1,
    }


def test_stages_follow_the_order_of_execution_where_it_is_known() -> None:
    net: Tree = {"head": 4, "unused": 1, "layers[]": layers(5, 5), "embed": 4}
    assert dict(balanced(net, 2).modules)["head"] == 0
    order = ["", "embed", "layers.0", "layers.1", "head"]
    placement = balanced(net, 2, order=order)
    assert dict(placement.modules) == {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1, "unused": 1}
    assert list(placement.modules) == ["embed", "layers.0", "layers.1", "head", "unused"]


def test_own_parameters_lie_with_the_module_that_is_called_first() -> None:
    net: Tree = {".scale": 1, "head": 4, "body": 4}
    assert dict(balanced(net, 2, order=["", "body", "head"]).parameters) == {"scale": 0}
    assert dict(balanced(net, 2, order=["", "body", "head"]).modules) == {"body": 0, "head": 1}


def test_a_module_that_is_never_called_itself_is_opened() -> None:
    net: Tree = {"decoder": {"a": 1, "b": 1}, "c": 9}
    assert list(balanced(net, 2).modules) == ["decoder", "c"]
    assert list(balanced(net, 2, order=["", "decoder.a", "decoder.b", "c"]).modules) == ["decoder.a", "decoder.b", "c"]


def shared_embedding() -> Outline:
    """An encoder and a decoder that both hold the one embedding of the model, under names of their own."""
    tree: Tree = {"shared": 8, "encoder": {"embed": 0, "blocks[]": layers(9, 9)}, "decoder": {"blocks[]": layers(9, 9)}}
    root = model({**tree, "head": 1})
    shared = replace(root.children[0], aliases=("encoder.embed", "decoder.embed"))
    encoder = replace(root.children[1], children=root.children[1].children[1:])  # the alias is not listed again
    return replace(root, children=(shared, encoder, *root.children[2:]))


def test_modules_that_hold_one_that_also_lies_outside_are_opened() -> None:
    placement = balanced(shared_embedding(), 2)
    assert list(placement.modules) == [
        "shared",
        "encoder.blocks.0",
        "encoder.blocks.1",
        "decoder.blocks.0",
        "decoder.blocks.1",
        "head",
    ]


def test_one_module_under_two_names_has_one_stage() -> None:
    outline = shared_embedding()
    stages = {"encoder.embed": 0, "encoder.blocks": 0, "decoder.blocks": 1, "head": 1}
    assert stages_of(outline, stages).modules["shared"] == 0
    assert problems_of(outline, {"shared": 0, "encoder": 0, "decoder": 1, "head": 1}) == [
        "pipeline.stages: 'shared' (also 'encoder.embed', 'decoder.embed') is given stage 0 by 'shared' and stage 1 by "
        "'decoder'. A module runs on one stage, with all its parts: give the parts their stages, or change a key"
    ]
    # Held by a placed module and also called outside it: it belongs to that stage, and is listed itself.
    assert dict(stages_of(outline, {"encoder": 0, "decoder.blocks": 1, "head": 1}).modules) == {
        "shared": 0,
        "encoder": 0,
        "decoder.blocks.0": 1,
        "decoder.blocks.1": 1,
        "head": 1,
    }


def test_keys_name_modules_containers_globs_and_parameters() -> None:
    net: Tree = {
        ".scale": 1,
        "embed": 3,
        "layers[]": layers(1, 2, 3),
        "extra": {"[d]": 1, "d": 2, "act": 0},
        "list[]": {".0": 1, ".1": 1},
    }
    placement = stages_of(
        net, {"embed": 0, "layers": 1, "extra.[d]": 0, "extra.d": 1, "list": 1, "sc*": 0, "extra.act": 0}
    )
    assert dict(placement.modules) == {
        "embed": 0,
        "layers.0": 1,
        "layers.1": 1,
        "layers.2": 1,
        "extra.[d]": 0,
        "extra.d": 1,
        "extra.act": 0,
    }
    assert dict(placement.parameters) == {"scale": 0, "list.0": 1, "list.1": 1}
    everything = stages_of({**net, "head": 1}, {"*": 0, "*embed": 0, "embed": 0}, num_ranks=1)
    assert list(everything.modules) == ["embed", "layers.0", "layers.1", "layers.2", "extra", "head"]
    assert dict(everything.parameters) == {"scale": 0, "list.0": 0, "list.1": 0}


def test_modules_without_parameters_need_no_stage() -> None:
    placement = stages_of({"a": 1, "activation": 0, "b": {"act": 0, "c": 1}}, {"a": 0, "b.c": 1})
    assert dict(placement.modules) == {"a": 0, "b.c": 1}


def test_every_problem_of_given_stages_is_listed_at_once() -> None:
    layer: Tree = {"norm": 1, "mlp": {"up": 2, "down": 2}}
    net: Tree = {".scale": 1, "layers[]": {"0": layer, "1": layer}, "lm_head": 3, "a": 1, "b": 1, "c": 1, "d": 1}
    asked = {"layers.0": 0, "*norm*": 1, "layers.1.mlp": 1, "lm_haed": 1, "layers.*": 4}
    assert problems_of(net, asked, num_ranks=4) == [
        "pipeline.stages: 'layers.*' is given stage 4, but pp=4 with 1 stage per rank has the stages 0 to 3",
        "pipeline.stages: 'lm_haed' names no module and no parameter of the model; the nearest name is 'lm_head'",
        "pipeline.stages: 'layers.0' is given stage 0 by 'layers.0' and stage 4 by 'layers.*'. A module runs on one "
        "stage, with all its parts: give the parts their stages, or change a key",
        "pipeline.stages: 'layers.0.norm' is given stage 0 by 'layers.0' and stage 1 by '*norm*' and stage 4 by "
        "'layers.*'. A module runs on one stage, with all its parts: give the parts their stages, or change a key",
        "pipeline.stages: 'layers.1.norm' is given stage 1 by '*norm*' and stage 4 by 'layers.*'. A module runs on "
        "one stage, with all its parts: give the parts their stages, or change a key",
        "pipeline.stages: 'layers.1.mlp' is given stage 1 by 'layers.1.mlp' and stage 4 by 'layers.*'. A module runs "
        "on one stage, with all its parts: give the parts their stages, or change a key",
        "pipeline.stages: no stage owns 6 of the model's 12 parameters: scale, lm_head.weight, a.weight, b.weight and "
        "2 more; give their modules a stage",
        "pipeline.stages: stage 2 of 4 owns nothing; give it a module, or use fewer stages",
        "pipeline.stages: stage 3 of 4 owns nothing; give it a module, or use fewer stages",
    ]


def test_a_glob_that_means_a_parameter_inside_a_module_of_another_stage_is_refused() -> None:
    assert problems_of({"a": 1, "b": 1, "c": {".bias": 1}}, {"a": 0, "b": 1, "c": 1, "*.bias": 0}) == [
        "pipeline.stages: 'c.bias' is given stage 0 by '*.bias' and stage 1 by 'c'. A module runs on one stage, with "
        "all its parts: give the parts their stages, or change a key"
    ]


@proven
@given(trees, st.dictionaries(st.sampled_from(["*", "a", "b", "c*", "?", "*.a", "e", "e.*", "*.p"]), st.integers(0, 2)))
def test_given_stages_that_are_not_refused_give_every_parameter_one_stage(tree: Tree, stages: dict[str, int]) -> None:
    outline = model(tree)
    if not stages:
        return
    try:
        placement = stages_of(outline, stages, num_ranks=max(stages.values()) + 1)
    except PlanError:
        return
    loads_of(outline, placement)
    assert {*placement.modules.values(), *placement.parameters.values()} == set(range(placement.num_stages))


def test_stages_are_dealt_out_to_ranks_in_turns() -> None:
    placement = place(model(layers(1, 1, 1, 1)), Pipeline(schedule="interleaved"), num_ranks=2)
    assert dict(placement.modules) == {"0": 0, "1": 1, "2": 2, "3": 3}
    assert [placement.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]


@proven
@given(st.dictionaries(names, st.integers(0, 5)), st.dictionaries(names, st.integers(0, 5)))
def test_the_text_of_a_placement_parses_back(modules: dict[str, int], parameters: dict[str, int]) -> None:
    placement = Placement(num_ranks=3, num_stages=6, modules=modules, parameters=parameters)
    assert placement_from(placement.text()) == placement
    assert len(placement.text().splitlines()) == 2 + len(modules) + len(parameters)
