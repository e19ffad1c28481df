"""Stars that stack: gaps in their numbers, how many they stand for, their way back; and names that are misspelled."""

import pytest

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite
from shardwise.rewrite.rewrites import shipped
from tests.rewrite.filling import proved
from tests.rewrite.oracle import Tensor
from tests.rewrite.strategies import numbered

A = (2, 3)
STACK = "l.$L.e.*.w -> l.$L.e, stack=0"


def experts(*numbers: int, layers: int = 2) -> dict[str, tuple[int, ...]]:
    return {f"l.{layer}.e.{number}.w": A for layer in range(layers) for number in numbers}


def problem(text: str, sources: dict[str, tuple[int, ...]], target: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(RewriteError) as refused:
        Rewrite(text).check(sources, target)
    assert len(refused.value.problems) == 1
    return refused.value.problems[0].splitlines()[0].partition(": ")[2]


@pytest.mark.parametrize(
    ("numbers", "lacking"),
    [
        ((0, 1, 3), "l.0.e.2.w is"),
        ((1, 2), "l.0.e.0.w is"),
        ((0, 1, 2, 10), "l.0.e.3.w and those with 4, 5, 6, 7, 8, 9 in its place are"),
        ((2,), "l.0.e.0.w and those with 1 in its place are"),
    ],
)
def test_a_number_that_is_lacking_is_named_unless_gaps_are_allowed(numbers: tuple[int, ...], lacking: str) -> None:
    found = problem(STACK, experts(*numbers, layers=1))
    assert found == f"{lacking} not there, and l.0.e.{numbers[-1]}.w is; write gaps=1 if numbers may be missing"
    allowed = f"{STACK}, gaps=1"
    made = proved(allowed, {name: Tensor(numbered(0, shape)) for name, shape in experts(*numbers).items()})
    assert made["l.1.e"].shape == (len(numbers), *A)
    assert Rewrite(str(Rewrite(allowed))) == Rewrite(allowed)


def test_numbers_may_have_zeros_before_them_and_differ_from_layer_to_layer() -> None:
    assert Rewrite(STACK).check({"l.0.e.00.w": A, "l.0.e.01.w": A}).outputs["l.0.e"].shape == (2, *A)
    checked = Rewrite(STACK).check({**experts(0, 1, layers=3), "l.1.e.2.w": A})
    assert checked.notes == ("line 1: l.$L.e.*.w stands for 2 names in 2 places, for 3 where l.1.e.0.w is",)
    assert checked.explain().endswith(f"\nnote: {checked.notes[0]}")


def test_what_is_joined_along_a_dim_may_have_gaps_which_are_noted() -> None:
    checked = Rewrite("e.*.w -> b, axis=0").check({"e.0.w": A, "e.2.w": A})
    assert checked.notes == ("line 1: e.*.w stands for 2 names; e.1.w is not there, and e.2.w is",)


def test_on_the_way_back_the_shape_says_how_many_there_were() -> None:
    sources = {name: Tensor(numbered(at, A)) for at, name in enumerate(experts(0, 1, 2))}
    text = "l.$L.e.*.w^T -> t.$L, stack=1, permute='[2,1,0]'; t.$L -> l.$L.e, dtype='float32'"
    inverse = Rewrite(text.replace("dtype", "src_dtype='float32', dst_dtype")).inverse()
    checked = inverse.check({"l.0.e": (2, 3, 3), "l.1.e": (2, 3, 3)})
    assert checked.outputs.keys() == sources.keys()
    assert {meta.shape for meta in checked.outputs.values()} == {A}
    with pytest.raises(RewriteError, match=r"[*] has no value on the left"):
        Rewrite(f"{STACK}, gaps=1").inverse().check({"l.0.e": (3, *A)})
    with_gaps = experts(0, 5, layers=1)  # a target tells which numbers there were, also where the text allows no gaps
    assert Rewrite(STACK).inverse().check({"l.0.e": (2, *A)}, with_gaps).outputs.keys() == with_gaps.keys()


@pytest.mark.parametrize("name", ["expert-stacking", "expert-stacking-w123"])
def test_stacked_experts_come_apart_by_the_text_alone(name: str) -> None:
    stem = "model.layers.{}.mlp" if name == "expert-stacking" else "model.layers.{}.block_sparse_moe"
    gate, up, down = ("w1", "w3", "w2") if "w123" in name else ("gate_proj", "up_proj", "down_proj")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, count in ((0, 3), (1, 2)):
        for expert in range(count):
            first = f"{stem.format(layer)}.experts.{expert}"
            shapes |= {
                f"{first}.{gate}.weight": (4, 6),
                f"{first}.{up}.weight": (4, 6),
                f"{first}.{down}.weight": (6, 4),
            }
        if "w123" in name:
            shapes[f"{stem.format(layer)}.gate.weight"] = (count, 6)
    trained = shipped(name).check(shapes).outputs
    back = shipped(name).inverse().check({each: meta.shape for each, meta in trained.items()})
    assert {each: meta.shape for each, meta in back.outputs.items()} == shapes


NEAR = {
    "m.$L.self_atn.q -> q": "no tensor has a name like m.$L.self_atn.q; there is m.0.self_attn.q (and 1 more like it)",
    "m.$L.e.*.wx -> q.$L, stack=0": "no tensor has a name like m.$L.e.*.wx; there is m.0.e.0.w",
    "m.$L.other.kind -> q.$L": "no tensor has a name like m.$L.other.kind; write optional=1 if that may be",
    "m.$L.e.1.w -> q.$L": "no tensor has a name like m.$L.e.1.w; there is m.0.e.0.w",
}


@pytest.mark.parametrize("text", NEAR)
def test_a_pattern_that_stands_for_nothing_is_told_with_names_that_are_near(text: str) -> None:
    assert problem(text, {"m.0.self_attn.q": A, "m.1.self_attn.q": A, "m.0.e.0.w": A}) == NEAR[text]


def test_names_that_are_near_are_told_of_the_target_and_where_a_statement_may_match_nothing() -> None:
    told = problem("all -> expert.*.w, axis=0", {"all": (4, 3)}, {"experts.0.w": A, "experts.1.w": A})
    assert told == "the target has no name like expert.*.w; there is experts.0.w (and 1 more like it)"
    checked = Rewrite("m.$L.self_atn.q -> q.$L, optional=1").check({"m.0.self_attn.q": A})
    assert checked.notes == (
        "line 1: m.$L.self_atn.q stands for nothing, which optional=1 allows; there is m.0.self_attn.q",
    )
    assert Rewrite("bias.$L -> b.$L, optional=1").check({"m.0.self_attn.q": A}).notes == ()


def test_every_number_that_is_lacking_is_named_with_its_layer() -> None:
    sources = {**experts(0, 1, 2), **{f"l.1.e.{number}.w": A for number in (4, 6, 9)}}
    found = problem(STACK, sources)
    assert found == (
        "l.1.e.3.w and those with 5, 7, 8 in its place are not there, and l.1.e.9.w is; write gaps=1 if numbers may be "
        "missing"
    )
    far = problem(STACK, experts(0, 10**30, layers=1))
    assert far.startswith("l.0.e.1.w and those with 2, 3, 4, 5, 6, 7, 8 ... in its place are not there, and l.0.e.1000")


def test_a_number_behind_the_last_is_lacking_where_something_else_has_it() -> None:
    """The stack was made without it, one expert short, and no shape of the source shows it."""
    sources = experts(0, 1, 2) | {f"l.{layer}.e.{number}.b": A for layer in range(2) for number in range(3)}
    stacks = f"{STACK}; l.$L.e.*.b -> l.$L.b, stack=0"
    assert Rewrite(stacks).check(sources).outputs["l.1.b"].shape == (3, *A)
    del sources["l.1.e.2.b"]
    assert (
        problem(stacks, sources) == "l.1.e.2.b is not there, and l.1.e.2.w is; write gaps=1 if numbers may be missing"
    )
    assert Rewrite(f"{STACK}; l.$L.e.*.b -> l.$L.b, stack=0, gaps=1").check(sources).outputs["l.1.b"].shape == (2, *A)


def test_of_a_range_every_name_that_is_lacking_is_named() -> None:
    sources = {f"l.{layer}.e_{number}": A for layer in range(2) for number in range(5) if layer == 0 or number % 3 < 2}
    del sources["l.1.e_4"]
    with pytest.raises(RewriteError) as refused:
        Rewrite("l.$L.e[0:5] -> l.$L.w, stack=0").check(sources)
    said = [each.splitlines()[0].partition(": ")[2] for each in refused.value.problems]
    assert said == [f"l.1.e_{number} is not there, and l.1.e_0 needs it" for number in (2, 4)]


def test_a_target_with_more_or_fewer_experts_shows_which_stand_where() -> None:
    with pytest.raises(RewriteError) as refused:
        Rewrite(STACK).check({**experts(0, 1, 2), "l.1.e.3.w": A}, {"l.0.e": (4, *A), "l.1.e": (4, *A)})
    assert refused.value.problems == (
        "l.0.e: shape [4, 2, 3] in the target, [3, 2, 3] by the rewrite",
        "note: line 1: l.$L.e.*.w stands for 3 names in 1 place, for 4 where l.1.e.0.w is",
    )
    message = problem("all -> e.*.w, stack=0", {"all": (4, *A)}, {f"e.{number}.w": A for number in (0, 1, 3)})
    assert message == "all is split into 4, and the target has 3 names like e.*.w: e.2.w is not there, and e.3.w is"
    message = problem("all -> e.*.w, stack=0", {"all": (4, *A)}, {f"e.{number}.w": A for number in range(3)})
    assert message == "all is split into 4, and the target has 3 names like e.*.w, the last one e.2.w"
