"""Inverses: what they say, with tensors and by the text alone, and what they refuse and name as lost."""

from collections.abc import Mapping
from typing import Any

import pytest

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite
from tests.refusals import Refusals

A = (2, 3)


LAYERS = {f"l.{at}.{x}": (4, 2) for at in range(3) for x in "qk"}
CIRCLE: dict[str, tuple[int, ...]] = {"m.0.1": (1,), "m.1.0": (2,), "m.2.2": (3,)}


def back(text: str, sources: Mapping[str, Any]) -> list[str]:
    """The lines of the exact inverse, which is tried: it gives the sources back."""
    checked = Rewrite(text).check(sources)
    inverse = checked.inverse(lossy="allow")
    again = inverse.check(checked.outputs, checked.sources)
    assert again.outputs.keys() | again.added == checked.sources.keys()
    assert all(checked.sources[name] == meta for name, meta in again.outputs.items())
    return str(inverse).split("\n")


INVERSES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "uneven join": ("a, b -> c, axis=-1", {"a": A, "b": (2, 4)}, ["c -> a, b, axis=1, sizes='[3,4]'"]),
    "a join of one": ("e.* -> b, axis=0", {"e.0": A}, ["b -> e.0"]),
    "wider": ("a -> b, dtype='float32'", {"a": (A, "float16")}, ["b -> a, dtype='float16'"]),
    "placeholders": ("l.$L.q, l.$L.k -> l.$L.f, axis=1", LAYERS, ["l.$L.f -> l.$L.q, l.$L.k, axis=1"]),
    "layers that differ": (
        "l.$L.q, l.$L.k -> l.$L.f, axis=0",
        LAYERS | {"l.1.k": (2, 2)},
        [
            "l.0.f -> l.0.q, l.0.k, axis=0",
            "l.2.f -> l.2.q, l.2.k, axis=0",
            "l.1.f -> l.1.q, l.1.k, axis=0, sizes='[4,2]'",
        ],
    ),
    "other names that are alike": (
        "l.$L.q -> m.$L",
        {"l.0.q": A, "l.1.q": A, "m.7": A},
        ["m.0 -> l.0.q", "m.1 -> l.1.q"],
    ),
    "offset": (
        "m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET",
        {"m.1": A, "m.2": (3,)},
        ["m.$LAYER_ID-1 -> m.$LAYER_ID"],
    ),
    "swap": ("a -> t; b -> a; t -> b", {"a": A, "b": (1,)}, ["b -> t", "a -> b", "t -> a"]),
    "qkv": (
        "q^T, k^T, v^T -> f, fused_qkv, num_heads=4, num_key_value_groups=2",
        {"q": (8, 2), "k": (4, 2), "v": (4, 2)},
        ["f -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=1, permute='[1,0]'"],
    ),
    "drop": ("a -> _", {"a": A, "b": A}, ["_ -> a"]),
    "a part dropped": ("a -> b, c, axis=0; c -> _", {"a": A}, ["b -> _", "_ -> a"]),
    "copies": ("a -> b; a -> c", {"a": A}, ["c -> _", "b -> a"]),
    "a copy of what is kept": ("a -> a; a -> b", {"a": A}, ["b -> _"]),
    "the same twice": ("a, a -> b, axis=0", {"a": A}, ['b -> a, "copy 0 of a", axis=0', '"copy 0 of a" -> _']),
    "added": ("_ -> n", {"a": A}, ["n -> _, optional=1"]),
    "a circle": ("m.$A.$B -> m.$B.$A", CIRCLE, ["m.$B.$A -> m.$A.$B"]),
    "a circle that is turned": (
        "m.$A.$B^T -> m.$B.$A",
        CIRCLE | {"m.0.1": (1, 2)},
        [
            "m.1.0 -> \"new m.0.1\", permute='[1,0]'",
            'm.0.1 -> "new m.1.0"',
            '"new m.0.1" -> m.0.1',
            '"new m.1.0" -> m.1.0',
        ],
    ),
    "an order in which none overwrites another": (
        "m.$L^T -> m.$L+1",
        {"m.0": (1,), "m.1": (2, 3), "m.2": (3,)},
        ["m.1 -> m.0", "m.2 -> m.1, permute='[1,0]'", "m.3 -> m.2"],
    ),
}


@pytest.mark.parametrize("name", INVERSES)
def test_an_exact_inverse_says_everything(name: str) -> None:
    text, sources, expected = INVERSES[name]
    assert back(text, sources) == expected


