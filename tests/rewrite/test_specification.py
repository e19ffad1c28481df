"""The specification, sentence by sentence: its examples, each statement form, and what goes beyond AOA."""

import numpy as np
import pytest

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite, TensorMeta
from tests.rewrite.filling import assert_same, proved, resolved, whole
from tests.rewrite.oracle import Tensor, interpret, metas
from tests.rewrite.strategies import numbered

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


def problems_of(text: str, shapes: dict[str, Shape]) -> tuple[str, ...]:
    with pytest.raises(RewriteError) as refused:
        Rewrite(text).check(shapes)
    return refused.value.problems


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


def test_example_8_takes_the_degrees_from_the_layouts() -> None:
    sources = {"gu": TensorMeta((8,), "float32", (2,))}
    checked = Rewrite("gu -> gu, fused_ffn").check(sources, {"gu": TensorMeta((8,), "float32", (1,))})
    actual = resolved(checked, counted(gu=(8,)), {})
    assert actual["gu"].values.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_example_10_leaves_what_is_added_untouched() -> None:
    checked = Rewrite("x -> _\n_ -> z").check({"x": (2,)}, {"z": (3,)})
    assert checked.dropped == {"x"}
    assert checked.added == {"z"}
    assert "z" not in checked.outputs or not checked.resolve("z", whole((3,)))
    assert not checked.push("x", whole((2,)))


