"""Placeholders, stars and rests of names: for which tensors a statement stands, and what is said where none fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import Rewrite
from shardwise.space import Box
from tests.properties import tried
from tests.refusals import Refusals
from tests.rewrite.filling import proved
from tests.rewrite.oracle import Tensor
from tests.rewrite.strategies import numbered

A = (2, 3)


def shapes(names: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names.split(), A)


EXPANSIONS: dict[str, tuple[str, str, dict[str, str]]] = {
    # text, names that are there, and of each output from which it comes
    "plain": ("a, b -> c, axis=0", "a b z", {"c": "a b", "z": "z"}),
    "a placeholder": ("l.$L.w -> m.$L.w", "l.10.w l.2.w l.w", {"m.10.w": "l.10.w", "m.2.w": "l.2.w", "l.w": "l.w"}),
    "twice in a name": ("l.$L.$L -> m.$L", "l.1.1 l.1.2", {"m.1": "l.1.1", "l.1.2": "l.1.2"}),
    "inside a word": ("w1$L.a -> $L.a", "w10.a w2.a", {"0.a": "w10.a", "w2.a": "w2.a"}),
    "a join": ("q.$L, k.$L -> f.$L, axis=0", "q.0 k.1 q.1 k.0", {"f.0": "q.0 k.0", "f.1": "q.1 k.1"}),
    "crossed": ("a.$L.$E, b.$E.$L -> c.$L.$E, axis=0", "a.1.2 b.2.1", {"c.1.2": "a.1.2 b.2.1"}),
    "shared": ("s, a.$L -> b.$L, axis=0", "s a.0 a.1", {"b.0": "s a.0", "b.1": "s a.1"}),
    "one per layer": (
        "n.$L, e.$L.$E -> o.$L.$E, axis=0",
        "n.0 n.1 e.0.3 e.1.4 e.1.5",
        {"o.0.3": "n.0 e.0.3", "o.1.4": "n.1 e.1.4", "o.1.5": "n.1 e.1.5"},
    ),
    "a star": ("e.*.w -> b, axis=0", "e.10.w e.9.w e.0.w", {"b": "e.0.w e.9.w e.10.w"}),
    "two stars": ("a.*, b.* -> c, axis=0", "a.1 a.0 b.5", {"c": "a.0 a.1 b.5"}),
    "a star in each layer": (
        "l.$L.*.w -> l.$L, axis=0",
        "l.0.1.w l.1.0.w l.0.0.w",
        {"l.0": "l.0.0.w l.0.1.w", "l.1": "l.1.0.w"},
    ),
    "the layer before": ("m.$L.w -> m.$L-1.w", "m.1.w m.2.w", {"m.0.w": "m.1.w", "m.1.w": "m.2.w"}),
    "AOA's offset": ("m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET", "m.1", {"m.0": "m.1"}),
    "a shift on the left": ("m.$L+1 -> n.$L", "m.1 m.2", {"n.0": "m.1", "n.1": "m.2"}),
    "leading zeros": ("m.$L -> n.$L, o.$L, axis=0", "m.007", {"n.007": "m.007", "o.007": "m.007"}),
    "an optional one": ("z.$L -> y.$L, optional=1", "a", {"a": "a"}),
    "an optional plain one": ("z -> y, optional=1", "a", {"a": "a"}),
    "a drop": ("a.$L -> _", "a.0 a.1 b", {"b": "b"}),
    "zeros that are carried": ("m.$L -> n.$L+1", "m.009", {"n.010": "m.009"}),
    "many zeros": ("m.$L -> n.$L-1", f"m.1{'0' * 5000}", {f"n.{'9' * 5000}": f"m.1{'0' * 5000}"}),
    "many digits": ("m.$L -> n.$L+1", f"m.{'9' * 5000}", {f"n.1{'0' * 5000}": f"m.{'9' * 5000}"}),
    "a rest": (
        "module.** -> **",
        "module.l.0.w module.head extra/rng",
        {"l.0.w": "module.l.0.w", "head": "module.head", "extra/rng": "extra/rng"},
    ),
    "a rest dropped": ("module.l.** -> _\nmodule.** -> **", "module.l.0.w module.head", {"head": "module.head"}),
    "rests joined": ("m.0.**, m.1.** -> both.**, axis=0", "m.0.w m.1.w", {"both.w": "m.0.w m.1.w"}),
    "a rest in quotes": ('"module.**" -> "a b.**"', "module.w", {"a b.w": "module.w"}),
}


@pytest.mark.parametrize("name", EXPANSIONS)
def test_a_statement_stands_for_these_tensors(name: str) -> None:
    text, names, expected = EXPANSIONS[name]
    checked = Rewrite(text).check(dict.fromkeys(names.split(), (2 if "o." in text else 1,)))
    assert {each: set(checked.sources_of(each)) for each in checked.outputs} == {
        each: set(sources.split()) for each, sources in expected.items()
    }


def test_what_is_joined_is_in_the_order_of_the_numbers() -> None:
    long, padded = "9" * 5000, "0" * 5000 + "3"
    names = [f"e.{number}" for number in ("0", padded, "8", long)]
    checked = Rewrite("e.* -> b, axis=0").check(dict.fromkeys(reversed(names), (1, 2)))
    assert [each.other for each in checked.resolve("b", Box((0, 0), (4, 2)))] == names


@pytest.mark.parametrize(
    ("text", "names", "target", "made"),
    [
        ("w -> e.*, axis=0", "w", "e.10 e.2", "e.2 e.10"),
        ("w.$L -> e.$L.*, axis=0", "w.0 w.1", "e.0.0 e.1.4 e.1.3", "e.0.0 e.1.3 e.1.4"),
        ("w -> e.$E", "w", "e.0 e.1", "e.0 e.1"),
        ("_ -> n.$L", "w", "w n.0 n.1", "w"),
    ],
)
def test_what_only_the_right_has_comes_from_the_target(text: str, names: str, target: str, made: str) -> None:
    checked = Rewrite(text).apply(dict.fromkeys(names.split(), (2,)), wanted=dict.fromkeys(target.split(), (1,)))
    assert checked.outputs.keys() == set(made.split())
    assert checked.outputs.keys() | checked.added == set(target.split())


STACK = "l.$L.e.*.w -> l.$L.e, stack=0"


def experts(*numbers: int, layers: int = 2) -> dict[str, tuple[int, ...]]:
    return {f"l.{layer}.e.{number}.w": A for layer in range(layers) for number in numbers}


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


@pytest.mark.parametrize("numbers", [(0, 1, 3), (1, 2), (0, 1, 2, 10), (2,)])
def test_numbers_that_are_lacking_are_allowed_by_gaps(numbers: tuple[int, ...]) -> None:
    sources = {name: Tensor(numbered(0, shape)) for name, shape in experts(*numbers).items()}
    assert proved(f"{STACK}, gaps=1", sources)["l.1.e"].shape == (len(numbers), *A)


def test_names_that_are_near_are_noted_where_a_statement_may_match_nothing() -> None:
    checked = Rewrite("m.$L.self_atn.q -> q.$L, optional=1").check({"m.0.self_attn.q": A})
    assert checked.notes == (
        "line 1: m.$L.self_atn.q stands for nothing, which optional=1 allows; there is m.0.self_attn.q",
    )
    assert Rewrite("bias.$L -> b.$L, optional=1").check({"m.0.self_attn.q": A}).notes == ()


def refused(text: str, sources: Any, target: Any = None) -> Any:
    return lambda: Rewrite(text).check(sources, target)


NEAR = shapes("m.0.self_attn.q m.1.self_attn.q m.0.e.0.w")
BEHIND = {**experts(0, 1, 2), **shapes("l.0.e.0.b l.0.e.1.b l.0.e.2.b l.1.e.0.b l.1.e.1.b")}
"""The stack would be made without the last, one expert short, and no shape of the source shows it."""
RANGE = {
    f"l.{layer}.e_{number}": A
    for layer in range(2)
    for number in range(5)
    if layer == 0 or number % 3 < 2 - number // 4
}
REFUSED = Refusals(
    "rewrite.expansion",
    {
        "absent": refused("b -> c", shapes("bb")),
        "nothing like it": refused("l.$L.w -> m.$L", shapes("l.w")),
        "half of an optional one": refused("a.$L, b.$L -> c.$L, axis=0, optional=1", shapes("a.0")),
        "a missing partner": refused("q.$L, k.$L -> f.$L, axis=0", shapes("q.0 q.1 k.0")),
        "a missing first": refused("q.$L, k.$L -> f.$L, axis=0", shapes("q.0 k.0 k.1")),
        "many missing": refused("q.$L, k.$L -> f.$L, axis=0", shapes("q.0 k.0 q.1 q.2 q.3 q.4")),
        "a missing layer": refused("n.$L, e.$L.$E -> o.$L.$E, axis=0", shapes("n.0 e.0.0 n.1")),
        "a missing expert": refused("l.$L.$E.a, l.$L.$E.b -> l.$L.$E.ab, axis=0", shapes("l.0.0.a l.0.0.b l.1.2.a")),
        "one number twice": refused("e.* -> b, axis=0", shapes("e.1 e.01")),
        "a negative number": refused("m.$L -> m.$L-1", shapes("m.0")),
        "no target": refused("w -> e.*, axis=0", shapes("w")),
        "a target without such names": refused("w.$L -> e.$L.*, axis=0", shapes("w.0 w.1"), shapes("e.0.0")),
        "digits in two ways": refused('"m.$A\\5$B" -> n.$A.$B', shapes("m.151")),
        "an index in the middle": refused(STACK, experts(0, 1, 3, layers=1)),
        "many indices": refused(STACK, experts(0, 1, 2, 10, layers=1)),
        "all before it": refused(STACK, experts(2, layers=1)),
        "of one layer": refused(STACK, {**experts(0, 1, 2), **shapes("l.1.e.4.w l.1.e.6.w l.1.e.9.w")}),
        "far away": refused(STACK, experts(0, 10**30, layers=1)),
        "behind the last": refused(f"{STACK}; l.$L.e.*.b -> l.$L.b, stack=0", BEHIND),
        "of a range": refused("l.$L.e[0:5] -> l.$L.w, stack=0", RANGE),
        "a misspelled word": refused("m.$L.self_atn.q -> q", NEAR),
        "a misspelled end": refused("m.$L.e.*.wx -> q.$L, stack=0", NEAR),
        "nothing near": refused("m.$L.other.kind -> q.$L", NEAR),
        "another number": refused("m.$L.e.1.w -> q.$L", NEAR),
        "a name near those of the target": refused(
            "all -> expert.*.w, axis=0", {"all": (4, 3)}, shapes("experts.0.w experts.1.w")
        ),
        "a target with more": refused(
            STACK, {**experts(0, 1, 2), "l.1.e.3.w": A}, {"l.0.e": (4, *A), "l.1.e": (4, *A)}
        ),
        "a target with a gap": refused("all -> e.*.w, stack=0", {"all": (4, *A)}, shapes("e.0.w e.1.w e.3.w")),
        "a target with fewer": refused("all -> e.*.w, stack=0", {"all": (4, *A)}, shapes("e.0.w e.1.w e.2.w")),
        "a rest of nothing": refused("nothing.** -> **", shapes("module.a")),
        "a rest that becomes one name": refused("module.** -> one", shapes("module.a module.b")),
        "a rest that is there": refused("module.** -> **", shapes("module.head head")),
        "a rest that only the right has": refused("_ -> new.**", shapes("a")),
    },
    kind=RewriteError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_names_that_do_not_fit_together_are_told(case: str) -> None:
    REFUSED.check(case)


@tried(40)
@given(
    st.lists(st.text('ab.0$*" ', min_size=1, max_size=6), min_size=1, max_size=5, unique=True),
    st.text("a.$ ", max_size=3),
)
def test_any_names_come_back_and_others_are_left_alone(names: list[str], prefix: str) -> None:
    shapes = dict.fromkeys((f"{prefix}x{name}" for name in names), (2,)) | {"other": (2,)}
    left = "".join(f"\\{each}" if each in '$*\\"' else each for each in f"{prefix}x")
    checked = sw.Rewrite(f'"{left}**" -> "to.**"').check(shapes)
    assert set(checked.outputs) == {f"to.{name}" for name in names} | {"other"}
    assert set(checked.inverse().check(checked.outputs).outputs) == set(shapes)


@pytest.mark.parametrize(
    ("stored", "wanted", "statement"),
    [
        ("module.", "", "module.** -> **"),
        ("", "module.", "** -> module.**"),
        ("transformer.", "model.", "transformer.** -> model.**"),
        ("a b.", "", '"a b.**" -> **'),
    ],
)
def test_the_error_of_a_load_has_the_statement_that_makes_it_fit(
    tmp_path: Path, stored: str, wanted: str, statement: str
) -> None:
    names = ["layers.0.weight", "layers.1.weight", "norm.weight"]
    torch.save({f"{stored}{name}": torch.full((2,), at) for at, name in enumerate(names)}, tmp_path / "a.pt")
    target = {f"{wanted}{name}": torch.full((2,), 9) for name in names}
    with pytest.raises(CheckpointError) as caught:
        sw.load(tmp_path / "a.pt", target)
    assert f"rewrite=sw.Rewrite({statement!r})" in str(caught.value).partition("\n")[0]
    sw.load(tmp_path / "a.pt", target, rewrite=sw.Rewrite(statement))
    assert [int(target[f"{wanted}{name}"][0]) for name in names] == [0, 1, 2]


def test_names_that_differ_otherwise_have_no_such_statement(tmp_path: Path) -> None:
    torch.save({"module.a.weight": torch.ones(2), "b.weight": torch.ones(3)}, tmp_path / "a.pt")
    for target in ({"a.weight": torch.ones(2), "c.weight": torch.ones(2)}, {"a.weight": torch.ones(3)}):
        with pytest.raises(CheckpointError) as caught:
            sw.load(tmp_path / "a.pt", target)
        assert "sw.Rewrite" not in str(caught.value)