TEXTUAL = {
    "a, b -> c, axis=0": "c -> a, b, axis=0, sizes=recorded",
    "a -> b, c, axis=1": "b, c -> a, axis=1",
    "a^T, b -> c, axis=0": "c -> transposed.a, b, axis=0, sizes=recorded\ntransposed.a^T -> a",
    "a^T -> b, reshape='[4]', dtype='float32'": "b -> a, dtype=recorded, reshape=recorded, permute='[]'",
    "a -> b, src_dtype='float16', dst_dtype='float32'": "b -> a, src_dtype='float32', dst_dtype='float16'",
    "m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET": "m.$LAYER_ID-1 -> m.$LAYER_ID",
    "e.* -> b, stack=0": "b -> e.*, stack=0",
    "x -> y, fused_ffn, src_tp=2": "y -> x, fused_ffn, dst_tp=2",
    "a -> b; b -> c": "c -> b\nb -> a",
    "a -> a": "",
    "module.** -> **": "** -> module.**",
    "_ -> n": "n -> _",
}


@pytest.mark.parametrize("text", TEXTUAL)
def test_without_tensors_an_inverse_says_what_the_text_tells(text: str) -> None:
    inverse = Rewrite(text).inverse()
    assert str(inverse) == TEXTUAL[text]
    assert inverse.inverse() == Rewrite(text)


def test_what_the_text_does_not_tell_comes_from_the_target() -> None:
    inverse = Rewrite("a, b -> c, axis=0; e.* -> f, stack=0, dtype='float32'").inverse()
    sources = {"c": (5, 2), "f": (2, 3)}
    target = {"a": (2, 2), "b": (3, 2), "e.0": ((3,), "float16"), "e.7": ((3,), "float16")}
    assert inverse.check(sources, target).outputs.keys() == target.keys()
    assert inverse.apply(sources, recorded=target).outputs.keys() == target.keys()


def test_names_for_what_is_in_between_are_none_that_the_user_has() -> None:
    text = 'q^T, k -> qk, axis=0\n"part 0 of qk" -> z\n"transposed.q" -> y'
    shapes = {"q": (2, 3), "k": (1, 2), "part 0 of qk": (5,), "transposed.q": (7,)}
    rewrite = Rewrite(text)
    checked = rewrite.check(shapes)
    for inverse in (checked.inverse(), rewrite.inverse()):
        back = inverse.check(checked.outputs, shapes).outputs
        assert {name: meta.shape for name, meta in back.items()} == shapes
    assert "transposed_.q" in str(rewrite.inverse())


LOSSY: dict[str, dict[str, Any]] = {
    "a -> _": {"a": A},
    "l.$L.q -> _": LAYERS,
    "a -> b, c, axis=0\nc -> _": {"a": A},
    "a, b -> t, axis=0; t -> _": {"a": A, "b": A},
    "a, b -> t, axis=0; t -> u, v, axis=0, sizes='[3,1]'; v -> _": {"a": A, "b": A},
    "l.$L.q -> m.$L, dtype='bfloat16'": LAYERS,
    "a -> b\na -> c": {"a": A},
    "a -> a\na -> c": {"a": A},
    "a -> x, src_dtype='float32', dst_dtype='float16'": {"a": A},
}


def inverted(text: str, *sources: Any) -> Any:
    return lambda: Rewrite(text).inverse(*sources)


def undone(text: str, *arguments: Any) -> Any:
    return lambda: Rewrite(text).inverse().check(*arguments)


REFUSED = Refusals(
    "rewrite.inversion",
    {
        **{f"of tensors: {text}": inverted(text, sources) for text, sources in LOSSY.items()},
        **{
            f"by the text: {text}": inverted(text)
            for text in ("a -> _", "a -> b\na -> c", "a -> a\na -> c", [*LOSSY][-1])
        },
        "by the text: sizes and dtypes": undone(
            "a, b -> c, axis=0; e.* -> f, stack=0, dtype='float32'", {"c": (5, 2), "f": (2, 3)}
        ),
        "a target that does not fit": undone("a, b -> c, axis=0", {"c": (4,)}, {"a": (2,)}),
        "a target that tells losses": undone("a -> b, dtype='float16'", {"b": (A, "float16")}, {"a": A}),
        "a part that an optional drop has": undone("a -> b\nx -> _, optional=1", {"b": (2,)}, {"a": (2,), "x": (3,)}),
    },
    kind=RewriteError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_undone_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_a_copy_next_to_what_the_target_has_itself_is_a_loss() -> None:
    (loss,) = Rewrite("a -> b").check({"a": A}, target={"a": A, "b": A}).losses
    assert loss == "line 1, `a -> b`, copies a which comes out itself: copies may differ later"
