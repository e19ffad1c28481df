"""Evaluation: each form of a statement equals the oracle and is undone; what is read, kept, dropped, added, refused."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.errors import RewriteError
from shardwise.rewrite import Checked, Rewrite, TensorLike, TensorMeta
from tests.refusals import Refusals
from tests.rewrite.filling import assert_same, proved, resolved
from tests.rewrite.oracle import Tensor, interpret, metas, split_line
from tests.rewrite.strategies import Case, cases, numbered, proven

Shape = tuple[int, ...]


Nested = dict[str, object]


def counted(**shapes: Shape) -> dict[str, Tensor]:
    """Sources in the order written: the i-th holds i * 100 + arange of its size."""
    return {
        name.replace("__", "."): Tensor(np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) + at * 100)
        for at, (name, shape) in enumerate(shapes.items())
    }


def sources_of(shapes: dict[str, Shape], dtype: str = "float32") -> dict[str, Tensor]:
    return {name: Tensor(numbered(at, shape, dtype), dtype) for at, (name, shape) in enumerate(shapes.items())}


EXAMPLES: dict[str, tuple[str, dict[str, Tensor], Nested]] = {
    "1 join": ("a,c -> b, axis=0", counted(a=(1, 2), c=(2, 2)), {"b": [[0, 1], [100, 101], [102, 103]]}),
    "2 part": (
        "a -> b,c, axis=0",
        counted(a=(4, 2)),
        {"b": [[0, 1], [2, 3]], "c": [[4, 5], [6, 7]]},
    ),
    "3 transpose": ("a^T -> b", counted(a=(2, 3)), {"b": [[0, 3], [1, 4], [2, 5]]}),
    "4 permute": ("a -> b, permute='[2,0,1]'", counted(a=(1, 2, 3)), {"b": [[[0, 3]], [[1, 4]], [[2, 5]]]}),
    "5 star": (
        "e.*.w -> b, axis=0",
        counted(e__0__w=(1,), e__10__w=(1,), e__2__w=(1,), e__1__w=(1,)),
        {"b": [0, 300, 200, 100]},
    ),
    "6 offset": (
        "m.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w",
        counted(m__1__w=(2,), m__2__w=(2,)),
        {"m.0.w": [0, 1], "m.1.w": [100, 101]},
    ),
    "7 fused_qkv": (
        "qkv -> q,k,v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0",
        counted(qkv=(8,)),
        {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]},
    ),
    "8 fused_ffn": (
        "gu -> gu, fused_ffn, src_tp=2, dst_tp=1",
        counted(gu=(8,)),
        {"gu": [0, 1, 4, 5, 2, 3, 6, 7]},
    ),
    "9 swap": ("a -> t; c -> a; t -> c", counted(a=(2,), c=(3,)), {"a": [100, 101, 102], "c": [0, 1]}),
    "10 drop": ("x -> _", counted(x=(2,), y=(1,)), {"y": [100]}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_the_specification_hold_to_the_element(name: str) -> None:
    text, sources, expected = EXAMPLES[name]
    actual = proved(text.replace(";", "\n"), sources)
    assert {key: tensor.values.tolist() for key, tensor in actual.items()} == expected
    assert_same(resolved(Rewrite(text).check(metas(sources)), sources, {}), actual)


QKV = "num_heads=4, num_key_value_groups=2"


THREE: dict[str, Shape] = {"q": (3, 8), "k": (3, 4), "v": (3, 4)}


OTHER: dict[str, tuple[int, ...]] = {"q": (3, 8), "k": (3, 4), "v": (3, 2)}


WIDE: dict[str, tuple[int, ...]] = {"q": (3, 8), "k": (3, 4), "v": (3, 12)}


FORMS: dict[str, tuple[str, dict[str, Shape]]] = {
    "concatenate three": ("a, b, d -> c, axis=1", {"a": (2, 3), "b": (2, 0), "d": (2, 1)}),
    "transpose, concatenate": ("a^T, b -> c, axis=1", {"a": (2, 3), "b": (3, 1)}),
    "fused_qkv joins one dim": (f"q,k,v -> qkv, fused_qkv, {QKV}", {"q": (8,), "k": (4,), "v": (4,)}),
    "fused_qkv joins transposed": (f"q^T,k^T,v^T -> f, fused_qkv, {QKV}", {n: s[::-1] for n, s in THREE.items()}),
    "fused_qkv of one group": ("a -> q,k,v, fused_qkv, num_heads=3, num_key_value_groups=1", {"a": (1, 10)}),
    "fused_qkv joins, other value heads": (f"q,k,v -> x, fused_qkv, {QKV}, axis=1", OTHER),
    "fused_qkv joins, value heads that are said": (f"q,k,v -> x, fused_qkv, {QKV}, sizes='[8,4,12]'", WIDE),
    "fused_qkv parts, other value heads": (f"x -> q,k,v, fused_qkv, {QKV}, sizes='[8,4,2]'", {"x": (3, 14)}),
    "fused_qkv_old joins, other value heads": (f"q,k,v -> x, fused_qkv_old, {QKV}, dst_tp=2", OTHER),
    "fused_qkv_old parts, other value heads": (
        f"x^T -> q,k,v, fused_qkv_old, {QKV}, src_tp=2, sizes='[8,4,2]', axis=1",
        {"x": (14, 3)},
    ),
    "fused_qkv_old again, other value heads": (
        f"x -> x, fused_qkv_old, {QKV}, src_tp=1, dst_tp=2, sizes='[8,4,12]'",
        {"x": (3, 24)},
    ),
    "two permutes": ("a -> b, permute='[1,2,0]', permute='[1,0,2]'", {"a": (2, 3, 4)}),
    "permutes on both sides of a join": (
        "a^T, b^T -> c, permute='[1,0,2]', permute='[]', axis=1, permute='[2,0,1]', permute='[1,2,0]'",
        {"a": (2, 3, 4), "b": (2, 3, 4)},
    ),
    "two reshapes, and a permute after a transpose": (
        "a^T -> b, permute='[]', reshape='[2,12]', reshape='[4,-1]', permute='[]', permute='[]'",
        {"a": (2, 3, 4)},
    ),
    "fused_ffn again, rows": ("x -> y, fused_ffn, axis=0, src_tp=3, dst_tp=2", {"x": (24, 2)}),
    "fused_ffn of degree 1": ("x -> y, fused_ffn", {"x": (2, 4)}),
    "fused_qkv_old parts transposed": (f"x^T -> q,k,v, fused_qkv_old, {QKV}", {"x": (16, 3)}),
    "array on the right": ("w -> w[1:3], axis=0", {"w": (4,)}),
    "assigned again": ("a -> a, permute='[1,0]'\na -> b, c, axis=0\nb^T -> b", {"a": (3, 4)}),
    "one half turned before it is joined again": (
        "w -> a, b, axis=0\nb -> b, permute='[0,2,1]'\na, b -> w, axis=0",
        {"w": (4, 3, 3)},
    ),
    "padded after a transpose": ("a^T -> x, pad='[-1,7]', reshape='[21]'", {"a": (4, 3)}),
    "padded, then joined": (
        "a -> t, pad='[6,-1]', fill=5\nt, b -> x, axis=0, permute='[]'",
        {"a": (4, 3), "b": (2, 3)},
    ),
    "padded, then split": ("a -> t, pad='[6,4]', fill='0.3'\nt -> x, y, axis=0", {"a": (4, 3)}),
    "joined, then padded": ("a, b -> x, axis=0, pad='[8,3]', fill=1", {"a": (4, 3), "b": (2, 3)}),
    "padded, then stacked": ("a, b -> x, pad='[4,5]', stack=1", {"a": (4, 3), "b": (4, 3)}),
    "padded and cropped": ("a -> t, pad='[8,-1]', fill=2\nt -> x, crop='[6,-1]', fill=2", {"a": (4, 3)}),
    "several operations": ("a^T, b^T -> c, axis=0, reshape='[-1]'", {"a": (2, 3), "b": (2, 5)}),
    "reshape across": ("a -> b, reshape='[4,3]'", {"a": (2, 6)}),
    "reshape of a transposed": ("a^T -> b, reshape='[2,6]'", {"a": (4, 3)}),
    "quoted": ('"a-b/c d" -> "0", axis=0', {"a-b/c d": (2,)}),
    "ragged": (
        "l.$L.e.$E.a, l.$L.e.$E.b -> l.$L.e.$E.ab, axis=0",
        {"l.0.e.0.a": (1,), "l.0.e.0.b": (2,), "l.1.e.5.a": (3,), "l.1.e.5.b": (1,)},
    ),
    "star beside a placeholder": (
        "l.$L.e.*.w -> l.$L.w, stack=0, gaps=1",
        {"l.0.e.10.w": (2,), "l.0.e.9.w": (2,), "l.1.e.0.w": (3,)},
    ),
    "shift on the left": ("l.$L-1.w -> m.$L.w", {"l.0.w": (1,), "l.1.w": (2,)}),
    "optional": ("x.$L.w -> y.$L.w, optional=1\na -> b", {"a": (1,)}),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_equals_the_oracle_and_is_undone(name: str) -> None:
    text, shapes = FORMS[name]
    sources = sources_of(shapes)
    outputs = proved(text, sources)
    if "crop" not in text:  # by the text alone what was cropped comes back as its fill
        back = Rewrite(text).inverse(lossy="allow").check(metas(outputs), metas(sources))
        assert_same(resolved(back, outputs, {}), {key: each for key, each in sources.items() if key in back.outputs})


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("source", ["float16", "float32", "bfloat16"])
def test_a_cast_gives_what_the_dtype_holds(source: str, dtype: str) -> None:
    sources = sources_of({"a": (5, 7)}, source)
    outputs = proved(f"a^T -> b, dtype='{dtype}'", sources)
    assert outputs["b"].dtype == dtype
    checked = Rewrite(f"a -> b, dtype='{dtype}'").check(metas(sources))
    assert checked.invertible == (dtype in (source, "float32"))
    assert_same(proved(f"a^T -> b, src_dtype='{source}', dst_dtype='{dtype}'", sources), outputs)


def test_a_value_passes_through_every_dtype_of_its_casts() -> None:
    sources = sources_of({"a": (50,)})
    text = "a -> t, dtype='float16'\nt -> u, dtype='bfloat16'\nu -> b, dtype='float32'"
    outputs = proved(text, sources)
    once = proved("a -> t, dtype='bfloat16'\nt -> b, dtype='float32'", sources)
    assert (outputs["b"].values != once["b"].values).any()


def test_a_star_on_the_right_takes_the_names_of_the_target() -> None:
    sources = sources_of({"w": (6, 2)})
    target = {"e.10.w": (2, 2), "e.0.w": (2, 2), "e.9.w": (2, 2)}
    checked = Rewrite("w -> e.*.w, axis=0").check(metas(sources), target)
    expected = interpret("w -> e.*.w, axis=0", sources, dict.fromkeys(target, ()))
    assert_same(resolved(checked, sources, {}), expected)
    assert expected["e.9.w"].values.tolist() == sources["w"].values[2:4].tolist()
    assert_same(resolved(checked.inverse().check(metas(expected)), expected, {}), sources)


def test_a_known_target_takes_variables_that_were_read_too() -> None:
    sources = sources_of({"embed": (4, 2)})
    checked = Rewrite("embed -> lm_head").check(metas(sources), {"embed": (4, 2), "lm_head": (4, 2)})
    same = Tensor(sources["embed"].values)
    assert_same(resolved(checked, sources, {}), {"embed": same, "lm_head": same})


def test_an_identity_statement_keeps_what_is_read() -> None:
    for text in ("a -> a\na -> b", "a -> b\na -> a"):
        assert Rewrite(text).check({"a": (2,)}).outputs.keys() == {"a", "b"}
    assert Rewrite("a -> b").check({"a": (2,)}).outputs.keys() == {"b"}


def test_the_degree_of_a_layout_goes_with_the_dim_through_a_transposition() -> None:
    sources = sources_of({"gu": (12, 2)})
    known = {"gu": TensorMeta((12, 2), "float32", (2, 1))}
    target = {"gu": TensorMeta((2, 12), "float32", (1, 3))}
    text = "gu^T -> gu, fused_ffn"
    with_degrees = {"gu": Tensor(sources["gu"].values, "float32", (2, 1))}
    expected = interpret(text, with_degrees, {"gu": (1, 3)})
    assert_same(resolved(Rewrite(text).check(known, target), sources, {}), expected)


def test_a_parameter_of_which_a_part_is_dropped_is_lost_with_all_its_state() -> None:
    known: dict[str, Shape] = {"a": (2, 2), "optimizer/a/exp_avg": (2, 2), "optimizer/a/step": ()}
    checked = Rewrite("a -> b, c, axis=0\nb -> _").check(known)
    assert checked.outputs.keys() == {"c", "optimizer/c/exp_avg", "optimizer/c/step"}
    assert not checked.invertible
    back = checked.inverse(lossy="allow").check(checked.outputs, known)
    assert back.added == known.keys()


def test_state_of_another_shape_follows_renames_only() -> None:
    shapes: dict[str, Shape] = {"a": (4, 2), "optimizer/a/row": (4,)}
    assert Rewrite("a -> b").check(shapes).outputs["optimizer/b/row"].shape == (4,)


MOMENTS = {"optimizer/a/exp_avg": (3, 2), "optimizer/b/exp_avg": (1, 2), "optimizer/a/step": (), "optimizer/b/step": ()}


def test_statements_on_the_model_hold_for_the_optimizers_state() -> None:
    sources = sources_of({"a": (3, 2), "b": (1, 2), **MOMENTS}, "bfloat16")
    sources |= {name: Tensor(numbered(7, ())) for name in sources if name.endswith("step")}
    sources |= {name: Tensor(tensor.values) for name, tensor in sources.items() if name.endswith("exp_avg")}
    text = "a, b -> c, axis=0, permute='[1,0]', dtype='float32'"
    outputs = proved(text, sources)
    assert outputs.keys() == {"c", "optimizer/c/exp_avg", "optimizer/c/step"}
    assert outputs["optimizer/c/exp_avg"].shape == (2, 4)
    assert outputs["optimizer/c/step"].shape == ()
    checked = Rewrite(text).check(metas(sources))
    assert [set(group) for group in checked.agree] == [{"optimizer/a/step", "optimizer/b/step"}]


def test_the_table_shows_padding_and_a_note_says_what_is_cropped() -> None:
    text = "a -> x, pad='[6,-1]', fill='-inf', dtype='bfloat16'; b -> y, crop='[-1,2]', fill=3"
    assert Rewrite(text).explain(metas(PADDED)) == "\n".join(
        [
            "target  box         source  box         operations",
            "x       [0:4, 0:3]  a       [0:4, 0:3]  float32 -> bfloat16",
            "x       [4:6, 0:3]                      fill -inf, float32 -> bfloat16",
            "y       [0:2, 0:2]  b       [0:2, 0:2]",
            "note: line 1, `b -> y, crop='[-1,2]', fill=3`, crops b from [2, 3] to [2, 2]: the way back fills them "
            "with 3, whatever the elements were",
        ]
    )


PADDED = {"a": Tensor(numbered(1, (4, 3))), "b": Tensor(numbered(2, (2, 3)))}


def test_what_was_cropped_comes_back_as_the_fill_says() -> None:
    text = "a -> x, crop='[3,2]', fill=9\nb -> y, pad='[5,-1]', fill=9"
    outputs = interpret(text, PADDED)
    expected = {"b": PADDED["b"], "a": Tensor(PADDED["a"].values.copy())}
    expected["a"].values[3:], expected["a"].values[:, 2:] = 9, 9
    forward = Rewrite(text)
    checked = forward.check(metas(PADDED))
    assert checked.invertible
    assert str(checked.inverse()) == "y -> b, crop='[2,3]', fill=9\nx -> a, pad='[4,3]', fill=9"
    for inverse in (checked.inverse(), forward.inverse(), Rewrite(str(checked.inverse()))):
        assert_same(resolved(inverse.check(metas(outputs), metas(PADDED)), outputs, {}), expected)
    assert str(forward.inverse()) == "y -> b, crop=recorded, fill=9\nx -> a, pad=recorded, fill=9"
    assert forward.inverse().inverse() == forward


def test_a_crop_and_a_pad_in_turn_are_not_taken_for_nothing() -> None:
    """`apply_ops` hands the tensor itself back where an operation undoes the one before, and here it does not."""
    text = "a -> t, crop='[2,-1]', fill=0\nt -> x, pad='[4,-1]'"
    outputs = resolved(Rewrite(text).check(metas(PADDED)), PADDED, {})
    assert_same(outputs, interpret(text, PADDED))
    assert not outputs["x"].values[2:].any()


A = (2, 3)


def names(text: str, sources: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> set[str]:
    return set(Rewrite(text).check(sources, target).outputs)


def test_what_nobody_reads_comes_out_and_what_is_read_is_used_up() -> None:
    assert names("a -> b", {"a": A, "c": A}) == {"b", "c"}
    assert names("a -> t; t -> b", {"a": A}) == {"b"}
    assert names("a -> b; b -> a", {"a": A}) == {"a"}


def test_a_tensor_feeds_several_statements() -> None:
    assert names("a -> b; a -> c", {"a": A}) == {"b", "c"}
    assert names("l.$L -> b.$L; l.$L -> c.$L", {"l.0": A, "l.1": A}) == {"b.0", "b.1", "c.0", "c.1"}


def test_a_pattern_stands_for_what_was_not_used_up_before() -> None:
    assert names("l.0 -> first; l.$L -> m.$L", {"l.0": A, "l.1": A}) == {"first", "m.1"}
    assert names("m.$L -> m.$L-1; m.$L -> n.$L", {"m.1": A, "m.2": A}) == {"n.0", "n.1"}
    assert names("m.$L -> m.$L; m.0 -> x; m.$L -> n.$L", {"m.0": A, "m.1": A}) == {"m.0", "m.1", "x", "n.0", "n.1"}


def test_instances_of_one_statement_read_before_any_writes() -> None:
    checked = Rewrite("m.$L.w -> m.$L+1.w").check({"m.0.w": (1,), "m.1.w": (2,), "m.2.w": (3,)})
    assert {name: meta.shape for name, meta in checked.outputs.items()} == {"m.1.w": (1,), "m.2.w": (2,), "m.3.w": (3,)}


def test_a_variable_may_be_assigned_again_once_it_was_read_or_dropped() -> None:
    for text in ("a -> b\nb -> d\nc -> b", "a -> b\nb -> _\nc -> b", "a -> _; c -> a"):
        assert Rewrite(text).check({"a": (2,), "c": (2,)})


STATE: dict[str, TensorLike] = {
    "optimizer/a/step": ((), "float32"),
    "optimizer/a/m": (A, "float32"),
    "optimizer/b/step": ((), "float32"),
    "optimizer/b/m": (A, "float32"),
}


MODEL: dict[str, TensorLike] = {"a": (A, "bfloat16"), "b": (A, "bfloat16")}


def test_state_goes_where_its_parameter_goes_and_is_not_cast() -> None:
    checked = Rewrite("a, b -> c, axis=0, dtype='float16'; c^T -> d").check(MODEL | STATE)
    assert checked.outputs == {
        "d": TensorMeta((3, 4), "float16"),
        "optimizer/d/step": TensorMeta((), "float32"),
        "optimizer/d/m": TensorMeta((3, 4), "float32"),
    }
    assert checked.agree == (("optimizer/a/step", "optimizer/b/step"),)
    assert checked.inverse(lossy="allow").check(checked.outputs).outputs.keys() == (MODEL | STATE).keys()


def test_state_is_dropped_kept_and_added_with_its_parameter() -> None:
    assert names("a -> _", MODEL | STATE) == {"b", "optimizer/b/step", "optimizer/b/m"}
    assert names("a -> a; a -> c", MODEL | STATE) == {"a", "b", "c"} | set(STATE) | {
        "optimizer/c/step",
        "optimizer/c/m",
    }
    target = MODEL | STATE | {"n": A, "optimizer/n/m": A}
    assert Rewrite("_ -> n").check(MODEL | STATE, target).added == {"n", "optimizer/n/m"}


def test_state_that_a_statement_has_read_by_its_name_stays_behind() -> None:
    text = '"optimizer/a/m" -> m; a -> c'
    assert names(text, MODEL | STATE) == {"b", "c", "m", "optimizer/c/step", "optimizer/b/step", "optimizer/b/m"}


def test_state_does_not_follow_to_the_name_of_a_state() -> None:
    text = 'a -> a; a -> "optimizer/a/master"'
    assert names(text, MODEL | STATE) == {"a", "b", "optimizer/a/master", *STATE}


TELLING = {"w": (3,), "optimizer/w/m": (3,), "optimizer/w/product": ()}
"""A parameter with dims: `m` has a value per element, `product` one for all."""


def shapes_of(checked: Checked) -> dict[str, tuple[int, ...]]:
    return {name: meta.shape for name, meta in checked.outputs.items()}


def test_parameters_with_dims_tell_what_the_state_of_those_without_is() -> None:
    apart: dict[str, Any] = {"a": (), "b": ()}
    apart |= {f"optimizer/{name}/{key}": () for name in "ab" for key in ("m", "product", "step")}
    joined = {"c": (2,), "optimizer/c/m": (2,), "optimizer/c/product": (), "optimizer/c/step": ()}
    checked = Rewrite("a, b -> c, stack=0").check(TELLING | apart)
    assert shapes_of(checked) == TELLING | joined
    assert ("optimizer/a/product", "optimizer/b/product") in checked.agree
    assert shapes_of(checked.inverse().check(checked.outputs)) == TELLING | apart
    checked = Rewrite("c -> a, b, stack=0").check(TELLING | joined)
    assert shapes_of(checked) == TELLING | apart
    assert shapes_of(checked.inverse().check(checked.outputs)) == TELLING | joined


def test_state_of_a_parameter_without_dims_goes_along_where_only_the_name_or_the_dtype_changes() -> None:
    for text in ("a -> b", "a^T -> b", "a -> b, dtype='float16'", "a -> b, permute='[]'"):
        assert shapes_of(Rewrite(text).check({"a": (), "optimizer/a/p": ()})) == {"b": (), "optimizer/b/p": ()}


def tied(text: str) -> Checked:
    return Rewrite(text).check({"embed": A, "x": A}, aliases={"head": "embed"})


def test_ties_of_sources_become_ties_of_outputs() -> None:
    assert dict(tied("x -> y").ties) == {"head": "embed"}
    assert dict(tied("embed -> e; head -> h").ties) == {"h": "e"}
    assert dict(tied("embed^T -> e; head -> h, permute='[1,0]'").ties) == {"h": "e"}
    assert tied("embed^T -> e").ties == {}
    assert set(tied("embed^T -> e").outputs) == {"e", "head", "x"}
    checked = tied("embed -> _")
    assert set(checked.outputs) == {"head", "x"}
    assert not checked.dropped
    assert not checked.losses


def test_of_tied_outputs_the_one_that_the_target_wants_stands_for_the_others() -> None:
    checked = Rewrite("embed -> e; head -> h").check({"embed": A}, {"h": A}, aliases={"head": "embed"})
    assert (set(checked.outputs), dict(checked.ties)) == ({"h"}, {"e": "h"})


def test_without_comparison_a_target_only_tells_names() -> None:
    checked = Rewrite("w -> e.*, axis=0").apply({"w": (4,), "x": A}, wanted={"e.0": (7,), "e.1": (7,), "y": A})
    assert checked.outputs == {
        "x": TensorMeta(A, "float32"),
        "e.0": TensorMeta((2,), "float32"),
        "e.1": TensorMeta((2,), "float32"),
    }


def test_dropped_are_the_sources_of_which_nothing_comes_out() -> None:
    checked = Rewrite("a, b -> t, axis=0; t -> c, d, axis=0; d -> _; e -> _").check({"a": A, "b": A, "e": (0,), "f": A})
    assert checked.dropped == {"b", "e"}
    assert set(checked.outputs) == {"c", "f"}


def problems_of(text: str, sources: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    with pytest.raises(RewriteError) as refused:
        Rewrite(text).check(sources, target)
    # Notes say what may be wrong, beside what is.
    return tuple(each for each in refused.value.problems if not each.startswith("note: "))


Metas = dict[str, tuple[Shape, str]]


def _outputs(case: Case) -> Metas:
    outputs: Metas = metas(interpret(case.text, case.sources))
    return outputs


@proven
@given(cases(), st.data())
def test_a_source_that_is_not_there_is_found_wherever_it_is_read(case: Case, data: st.DataObject) -> None:
    first_reads: dict[str, int] = {}
    for number, line in enumerate(case.text.splitlines(), start=1):
        for name in split_line(line).left:
            first_reads.setdefault(name.removesuffix("^T"), number)
    named = first_reads.keys() & case.sources.keys()
    read = sorted(name for name in named if not re.match(r"f\d+\.\d", name))  # what only patterns find may be missing
    assume(read)
    name = data.draw(st.sampled_from(read))
    known = {other: meta for other, meta in metas(case.sources).items() if other != name}
    problems = problems_of(case.text, known)
    assert any(name in problem and f"line {first_reads[name]}," in problem for problem in problems), problems


@proven
@given(cases(), st.data())
def test_a_target_of_other_names_shapes_or_dtypes_is_refused_wherever_it_differs(
    case: Case, data: st.DataObject
) -> None:
    target = _outputs(case)
    assume(target)
    rewrite = Rewrite(case.text)
    expected = interpret(case.text, case.sources)
    assert_same(resolved(rewrite.check(metas(case.sources), target), case.sources, {}), expected)
    name = data.draw(st.sampled_from(sorted(target)))
    shape, dtype = target[name]
    sizes = list(shape)
    for dim in range(len(sizes)):
        for change in (1, -1) if sizes[dim] else (1,):
            other = (*sizes[:dim], sizes[dim] + change, *sizes[dim + 1 :])
            (problem,) = problems_of(case.text, metas(case.sources), {**target, name: (other, dtype)})
            assert name in problem
    for other in ((*shape, 1), (2, *shape)):
        assert name in problems_of(case.text, metas(case.sources), {**target, name: (other, dtype)})[0]
    assert name in problems_of(case.text, metas(case.sources), {**target, name: (shape, "int64")})[0]
    assert any("more" in p for p in problems_of(case.text, metas(case.sources), {**target, "more": (shape, dtype)}))
    less = {key: meta for key, meta in target.items() if key != name}
    assert any(name in problem for problem in problems_of(case.text, metas(case.sources), less))


@proven
@given(cases(lossy=True))
def test_the_order_in_which_the_sources_are_listed_does_not_matter(case: Case) -> None:
    names = sorted(case.sources)
    known = metas(case.sources)
    one = Rewrite(case.text).check(known)
    other = Rewrite(case.text).check({name: known[name] for name in reversed(names)})
    assert dict(one.outputs) == dict(other.outputs)
    assert (one.dropped, one.invertible, sorted(one.losses)) == (other.dropped, other.invertible, sorted(other.losses))
    missing = {name: known[name] for name in names[1:]}
    verdicts = []
    for order in (list(missing), list(reversed(missing))):
        try:
            Rewrite(case.text).check({name: missing[name] for name in order})
            verdicts.append("fits")
        except RewriteError as refused:
            verdicts.append(str(refused))
    assert verdicts[0] == verdicts[1]


def refused(text: str, sources: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> Any:
    return lambda: Rewrite(text).check(sources, target)


SOURCES: dict[str, Any] = {
    "a": A,
    "c": (2, 4),
    "d": (A, "float16"),
    "f": (A, "float8_e4m3fn"),
    "q": (2, 8),
    "k": (2, 4),
    "v": (2, 4),
}
SOURCES |= {"e.0": A, "e.1": A, "s": (), "t": (), "row": (5, 2), "l.0.x": A, "l.0.y": A, "l.1.y": A}
HEADS = "num_heads={}, num_key_value_groups={}"
UNFIT = f"""
a, c -> x, axis=0
a, d -> x, axis=0
a, d -> x, stack=0
a, d -> x, fused_ffn
a, c -> x, stack=0
s, t -> x, axis=0
a, c -> x, axis=1, sizes='[4,3]'
a -> x, y, axis=1
a -> x, y, axis=1, sizes='[1,1]'
a -> x, y, axis=-3
a, k -> x, axis=2
a -> x, y, stack=1
a, c -> x, stack=3
a -> x, permute='[0]'
a -> x, permute='[0,1,2]'
a -> x, reshape='[4]'
a -> x, reshape='[4,-1]'
a -> x, src_dtype='float16', dst_dtype='float32'
d -> x, src_dtype='bfloat16', dst_dtype='float32'
q,k,v -> x, fused_qkv, {HEADS.format(3, 3)}
q,k,v -> x, fused_qkv, {HEADS.format(4, 1)}
q,k,q -> x, fused_qkv, {HEADS.format(2, 1)}
q,k,a -> x, fused_qkv, {HEADS.format(4, 2)}
q,k,v -> x, fused_qkv, {HEADS.format(4, 2)}, sizes='[4,4,8]'
q -> x,y,z, fused_qkv, {HEADS.format(4, 2)}, axis=0
row -> x,y,z, fused_qkv, {HEADS.format(4, 2)}, axis=0
q -> q, fused_qkv_old, {HEADS.format(2, 1)}, dst_tp=2
q -> q, fused_ffn, src_tp=3
k -> g, u, fused_ffn, src_tp=4
a, a -> x, fused_ffn, dst_tp=4
a, c -> x, fused_ffn
row -> y, fused_ffn, axis=2
a -> b, c2, quantise='[2]'
a -> b, c2, quantise='[2,2]', permute='[]'
a -> b, c2, quantise='[2,2]', element_dtype='int8'
a -> b, c2, dtype='float64', quantise='[2,2]'
a -> b, c2, quantise='[2,2]', scale_dtype=recorded
a -> b, c2, quantise='[1,-1]', scale_dims=0
a, c -> b, dequantise='[1,1]'
f^T, a -> b, dequantise='[1,1]'
f, a -> b, dequantise='[2,2]'
a -> b, pad='[1,-1]'
a -> b, crop='[-1,4]'
a -> b, crop='[1]'
a, c -> b, axis=1, pad='[1,-1]'
a -> b, pad=recorded
a -> b, dtype='uint8', pad='[3,-1]', fill=256
d -> b, pad='[3,-1]', fill='1e5'
a -> x, fused_ffn
a -> c
a -> x; d -> x
e.$E -> x
a -> _; a -> x
zz -> x
_ -> n; n -> x
_ -> a
_ -> n; a -> n
a -> n.*, axis=0
""".strip().splitlines()

UNTOLD: dict[str, dict[str, Any]] = {
    "a, b -> c, stack=0": {"a": (), "b": (), "optimizer/a/p": (), "optimizer/b/p": ()},
    "c -> a, b, stack=0": {"c": (2,), "optimizer/c/p": ()},
    "d -> a, b, stack=0": {"d": (2,), "optimizer/d/p": (2,)},
    "c -> c, reshape='[]'": {"c": (1,), "optimizer/c/p": ()},
    "a -> a, reshape='[1]'": {
        "a": (), "optimizer/a/p": (), "w": (2,), "optimizer/w/p": (2,), "x": (2,), "optimizer/x/p": ()
    },
}  # fmt: skip
"""State of parameters without dims: nothing tells whether it is one value, or one per element."""

ALL_AT_ONCE = """a, c -> x, axis=5
x^T -> y
y -> z, permute='[0,1,2,3]'
l.$L.x, l.$L.y -> l.$L.z, axis=0
l.$L.z -> l.$L.u
l.0.u -> v2
w -> w2, dtype='float16'
nothing -> here
here -> there
"""
"""What follows from a finding is none."""

REFUSED = Refusals(
    "rewrite.evaluation",
    {
        **{text: refused(text.replace("; ", "\n"), SOURCES) for text in UNFIT},
        **{f"untold: {text}": refused(text, sources) for text, sources in UNTOLD.items()},
        "all findings at once": refused(ALL_AT_ONCE, SOURCES),
        "many instances": refused("l.$L -> m.$L, axis=0, permute='[0]'", {f"l.{at}": A for at in range(5)}),
        "an expert of another shape": refused(
            "l.$L.e.*.w -> l.$L.w, axis=0",
            {f"l.{layer}.e.{at}.w": (2, 4 if (layer, at) == (1, 2) else 3) for layer in range(2) for at in range(3)},
        ),
        "a name that is near": refused("model.weihgt -> w", {"model.weight": (2,), "other": (1,)}),
        "a target": refused("a -> b; c -> d", {"a": A, "c": A, "e": A}, {"b": (3, 2), "d": (A, "float16"), "f": A}),
        "a target without what is added": refused("_ -> z", {"a": A}, {"a": A}),
        "state of one of the joined": refused("a, b -> c, axis=0", {"a": A, "b": A, "optimizer/a/m": A}),
        "state of another shape": refused("a^T -> c", {"a": A, "optimizer/a/row": (2,)}),
        "heads that nobody gave": refused("a -> b, c, axis={n}", {"a": A}),
    },
    kind=RewriteError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("text", UNTOLD)
def test_state_that_nothing_tells_about_may_be_dropped_by_its_name(text: str) -> None:
    sources = UNTOLD[text]
    drops = [f'"{name}" -> _' for name in sources if name.startswith("optimizer/") and name[10] in text]
    assert Rewrite("\n".join([*drops, text])).check(sources).dropped
