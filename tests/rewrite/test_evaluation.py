"""Evaluation: what is read, used up, kept, dropped, added, overwritten; and what is said where that cannot be."""

from collections.abc import Mapping
from typing import Any

import pytest

from shardwise.errors import RewriteError
from shardwise.rewrite import Checked, Rewrite, TensorLike, TensorMeta

A = (2, 3)


def problems(text: str, sources: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> list[str]:
    """The message of each problem, without its place and the statement."""
    with pytest.raises(RewriteError) as refused:
        Rewrite(text).check(sources, target)
    return [problem.partition("\n")[0].partition(": ")[2] for problem in refused.value.problems]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a -> b",
            "b exists already and no statement has read it: its 4 elements would be lost. Read it before, or drop ",
        ),
        ("a -> t; b -> t", "t exists already and no statement has read it: its 6 elements would be lost"),
        ("e.$E -> x", "x is written by more than one instance: e.0 -> x; e.1 -> x"),
        ("a -> _; a -> c", "a was dropped in line 1"),
        ("zz -> c", "there is no tensor zz"),
        ("_ -> n; n -> c", "n is added by `_ -> n` and has no elements to read"),
        ("_ -> a", "a exists already, and cannot be added or assigned too"),
        ("_ -> n; a -> n", "n exists already, and cannot be added or assigned too"),
    ],
)
def test_what_would_be_lost_or_is_not_there_is_refused(text: str, message: str) -> None:
    (problem,) = problems(text, {"a": A, "b": (4,), "e.0": A, "e.1": A})
    assert problem.startswith(message)


def test_what_was_dropped_may_be_written_again() -> None:
    assert names("a -> _; b -> a", {"a": A, "b": A}) == {"a"}


def test_findings_of_all_statements_come_at_once_and_bring_no_others_after_them() -> None:
    text = """a, b -> c, axis=5
        c^T -> d
        d -> e, permute='[0,1,2,3]'
        l.$L.x, l.$L.y -> l.$L.z, axis=0
        l.$L.z -> l.$L.u
        l.0.u -> v
        w -> w2, dtype='float16'
        nothing -> here
        here -> there"""
    found = problems(text, {"a": A, "b": A, "l.0.x": A, "l.0.y": A, "l.1.y": A, "w": A})
    assert found == [
        "there is no dim 5 in a, which has 2 dims: [2, 3]",
        "l.1.x is not there, and l.1.y needs it",
        "there is no tensor nothing",
    ]


def test_instances_with_the_same_fault_are_one_finding_that_shows_the_first_three() -> None:
    with pytest.raises(RewriteError) as refused:
        Rewrite("l.$L -> m.$L, axis=0, permute='[0]'").check({f"l.{at}": A for at in range(5)})
    assert str(refused.value) == (
        "line 1, column 1: permute [0] is for 1 dims, but l.0 has 2: [2, 3]\n"
        "    l.$L -> m.$L, axis=0, permute='[0]'\n"
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "    in: l.0 -> m.0\n"
        "    in: l.1 -> m.1\n"
        "    in: l.2 -> m.2\n"
        "    in: and 2 more like these"
    )