QKV = "num_heads=4, num_key_value_groups=2"
THREE: dict[str, Shape] = {"q": (3, 8), "k": (3, 4), "v": (3, 4)}
OTHER: dict[str, tuple[int, ...]] = {"q": (3, 8), "k": (3, 4), "v": (3, 2)}
WIDE: dict[str, tuple[int, ...]] = {"q": (3, 8), "k": (3, 4), "v": (3, 12)}
FORMS: dict[str, tuple[str, dict[str, Shape]]] = {
    "rename": ("a -> b", {"a": (2, 3)}),
    "rename of many": ("a -> b\na^T -> c\na -> d, permute='[]'", {"a": (2, 3)}),
    "rename of a scalar": ("a -> b", {"a": ()}),
    "rename of nothing": ("a^T -> b", {"a": (0, 3)}),
    "concatenate": ("a, b -> c, axis=0", {"a": (2, 3), "b": (4, 3)}),
    "concatenate three": ("a, b, d -> c, axis=1", {"a": (2, 3), "b": (2, 0), "d": (2, 1)}),
    "split": ("a -> b, c, axis=1", {"a": (2, 6)}),
    "permute": ("a -> b, permute='[1,2,0]'", {"a": (2, 3, 4)}),
    "permute all": ("a -> b, permute='[]'", {"a": (2, 3, 4)}),
    "transpose": ("a^T -> b", {"a": (2, 3, 4)}),
    "transpose, concatenate": ("a^T, b -> c, axis=1", {"a": (2, 3), "b": (3, 1)}),
    "axis on one name": ("a -> b, axis=1", {"a": (2, 3)}),
    "drop": ("a -> _", {"a": (2, 3), "b": (1,)}),
    "fused_qkv joins": (f"q,k,v -> qkv, fused_qkv, {QKV}", THREE),
    "fused_qkv joins rows": (f"q,k,v -> qkv, fused_qkv, {QKV}, axis=0", {n: s[::-1] for n, s in THREE.items()}),
    "fused_qkv joins one dim": (f"q,k,v -> qkv, fused_qkv, {QKV}", {"q": (8,), "k": (4,), "v": (4,)}),
    "fused_qkv joins transposed": (f"q^T,k^T,v^T -> f, fused_qkv, {QKV}", {n: s[::-1] for n, s in THREE.items()}),
    "fused_qkv parts": (f"qkv -> q,k,v, fused_qkv, {QKV}", {"qkv": (2, 16)}),
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
    "fused_ffn joins": ("gate, up -> x, fused_ffn, dst_tp=2", {"gate": (2, 4), "up": (2, 4)}),
    "fused_ffn parts": ("x -> gate, up, fused_ffn, src_tp=4", {"x": (2, 16)}),
    "fused_ffn again": ("x -> x, fused_ffn, src_tp=2, dst_tp=3", {"x": (1, 24)}),
    "fused_ffn again, rows": ("x -> y, fused_ffn, axis=0, src_tp=3, dst_tp=2", {"x": (24, 2)}),
    "fused_ffn of degree 1": ("x -> y, fused_ffn", {"x": (2, 4)}),
    "fused_qkv_old joins": (f"q,k,v -> x, fused_qkv_old, {QKV}, dst_tp=2", THREE),
    "fused_qkv_old parts": (f"x -> q,k,v, fused_qkv_old, {QKV}, src_tp=2", {"x": (2, 16)}),
    "fused_qkv_old parts transposed": (f"x^T -> q,k,v, fused_qkv_old, {QKV}", {"x": (16, 3)}),
    "fused_qkv_old again": (f"x -> x, fused_qkv_old, {QKV}, src_tp=1, dst_tp=2", {"x": (3, 16)}),
    "placeholder": ("l.$LAYER_ID.w^T -> m.$LAYER_ID.w", {"l.0.w": (1, 2), "l.12.w": (2, 3), "r": (2,)}),
    "two placeholders": (
        "l.$LAYER_ID.e.$EXPERT_ID.w -> e.$EXPERT_ID.l.$LAYER_ID.w",
        {"l.0.e.1.w": (1,), "l.0.e.3.w": (2,), "l.2.e.0.w": (3,)},
    ),
    "array": ("w[0:3] -> w, axis=0", {"w_0": (1,), "w_1": (2,), "w_2": (3,), "w_3": (4,)}),
    "array on the right": ("w -> w[1:3], axis=0", {"w": (4,)}),
    "temporary": ("a -> t\nt^T -> a", {"a": (2, 3)}),
    "assigned again": ("a -> a, permute='[1,0]'\na -> b, c, axis=0\nb^T -> b", {"a": (3, 4)}),
    "unmentioned": ("a -> b", {"a": (1,), "c": (2,), "d.0.x": ()}),
    "several operations": ("a^T, b^T -> c, axis=0, reshape='[-1]'", {"a": (2, 3), "b": (2, 5)}),
    "uneven split": ("a -> b, c, axis=0, sizes='[3,5]'", {"a": (8, 2)}),
    "negative axis": ("a, b -> c, axis=-1", {"a": (2, 3), "b": (2, 5)}),
    "reshape": ("a -> b, reshape='[2,-1,3]'", {"a": (4, 6)}),
    "reshape across": ("a -> b, reshape='[4,3]'", {"a": (2, 6)}),
    "reshape of a transposed": ("a^T -> b, reshape='[2,6]'", {"a": (4, 3)}),
    "stack": ("a, b -> c, stack=1", {"a": (2, 3), "b": (2, 3)}),
    "unstack": ("a -> b, c, d, stack=-1", {"a": (2, 3)}),
    "quoted": ('"a-b/c d" -> "0", axis=0', {"a-b/c d": (2,)}),
    "any placeholder": ("l.$X.w -> m.$X.w", {"l.3.w": (1,)}),
    "ragged": (
        "l.$L.e.$E.a, l.$L.e.$E.b -> l.$L.e.$E.ab, axis=0",
        {"l.0.e.0.a": (1,), "l.0.e.0.b": (2,), "l.1.e.5.a": (3,), "l.1.e.5.b": (1,)},
    ),
    "star beside a placeholder": (
        "l.$L.e.*.w -> l.$L.w, stack=0, gaps=1",
        {"l.0.e.10.w": (2,), "l.0.e.9.w": (2,), "l.1.e.0.w": (3,)},
    ),
    "shift": ("l.$L.w -> l.$L+1.w", {"l.0.w": (1,), "l.1.w": (2,), "l.5.w": (3,)}),
    "shift on the left": ("l.$L-1.w -> m.$L.w", {"l.0.w": (1,), "l.1.w": (2,)}),
    "comments": ("# all\na -> b  # renamed\n\n", {"a": (1,)}),
    "optional": ("x.$L.w -> y.$L.w, optional=1\na -> b", {"a": (1,)}),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_equals_the_oracle_and_is_undone(name: str) -> None:
    text, shapes = FORMS[name]
    proved(text, sources_of(shapes))


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


def test_a_star_on_the_right_needs_a_target() -> None:
    (problem,) = problems_of("w -> e.*.w, axis=0", {"w": (6, 2)})
    assert "e.*.w" in problem


def test_a_known_target_takes_variables_that_were_read_too() -> None:
    sources = sources_of({"embed": (4, 2)})
    checked = Rewrite("embed -> lm_head").check(metas(sources), {"embed": (4, 2), "lm_head": (4, 2)})
    same = Tensor(sources["embed"].values)
    assert_same(resolved(checked, sources, {}), {"embed": same, "lm_head": same})


def test_an_identity_statement_keeps_what_is_read() -> None:
    for text in ("a -> a\na -> b", "a -> b\na -> a"):
        assert Rewrite(text).check({"a": (2,)}).outputs.keys() == {"a", "b"}
    assert Rewrite("a -> b").check({"a": (2,)}).outputs.keys() == {"b"}


def test_parameters_stand_for_numbers() -> None:
    text = "q,k,v -> qkv, fused_qkv, num_heads={heads}, num_key_value_groups={groups}"
    rewrite = Rewrite(text, parameters={"heads": 4, "groups": 2})
    sources = sources_of(THREE)
    expected = interpret(text.format(heads=4, groups=2), sources)
    assert_same(resolved(rewrite.check(metas(sources)), sources, {}), expected)
    assert Rewrite(text).parameters_needed == {"heads", "groups"}
    with pytest.raises(RewriteError, match="heads"):
        Rewrite(text).check(THREE)


def test_the_degree_of_a_layout_goes_with_the_dim_through_a_transposition() -> None:
    sources = sources_of({"gu": (12, 2)})
    known = {"gu": TensorMeta((12, 2), "float32", (2, 1))}
    target = {"gu": TensorMeta((2, 12), "float32", (1, 3))}
    text = "gu^T -> gu, fused_ffn"
    with_degrees = {"gu": Tensor(sources["gu"].values, "float32", (2, 1))}
    expected = interpret(text, with_degrees, {"gu": (1, 3)})
    assert_same(resolved(Rewrite(text).check(known, target), sources, {}), expected)


STATE = {"optimizer/a/exp_avg": (3, 2), "optimizer/b/exp_avg": (1, 2), "optimizer/a/step": (), "optimizer/b/step": ()}


def test_statements_on_the_model_hold_for_the_optimizers_state() -> None:
    sources = sources_of({"a": (3, 2), "b": (1, 2), **STATE}, "bfloat16")
    sources |= {name: Tensor(numbered(7, ())) for name in sources if name.endswith("step")}
    sources |= {name: Tensor(tensor.values) for name, tensor in sources.items() if name.endswith("exp_avg")}
    text = "a, b -> c, axis=0, permute='[1,0]', dtype='float32'"
    outputs = proved(text, sources)
    assert outputs.keys() == {"c", "optimizer/c/exp_avg", "optimizer/c/step"}
    assert outputs["optimizer/c/exp_avg"].shape == (2, 4)
    assert outputs["optimizer/c/step"].shape == ()
    checked = Rewrite(text).check(metas(sources))
    assert [set(group) for group in checked.agree] == [{"optimizer/a/step", "optimizer/b/step"}]


def test_a_cast_of_the_model_leaves_the_dtype_of_its_state() -> None:
    known = {"a": ((2,), "float32"), "optimizer/a/exp_avg": ((2,), "float32")}
    outputs = Rewrite("a -> b, dtype='bfloat16'").check(known).outputs
    assert {name: meta.dtype for name, meta in outputs.items()} == {"b": "bfloat16", "optimizer/b/exp_avg": "float32"}


def test_a_dropped_tensor_takes_its_state_along() -> None:
    checked = Rewrite("a -> _").check({"a": (2,), "optimizer/a/exp_avg": (2,), "b": (1,)})
    assert checked.outputs.keys() == {"b"}
    assert checked.dropped == {"a", "optimizer/a/exp_avg"}


def test_a_parameter_of_which_a_part_is_dropped_is_lost_with_all_its_state() -> None:
    known: dict[str, Shape] = {"a": (2, 2), "optimizer/a/exp_avg": (2, 2), "optimizer/a/step": ()}
    checked = Rewrite("a -> b, c, axis=0\nb -> _").check(known)
    assert checked.outputs.keys() == {"c", "optimizer/c/exp_avg", "optimizer/c/step"}
    assert not checked.invertible
    back = checked.inverse(lossy="allow").check(checked.outputs, known)
    assert back.added == known.keys()


def test_state_that_only_some_of_the_joined_tensors_have_is_found() -> None:
    (problem,) = problems_of("a, b -> c, axis=0", {"a": (2,), "b": (2,), "optimizer/a/exp_avg": (2,)})
    assert "exp_avg" in problem
    assert "b" in problem


def test_state_of_another_shape_follows_renames_only() -> None:
    shapes: dict[str, Shape] = {"a": (4, 2), "optimizer/a/row": (4,)}
    assert Rewrite("a -> b").check(shapes).outputs["optimizer/b/row"].shape == (4,)
    assert any("optimizer/a/row" in problem for problem in problems_of("a^T -> b", shapes))


def test_a_name_of_state_may_be_written_in_quotes() -> None:
    shapes: dict[str, Shape] = {"a": (4, 2), "optimizer/a/row": (4,)}
    checked = Rewrite('"optimizer/a/row" -> _\na^T -> b').check(shapes)
    assert checked.outputs.keys() == {"b"}


def test_ties_of_the_sources_are_ties_of_the_outputs_but_copies_are_not() -> None:
    shapes: dict[str, Shape] = {"embed": (4, 2)}
    tied = Rewrite("embed -> a\nhead -> b").check(shapes, aliases={"head": "embed"})
    assert (set(tied.outputs), dict(tied.ties)) in (({"a"}, {"b": "a"}), ({"b"}, {"a": "b"}))
    for text in ("embed -> a\nembed -> b", "embed^T -> a\nembed^T -> b", "embed -> t\nt^T -> a\nembed^T -> b"):
        copied = Rewrite(text).check(shapes)
        assert (set(copied.outputs), dict(copied.ties)) == ({"a", "b"}, {})


def test_a_text_without_statements_leaves_all_as_it_is() -> None:
    sources = sources_of({"a": (2, 3), "b": ()})
    assert_same(proved("# nothing", sources), sources)
