"""Resolving asks for the elements that are needed and no others, in few fragments, for rows, columns and runs."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.rewrite import Fragment, Rewrite
from shardwise.rewrite.strided_views import fill_of
from shardwise.space import Box, Run, boxes_of_run
from tests.rewrite.filling import whole
from tests.rewrite.oracle import metas
from tests.rewrite.strategies import Case, cases, partitions, proven

Shape = tuple[int, ...]


def _boxes(shape: Shape) -> Iterator[Box]:
    """The whole; every row, every column, and pairs of them; the boxes of every run that begins and ends anywhere."""
    yield whole(shape)
    for dim in {0, len(shape) - 1} if shape else ():
        for count in (1, 2, max(shape[dim] - 1, 1)):
            for start in range(shape[dim] - count + 1):
                offset = tuple(start * (at == dim) for at in range(len(shape)))
                yield Box(offset, (*shape[:dim], count, *shape[dim + 1 :]))
    elements = math.prod(shape)
    for start in range(0, elements, 3):
        for stop in range(start + 1, elements + 1, 5):
            yield from boxes_of_run(shape, Run(start, stop))


def _check(fragments: list[Fragment], box: Box, known: dict[str, Shape], *, copies: int = 1) -> None:
    assert sum(math.prod(fragment.shape) for fragment in fragments) == copies * box.num_elements
    by_name: dict[str, list[Box]] = {}
    for fragment in fragments:
        if fill_of(fragment.other) is not None:
            continue
        mine = Box(fragment.offset, fragment.shape)
        assert mine.num_elements, "a fragment without elements is a needless read"
        assert mine.intersect(whole(known[fragment.other])) == mine
        by_name.setdefault(fragment.other, []).append(mine)
    for boxes in by_name.values():
        assert not any(one.intersect(other) for at, one in enumerate(boxes) for other in boxes[:at])


QKV = "fused_qkv, num_heads=4, num_key_value_groups=2"
OLD = "fused_qkv_old, num_heads=4, num_key_value_groups=2"
FORMS: dict[str, tuple[str, dict[str, Shape], int, int]] = {
    # text, sources, at most so many fragments for any box of an output, and for any box of a source
    "rename": ("a -> b", {"a": (4, 6)}, 1, 1),
    "rename of a scalar": ("a -> b", {"a": ()}, 1, 1),
    "cast": ("a -> b, dtype='bfloat16'", {"a": (4, 6)}, 1, 1),
    "transpose": ("a^T -> b", {"a": (4, 6)}, 1, 1),
    "permute": ("a -> b, permute='[2,0,1]'", {"a": (2, 4, 3)}, 1, 1),
    "concatenate": ("a, b, c -> d, axis=1", {"a": (4, 2), "b": (4, 3), "c": (4, 1)}, 3, 1),
    "concatenate transposed": ("a^T, b^T -> d, axis=0", {"a": (4, 2), "b": (4, 3)}, 2, 1),
    "concatenate, transpose": ("a, b -> d, axis=0, permute='[]'", {"a": (2, 4), "b": (3, 4)}, 2, 1),
    "split": ("a -> b, c, d, axis=0", {"a": (6, 4)}, 1, 3),
    "uneven split": ("a -> b, c, axis=1, sizes='[1,5]'", {"a": (4, 6)}, 1, 2),
    "stack": ("a, b, c -> d, stack=1", {"a": (4, 2), "b": (4, 2), "c": (4, 2)}, 3, 1),
    "unstack": ("a -> b, c, stack=1", {"a": (4, 2, 3)}, 1, 2),
    "star": ("e.*.w -> w, stack=0", {f"e.{at}.w": (2, 3) for at in range(12)}, 12, 1),
    "fan out": ("a -> b\na^T -> c\na -> d, axis=0", {"a": (4, 6)}, 1, 3),
    "part and join": ("a -> b, c, axis=0\nb, c -> d, axis=0", {"a": (4, 6)}, 1, 1),
    "part and join through a transposition": ("a -> b, c, axis=0\nb^T, c^T -> d, axis=1", {"a": (4, 6)}, 1, 1),
    "flatten": ("a -> b, reshape='[24]'", {"a": (4, 6)}, 3, 4),
    "unflatten": ("a -> b, reshape='[4,6]'", {"a": (24,)}, 4, 4),
    "one dim becomes two": ("a -> b, reshape='[2,3,4]'", {"a": (6, 4)}, 2, 3),
    "dims of size 1": ("a -> b, reshape='[1,4,1,6]'", {"a": (4, 6, 1)}, 1, 1),
    "fused_qkv joins": (f"q,k,v -> x, {QKV}", {"q": (3, 8), "k": (3, 4), "v": (3, 4)}, 6, 2),
    "fused_qkv parts": (f"x -> q,k,v, {QKV}, axis=0", {"x": (16, 3)}, 2, 6),
    "fused_qkv_old joins": (f"q,k,v -> x, {OLD}, dst_tp=2", {"q": (3, 8), "k": (3, 4), "v": (3, 4)}, 6, 2),
    "fused_qkv_old parts": (f"x^T -> q,k,v, {OLD}, src_tp=2", {"x": (16, 3)}, 2, 6),
    "fused_qkv_old again": (f"x -> y, {OLD}, src_tp=1, dst_tp=2", {"x": (3, 16)}, 6, 6),
    "fused_ffn joins": ("a, b -> x, fused_ffn, dst_tp=4", {"a": (2, 8), "b": (2, 8)}, 8, 4),
    "fused_ffn parts": ("x -> a, b, fused_ffn, src_tp=4", {"x": (2, 16)}, 4, 8),
    "fused_ffn again": ("x -> y, fused_ffn, src_tp=4, dst_tp=2", {"x": (2, 16)}, 8, 8),
}


@pytest.mark.parametrize("name", FORMS)
def test_few_fragments_have_just_the_elements_asked_for(name: str) -> None:
    text, shapes, most, most_pushed = FORMS[name]
    checked = Rewrite(text).check(shapes)
    outputs = {key: meta.shape for key, meta in checked.outputs.items()}
    for key, shape in outputs.items():
        for box in _boxes(shape):
            fragments = checked.resolve(key, box)
            _check(fragments, box, shapes)
            assert len(fragments) <= most, (key, box, fragments)
    for key, shape in shapes.items():
        for box in _boxes(shape):
            fragments = checked.push(key, box)
            _check(fragments, box, outputs, copies=3 if name == "fan out" else 1)
            assert len(fragments) <= most_pushed, (key, box, fragments)


@proven
@given(cases(lossy=True), st.data())
def test_fragments_of_any_rewrite_have_just_the_elements_asked_for(case: Case, data: st.DataObject) -> None:
    checked = Rewrite(case.text).check(metas(case.sources))
    known = {name: tensor.shape for name, tensor in case.sources.items()}
    for name, meta in checked.outputs.items():
        for box in data.draw(partitions(meta.shape), label=name):
            _check(checked.resolve(name, box), box, known)