OPERATIONS = {
    "a, c -> x, axis=0": "tensors that are joined have the same shape but for dim 0, but a has [2, 3] and c has [2, 4]",
    "a, d -> x, axis=0": "tensors that are joined have the same dtype, but a has float32 and d has float16: cast one",
    "a, c -> x, stack=0": "tensors that are joined have the same shape, but a has [2, 3] and c has [2, 4]",
    "a, c -> x, axis=1, sizes='[4,3]'": "sizes says [4, 3] along dim 1, but the tensors have [3, 4] there",
    "a -> x, y, axis=1": "a has size 3 along dim 1, which is not divisible into 2 equal parts: say which by sizes=",
    "a -> x, y, axis=1, sizes='[1,1]'": "sizes [1, 1] are 2 parts with 2 together, but a has size 3 along dim 1",
    "a -> x, y, axis=-3": "there is no dim -3 in a, which has 2 dims: [2, 3]",
    "a -> x, y, stack=1": "a has 3 indices along dim 1, one tensor each, but 2 are named",
    "a, c -> x, stack=3": "there is no dim 3 in a, which would have 3 dims then",
    "a -> x, permute='[0]'": "permute [0] is for 1 dims, but a has 2: [2, 3]",
    "a -> x, reshape='[4]'": "a has 6 elements [2, 3], which do not make up [4]",
    "a -> x, reshape='[4,-1]'": "a has 6 elements [2, 3], which do not make up [4, -1]",
    "a -> x, src_dtype='float16', dst_dtype='float32'": "src_dtype is 'float16', but a has dtype float32",
    "q,k,v -> x, fused_qkv, num_heads=3, num_key_value_groups=3": "along dim 1, the query has 8, which 3 heads do not",
    "q,k,v -> x, fused_qkv, num_heads=4, num_key_value_groups=1": "along dim 1, query heads have size 2, key heads 4,",
    "q,k,q -> x, fused_qkv, num_heads=2, num_key_value_groups=1": "along dim 1, value heads have another size than key",
    "q,k,v -> x, fused_qkv, num_heads=4, num_key_value_groups=2, sizes='[4,4,8]'": "sizes says [4, 4, 8] along dim 1,",
    "q -> x,y,z, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0": "q has size 2 along dim 0, which its 4 query",
    "q -> q, fused_qkv_old, num_heads=2, num_key_value_groups=1, dst_tp=2": "the right tensor is fused for tensor-par",
    "q -> q, fused_ffn, src_tp=3": "the left tensor is fused for tensor-parallel degree 3. It does not divide gate",
    "a, c -> x, fused_ffn": "gate and up have the same size, but along dim 1 they have 3 and 4",
    "a -> b, c2, quantise='[2]'": "the block [2] is for 1 dims, but a has [2, 3]",
    "a -> b, c2, quantise='[2,2]', permute='[]'": "quantise is the last operation of a statement",
    "a -> b, c2, quantise='[2,2]', element_dtype='int8'": "quantise makes elements of float8_e4m3fn, float8_e5m2 and",
    "a -> b, c2, dtype='float64', quantise='[2,2]'": "quantise computes in float32, which does not hold float64",
    "a -> b, c2, quantise='[2,2]', scale_dtype=recorded": "the dtypes of elements and scales are not known",
    "a, c -> b, dequantise='[1,1]'": "dequantise takes elements of float8_e4m3fn, float8_e5m2 and scales of float32",
    "f^T, a -> b, dequantise='[1,1]'": "dequantise is the first operation of a statement",
    "f, a -> b, dequantise='[2,2]'": "f of shape [2, 3] has [1, 2] blocks of [2, 2], but a has [2, 3] scales",
    "a -> b, pad='[1,-1]'": "pad [1, -1] asks for a smaller size than a has: [2, 3]",
    "a -> b, crop='[-1,4]'": "crop [-1, 4] asks for a larger size than a has: [2, 3]",
    "a -> b, crop='[1]'": "crop [1] is for 1 dims, but a has 2: [2, 3]",
    "a, c -> b, axis=1, pad='[1,-1]'": "pad [1, -1] asks for a smaller size than the result has: [2, 7]",
    "a -> b, pad=recorded": "the sizes of a before the crop are not known. Check the inverse against the tensors",
    "a -> b, dtype='uint8', pad='[3,-1]', fill=256": "fill is 256, which no element of a can be: its dtype is uint8",
    "d -> b, pad='[3,-1]', fill='1e5'": "fill is 100000, which no element of d can be: its dtype is float16",
    "a -> x, fused_ffn": "a has size 3 along dim 1, which is not divisible into gate and up: check axis=",
}


@pytest.mark.parametrize("text", OPERATIONS)
def test_operations_that_do_not_fit_the_tensors_are_refused(text: str) -> None:
    sources = {"a": A, "c": (2, 4), "d": (A, "float16"), "q": (2, 8), "k": (2, 4), "v": (2, 4)}
    sources["f"] = (A, "float8_e4m3fn")
    (problem,) = problems(text, sources)
    assert problem.startswith(OPERATIONS[text])


def test_a_target_is_compared_name_by_name() -> None:
    assert problems("a -> b; c -> d", {"a": A, "c": A, "e": A}, {"b": (3, 2), "d": (A, "float16"), "f": A}) == [
        "shape [3, 2] in the target, [2, 3] by the rewrite",
        "dtype float16 in the target, float32 by the rewrite; cast it by dtype='float16'",
        "the target wants it, and the rewrite does not make it",
        "the rewrite makes it, and the target has no such tensor; drop it by `e -> _`",
    ]
    assert problems("_ -> z", {"a": A}, {"a": A}) == [
        "the rewrite adds it, and the target has no such tensor; drop it by `z -> _`"
    ]


