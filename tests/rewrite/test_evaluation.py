"""Evaluation: each form equals the oracle in few fragments and is undone; what is read, kept, tied and refused."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.errors import RewriteError
from shardwise.rewrite import Checked, Rewrite, TensorLike, TensorMeta
from shardwise.space import Box, Run, boxes_of_run
from tests.refusals import Refusals
from tests.rewrite.filling import assert_same, proved, resolved, whole
from tests.rewrite.oracle import Tensor, interpret, metas
from tests.rewrite.strategies import Case, cases, numbered, proven

Shape = tuple[int, ...]
Nested = dict[str, object]


def counted(**shapes: Shape) -> dict[str, Tensor]:
    """Sources in the order written: the i-th holds i * 100 + arange of its size."""
    return {
        name.replace("__", "."): Tensor(np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) + at * 100)
        for at, (name, shape) in enumerate(shapes.items())
    }


def sources_of(shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    return {name: Tensor(numbered(at, shape)) for at, (name, shape) in enumerate(shapes.items())}


EXAMPLES: dict[str, tuple[str, dict[str, Tensor], Nested]] = {
    "permute": ("a -> b, permute='[2,0,1]'", counted(a=(1, 2, 3)), {"b": [[[0, 3]], [[1, 4]], [[2, 5]]]}),
    "star": (
        "e.*.w -> b, axis=0",
        counted(e__0__w=(1,), e__10__w=(1,), e__2__w=(1,), e__1__w=(1,)),
        {"b": [0, 300, 200, 100]},
    ),
    "offset": (
        "m.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w",
        counted(m__1__w=(2,), m__2__w=(2,)),
        {"m.0.w": [0, 1], "m.1.w": [100, 101]},
    ),
    "fused_qkv": (
        "qkv -> q,k,v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0",
        counted(qkv=(8,)),
        {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]},
    ),
    "fused_ffn": (
        "gu -> gu, fused_ffn, src_tp=2, dst_tp=1",
        counted(gu=(8,)),
        {"gu": [0, 1, 4, 5, 2, 3, 6, 7]},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_the_specification_hold_to_the_element(name: str) -> None:
    text, sources, expected = EXAMPLES[name]
    assert {key: tensor.values.tolist() for key, tensor in proved(text, sources).items()} == expected


QKV = "fused_qkv, num_heads=4, num_key_value_groups=2"
OLD = "fused_qkv_old, num_heads=4, num_key_value_groups=2"
THREE = {"q": (3, 8), "k": (3, 4), "v": (3, 4)}
OTHER = {"q": (3, 8), "k": (3, 4), "v": (3, 2)}
A34 = {"a": (3, 4)}
A234 = {"a": (2, 3, 4)}
AB = {"a": (4, 3), "b": (2, 3)}

FORMS: dict[str, tuple[str, Mapping[str, Shape], int, int, str]] = {
    # text, sources, at most so many fragments for any box of an output, and of a source, and what undoes it
    "rename": ("a -> b", A34, 1, 1, "b -> a"),
    "of a scalar": ("a -> b", {"a": ()}, 1, 1, "b -> a"),
    "quoted": ('"a-b/c d" -> "0", axis=0', {"a-b/c d": (2,)}, 1, 1, '"0" -> "a-b/c d"'),
    "transpose": ("a^T -> b", A234, 1, 1, "b -> a, permute='[2,1,0]'"),
    "permute": ("a -> b, permute='[2,0,1]'", A234, 1, 1, "b -> a, permute='[1,2,0]'"),
    "two permutes": ("a^T -> b, permute='[2,0,1]'", A234, 1, 1, "b -> a, permute='[0,2,1]'"),
    "concatenate": ("a, b, c -> d, axis=1", {"a": (4, 2), "b": (4, 0), "c": (4, 1)}, 2, 1, "sizes='[2,0,1]'"),
    "concatenate transposed": ("a^T, b^T -> d, axis=0", {"a": (4, 2), "b": (4, 3)}, 2, 1, "permute='[1,0]'"),
    "one transposed": (
        *("a^T, b -> c, axis=0", {"a": (3, 2), "b": (1, 3)}, 2, 1),
        'c -> "part 0 of c", "part 1 of c", axis=0, sizes=\'[2,1]\'\n'
        "\"part 0 of c\" -> a, permute='[1,0]'\n"
        '"part 1 of c" -> b',
    ),
    "split": ("a -> b, c, axis=1", A34, 1, 2, "b, c -> a, axis=1"),
    "uneven split": ("a -> b, c, axis=1, sizes='[1,3]'", A34, 1, 2, "b, c -> a, axis=1"),
    "stack": ("a, b, c -> d, stack=1", dict.fromkeys("abc", (4, 2)), 3, 1, "d -> a, b, c, stack=1"),
    "unstack": ("a -> b, c, stack=1", {"a": (4, 2, 3)}, 1, 2, "b, c -> a, stack=1"),
    "a stack of one": ("e.* -> b, stack=0", {"e.0": (2, 3)}, 1, 1, "b -> e.0, reshape='[2,3]'"),
    "star": ("e.*.w -> w, stack=0", {f"e.{at}.w": (2, 3) for at in range(12)}, 12, 1, "stack=0"),
    "star with gaps": (
        "e.*.w -> b, stack=0, gaps=1",
        {"e.2.w": (2,), "e.10.w": (2,)},
        2,
        1,
        "b -> e.2.w, e.10.w, stack=0",
    ),
    "array": ("w -> w[1:3], axis=0", {"w": (4,)}, 1, 2, "w_1, w_2 -> w, axis=0"),
    "fan out": ("a -> b\na^T -> c\na -> d, axis=0", {"a": (4, 6)}, 1, 3, ""),
    "part and join": ("a -> b, c, axis=0\nb^T, c^T -> d, axis=1", {"a": (4, 6)}, 1, 1, ""),
    "assigned again": ("a -> a, permute='[1,0]'\na -> b, c, axis=0\nb^T -> b", A34, 1, 2, ""),
    "one half turned before it is joined again": (
        *("w -> a, b, axis=0\nb -> b, permute='[0,2,1]'\na, b -> w, axis=0", {"w": (4, 3, 3)}, 2, 2, ""),
    ),
    "flatten": ("a -> b, reshape='[-1]'", {"a": (4, 6)}, 3, 4, "b -> a, reshape='[4,6]'"),
    "the same shape": ("a -> b, reshape='[3,4]'", A34, 1, 1, "b -> a"),
    "unflatten": ("a -> b, reshape='[4,6]'", {"a": (24,)}, 4, 4, "b -> a, reshape='[24]'"),
    "one dim becomes two": ("a -> b, reshape='[2,3,4]'", {"a": (6, 4)}, 2, 3, "b -> a, reshape='[6,4]'"),
    "dims of size 1": ("a -> b, reshape='[1,4,1,6]'", {"a": (4, 6, 1)}, 1, 1, "b -> a, reshape='[4,6,1]'"),
    "reshape across": ("a^T -> b, reshape='[2,6]'", {"a": (4, 3)}, 99, 99, "b -> a, reshape='[3,4]', permute='[1,0]'"),
    "fused_qkv joins": (f"q,k,v -> x, {QKV}", THREE, 6, 2, f"x -> q, k, v, {QKV}, axis=1"),
    "fused_qkv parts": (f"x -> q,k,v, {QKV}, axis=0", {"x": (16, 3)}, 2, 6, f"q, k, v -> x, {QKV}, axis=0"),
    "fused_qkv joins transposed": (f"q^T,k^T,v^T -> x, {QKV}", {n: s[::-1] for n, s in THREE.items()}, 6, 2, ""),
    "fused_qkv, other value heads": (f"q,k,v -> x, {QKV}, sizes='[8,4,2]'", OTHER, 6, 2, "sizes='[8,4,2]'"),
    "fused_qkv_old joins": (f"q,k,v -> x, {OLD}, dst_tp=2", THREE, 6, 2, "src_tp=2"),
    "fused_qkv_old parts": (f"x^T -> q,k,v, {OLD}, src_tp=2", {"x": (16, 3)}, 2, 6, "dst_tp=2"),
    "fused_qkv_old, other value heads": (
        *(f"x^T -> q,k,v, {OLD}, src_tp=2, sizes='[8,4,2]', axis=1", {"x": (14, 3)}, 2, 6, "sizes='[8,4,2]'"),
    ),
    "fused_qkv_old again": (f"x -> x, {OLD}, src_tp=1, dst_tp=2, sizes='[8,4,12]'", {"x": (3, 24)}, 6, 6, ""),
    "fused_ffn joins": ("a, b -> x, fused_ffn, dst_tp=4", {"a": (2, 8), "b": (2, 8)}, 8, 4, "src_tp=4"),
    "fused_ffn parts": ("x -> a, b, fused_ffn, src_tp=4", {"x": (2, 16)}, 4, 8, "dst_tp=4"),
    "fused_ffn again": ("x -> x, fused_ffn, src_tp=2", {"x": (1, 8)}, 4, 4, "x -> x, fused_ffn, axis=1, dst_tp=2"),
    "padded after a transpose": ("a^T -> x, pad='[-1,7]', reshape='[21]'", {"a": (4, 3)}, 99, 4, ""),
    "padded, then joined": ("a -> t, pad='[6,-1]', fill=5\nt, b -> x, axis=0, permute='[]'", AB, 3, 1, ""),
    "padded, then split": ("a -> t, pad='[6,4]', fill='0.3'\nt -> x, y, axis=0", {"a": (4, 3)}, 9, 2, ""),
    "joined, then padded": ("a, b -> x, axis=0, pad='[8,3]', fill=1", AB, 3, 1, ""),
    "padded, then stacked": ("a, b -> x, pad='[4,5]', stack=1", {"a": (4, 3), "b": (4, 3)}, 9, 1, ""),
    "padded and cropped": ("a -> t, pad='[8,-1]', fill=2\nt -> x, crop='[6,-1]', fill=2", {"a": (4, 3)}, 2, 1, ""),
    "many at once": (
        *("a^T, b^T -> c, axis=1, reshape='[12]'", {"a": (2, 3), "b": (2, 3)}, 9, 9),
        "c -> a, b, reshape='[3,4]', axis=1, permute='[1,0]'",
    ),
    "ragged": (
        *("l.$L.e.$E.a, l.$L.e.$E.b -> l.$L.e.$E.ab, axis=0",),
        *({"l.0.e.0.a": (1,), "l.0.e.0.b": (2,), "l.1.e.5.a": (3,), "l.1.e.5.b": (1,)}, 2, 1, ""),
    ),
    "star beside a placeholder": (
        *("l.$L.e.*.w -> l.$L.w, stack=0, gaps=1",),
        *({"l.0.e.10.w": (2,), "l.0.e.9.w": (2,), "l.1.e.0.w": (3,)}, 2, 1, ""),
    ),
    "shift on the left": ("l.$L-1.w -> m.$L.w", {"l.0.w": (1,), "l.1.w": (2,)}, 1, 1, "m.$L.w -> l.$L-1.w"),
    "optional": ("x.$L.w -> y.$L.w, optional=1\na -> b", {"a": (1,)}, 1, 1, "b -> a"),
}


def boxes_of(shape: Shape) -> Iterator[Box]:
    """The whole; every row, every column, and pairs of them; the boxes of every run that begins and ends anywhere."""
    yield whole(shape)
    for dim in {0, len(shape) - 1} if shape else ():
        for count in (1, 2, max(shape[dim] - 1, 1)):
            for start in range(shape[dim] - count + 1):
                offset = tuple(start * (at == dim) for at in range(len(shape)))
                yield Box(offset, (*shape[:dim], count, *shape[dim + 1 :]))
    elements = int(np.prod(shape))
    for start in range(0, elements, 3):
        for stop in range(start + 1, elements + 1, 5):
            yield from boxes_of_run(shape, Run(start, stop))


@pytest.mark.parametrize("name", FORMS)
def test_each_form_equals_the_oracle_in_few_fragments_and_is_undone_by_text_that_says_how(name: str) -> None:
    text, shapes, most, most_pushed, undoing = FORMS[name]
    sources = sources_of(shapes)
    outputs = proved(text, sources)
    checked = Rewrite(text).check(metas(sources))
    assert undoing in str(checked.inverse(lossy="allow"))
    for key, meta in checked.outputs.items():
        assert max(len(checked.resolve(key, box)) for box in boxes_of(meta.shape)) <= most
    for key, shape in shapes.items():
        assert max(len(checked.push(key, box)) for box in boxes_of(shape)) <= most_pushed
    if "crop" not in text and name != "fan out":  # by the text alone what was cropped comes back as its fill
        back = Rewrite(text).inverse(lossy="allow").check(metas(outputs), metas(sources))
        assert_same(resolved(back, outputs, {}), {key: each for key, each in sources.items() if key in back.outputs})


A = (2, 3)
NAMES: dict[str, tuple[str, str]] = {
    # text: the names that are there, and those that come out
    "a -> b": ("a c", "b c"),
    "a -> t; t -> b": ("a", "b"),
    "a -> b; b -> a": ("a", "a"),
    "a -> b; a -> c": ("a", "b c"),
    "a -> a; a -> b": ("a", "a b"),
    "a -> b; a -> a": ("a", "a b"),
    "l.$L -> b.$L; l.$L -> c.$L": ("l.0 l.1", "b.0 b.1 c.0 c.1"),
    "l.0 -> first; l.$L -> m.$L": ("l.0 l.1", "first m.1"),
    "m.$L -> m.$L-1; m.$L -> n.$L": ("m.1 m.2", "n.0 n.1"),
    "m.$L -> m.$L; m.0 -> x; m.$L -> n.$L": ("m.0 m.1", "m.0 m.1 x n.0 n.1"),
    "m.$L.w -> m.$L+1.w": ("m.0.w m.1.w", "m.1.w m.2.w"),
    "a -> b; b -> d; c -> b": ("a c", "b d"),
    "a -> b; b -> _; c -> b": ("a c", "b"),
    "a -> _; c -> a": ("a c", "a"),
}


@pytest.mark.parametrize("text", NAMES)
def test_what_is_read_is_used_up_and_what_nobody_reads_comes_out(text: str) -> None:
    known, expected = (each.split() for each in NAMES[text])
    outputs = Rewrite(text).check({name: (at + 1,) for at, name in enumerate(known)}).outputs
    assert outputs.keys() == set(expected)
    if "+1" in text:  # instances of one statement read before any writes
        assert [outputs[name].shape for name in expected] == [(1,), (2,)]


def test_a_known_target_takes_variables_that_were_read_too() -> None:
    sources = sources_of({"embed": (4, 2)})
    checked = Rewrite("embed -> lm_head").check(metas(sources), {"embed": (4, 2), "lm_head": (4, 2)})
    same = Tensor(sources["embed"].values)
    assert_same(resolved(checked, sources, {}), {"embed": same, "lm_head": same})


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a -> _", {"b", "optimizer/b/step", "optimizer/b/m"}),
        ("a -> a; a -> c", {"a", "b", "c", *STATE, "optimizer/c/step", "optimizer/c/m"}),
        # What a statement has read by its name stays behind, and to the name of a state nothing follows.
        (
            '"optimizer/a/m" -> m; a -> c',
            {"b", "c", "m", *("optimizer/" + each for each in ("c/step", "b/step", "b/m"))},
        ),
        ('a -> a; a -> "optimizer/a/master"', {"a", "b", "optimizer/a/master", *STATE}),
    ],
)
def test_state_is_dropped_and_kept_with_its_parameter(text: str, expected: set[str]) -> None:
    assert Rewrite(text).check(MODEL | STATE).outputs.keys() == expected


def test_state_is_added_with_its_parameter_and_of_another_shape_follows_renames() -> None:
    target = MODEL | STATE | {"n": A, "optimizer/n/m": A}
    assert Rewrite("_ -> n").check(MODEL | STATE, target).added == {"n", "optimizer/n/m"}
    shapes = {"a": (4, 2), "optimizer/a/row": (4,)}
    assert Rewrite("a -> b").check(shapes).outputs["optimizer/b/row"].shape == (4,)


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
    """An operation that undoes the one before leaves the tensor itself, and here it does not."""
    text = "a -> t, crop='[2,-1]', fill=0\nt -> x, pad='[4,-1]'"
    outputs = resolved(Rewrite(text).check(metas(PADDED)), PADDED, {})
    assert_same(outputs, interpret(text, PADDED))
    assert not outputs["x"].values[2:].any()


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


def test_dropped_are_the_sources_of_which_nothing_comes_out() -> None:
    checked = Rewrite("a, b -> t, axis=0; t -> c, d, axis=0; d -> _; e -> _").check({"a": A, "b": A, "e": (0,), "f": A})
    assert checked.dropped == {"b", "e"}
    assert set(checked.outputs) == {"c", "f"}


def problems_of(text: str, sources: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    with pytest.raises(RewriteError) as refused:
        Rewrite(text).check(sources, target)
    # Notes say what may be wrong, beside what is.
    return tuple(each for each in refused.value.problems if not each.startswith("note: "))


@proven
@given(cases(), st.data())
def test_a_target_of_other_names_shapes_or_dtypes_is_refused_wherever_it_differs(
    case: Case, data: st.DataObject
) -> None:
    sources, expected = metas(case.sources), interpret(case.text, case.sources)
    target = metas(expected)
    assume(target)
    assert_same(resolved(Rewrite(case.text).check(sources, target), case.sources, {}), expected)
    name = data.draw(st.sampled_from(sorted(target)))
    shape, dtype = target[name]
    grown = [tuple(size + (at == dim) for at, size in enumerate(shape)) for dim in range(len(shape))]
    wrong = [{name: (other, dtype)} for other in (*grown, (*shape, 1), (2, *shape))]
    for other in (*wrong, {name: (shape, "int64")}, {"more": (shape, dtype)}):
        assert any(next(iter(other)) in problem for problem in problems_of(case.text, sources, target | other))
    less = {key: meta for key, meta in target.items() if key != name}
    assert any(name in problem for problem in problems_of(case.text, sources, less))


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
a, c -> x, stack=0
s, t -> x, axis=0
a, c -> x, axis=1, sizes='[4,3]'
a -> x, y, axis=1
a -> x, y, axis=1, sizes='[1,1]'
a -> x, y, axis=-3
a, k -> x, axis=2
a -> x, y, stack=1
a, c -> x, stack=3
a -> x, permute='[0,1,2]'
a -> x, reshape='[4]'
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