def test_without_comparison_a_target_only_tells_names() -> None:
    checked = Rewrite("w -> e.*, axis=0").apply({"w": (4,), "x": A}, wanted={"e.0": (7,), "e.1": (7,), "y": A})
    assert checked.outputs == {
        "x": TensorMeta(A, "float32"),
        "e.0": TensorMeta((2,), "float32"),
        "e.1": TensorMeta((2,), "float32"),
    }


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


UNTOLD = (
    "optimizer/{0}/p: a parameter without dims {1}. No parameter with dims {1} to tell whether this state is one "
    'value or one per element. Drop it by its name, in quotes (`"optimizer/{0}/p" -> _`), or leave the parameter as '
    "it is"
)
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


def test_the_step_needs_nothing_that_tells_what_it_is() -> None:
    checked = Rewrite("a, b -> c, stack=0").check({"a": (), "b": (), "optimizer/a/step": (), "optimizer/b/step": ()})
    assert shapes_of(checked) == {"c": (2,), "optimizer/c/step": ()}


@pytest.mark.parametrize(
    ("text", "sources", "message"),
    [
        (
            "a, b -> c, stack=0",
            {"a": (), "b": (), "optimizer/a/p": (), "optimizer/b/p": ()},
            UNTOLD.format("a", "goes in"),
        ),
        ("c -> a, b, stack=0", {"c": (2,), "optimizer/c/p": ()}, UNTOLD.format("c", "comes out")),
        ("c -> a, b, stack=0", {"c": (2,), "optimizer/c/p": (2,)}, UNTOLD.format("c", "comes out")),
        ("c -> c, reshape='[]'", {"c": (1,), "optimizer/c/p": ()}, UNTOLD.format("c", "comes out")),
        (
            "a -> a, reshape='[1]'",
            {"a": (), "optimizer/a/p": (), "w": (2,), "optimizer/w/p": (2,), "x": (2,), "optimizer/x/p": ()},
            UNTOLD.format("a", "goes in"),
        ),
    ],
)
def test_state_of_a_parameter_without_dims_is_refused_where_nothing_tells_what_it_is(
    text: str, sources: dict[str, Any], message: str
) -> None:
    assert problems(text, sources) == [message]
    name = message.split(":")[0]
    others = [f'"{each}" -> _' for each in sources if each.startswith("optimizer/") and each[10] in text]
    assert name in others[0]
    assert Rewrite("\n".join([*others, text])).check(sources).dropped >= {name}


def test_state_of_a_parameter_without_dims_goes_along_where_only_the_name_or_the_dtype_changes() -> None:
    for text in ("a -> b", "a^T -> b", "a -> b, dtype='float16'", "a -> b, permute='[]'"):
        assert shapes_of(Rewrite(text).check({"a": (), "optimizer/a/p": ()})) == {"b": (), "optimizer/b/p": ()}


def test_state_that_only_one_of_the_joined_has_is_told() -> None:
    sources = {name: meta for name, meta in (MODEL | STATE).items() if name != "optimizer/b/m"}
    assert problems("a, b -> c, axis=0", sources) == ["the optimizer has m for a, but not for b"]


def test_state_of_another_shape_is_told() -> None:
    assert problems("a^T -> c", {"a": A, "optimizer/a/row": (2,)}) == [
        "optimizer/a/row has shape [2] and not the parameter's [2, 3], so it can only be renamed with it. Drop it by "
        "its name, in quotes, or leave the parameter as it is"
    ]


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


def test_the_values_of_tied_outputs_come_from_the_source_that_is_stored() -> None:
    assert tied("head^T -> h").sources_of("h") == {"embed"}


def test_dropped_are_the_sources_of_which_nothing_comes_out() -> None:
    checked = Rewrite("a, b -> t, axis=0; t -> c, d, axis=0; d -> _; e -> _").check({"a": A, "b": A, "e": (0,), "f": A})
    assert checked.dropped == {"b", "e"}
    assert set(checked.outputs) == {"c", "f"}
