"""Values go through operations as arrays do, in few fragments of just what is asked for: against numpy."""

import math
from collections.abc import Iterator
from math import prod
from random import Random

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from shardwise.rewrite import Rewrite
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.strided_views import Fragment, Shapes, ViewedTensor, fill_of, fragments_of
from shardwise.space import Box, Run, boxes_of_run
from tests.rewrite.filling import whole

Pair = tuple[ViewedTensor, np.ndarray]


ITEM_BYTES = 8


def factors(random: Random, number: int) -> tuple[int, ...]:
    """A shape with so many elements."""
    shape = [1] if random.random() < 0.2 else []
    while number > 1:
        shape.append(random.choice([size for size in range(2, number + 1) if number % size == 0]))
        number //= shape[-1]
        shape += [1] if random.random() < 0.2 else []
    return tuple(shape)


def changed(random: Random, pool: list[Pair]) -> None:
    """Do one thing to values and arrays alike."""
    at = random.randrange(len(pool))
    value, array = pool[at]
    alike = [pair for pair in pool if pair[1].shape == array.shape][:4]
    random.shuffle(alike)
    axis = random.randrange(array.ndim) if array.ndim else 0
    match random.choice(["permute", "reshape", "split", "concat", "stack", "drop"]):
        case "permute":
            dims = random.sample(range(array.ndim), array.ndim)
            pool[at] = value.permute(dims), array.transpose(dims)
        case "reshape":
            shape = factors(random, array.size) if array.size else array.shape
            pool[at] = value.reshape(shape), array.reshape(shape)
        case "split" if array.ndim:
            size = array.shape[axis]
            cut = random.randint(0, size)
            pool[at] = value.crop(axis, 0, cut), array.take(range(cut), axis)
            pool.append((value.crop(axis, cut, size), array.take(range(cut, size), axis)))
        case "concat" if array.ndim:
            arrays = np.concatenate([each for _, each in alike], axis)
            pool.append((ViewedTensor.concat([each for each, _ in alike], axis), arrays))
        case "stack":
            arrays = np.stack([each for _, each in alike], axis)
            pool.append((ViewedTensor.stack([each for each, _ in alike], axis), arrays))
        case "drop" if 1 in array.shape:
            dim = array.shape.index(1)
            pool[at] = value.drop_dim(dim), array.squeeze(dim)


def pools(seed: int) -> tuple[dict[str, np.ndarray], list[Pair]]:
    """Sources, and what a few random operations have made of them."""
    random = Random(seed)
    shape = tuple(random.choice([0, 1, 2, 3, 4, 6]) for _ in range(random.randint(0, 4)))
    sources = {f"s{number}": np.arange(prod(shape)).reshape(shape) + 1000 * number for number in range(3)}
    pool = [(ViewedTensor.source(name, TensorMeta(shape, "int64")), array) for name, array in sources.items()]
    for _ in range(random.randint(0, 7)):
        changed(random, pool)
    return sources, pool


def shapes_of(sources: dict[str, np.ndarray]) -> Shapes:
    return Shapes({name: TensorMeta(array.shape, "int64") for name, array in sources.items()})


def view_of(fragment: Fragment, memory: np.ndarray, origin: tuple[int, ...]) -> np.ndarray:
    """The box of the other side in an array with the elements asked for."""
    strides = [step // ITEM_BYTES for step in memory.strides]
    start = fragment.view_start(strides, origin)
    steps = [step * ITEM_BYTES for step in fragment.view_strides(strides)]
    return as_strided(memory.reshape(-1)[start:], fragment.shape, steps)


@pytest.mark.parametrize("start", range(0, 1200, 200))
def test_every_box_of_a_value_is_filled_from_boxes_of_sources_exactly_once(start: int) -> None:
    for seed in range(start, start + 200):
        sources, pool = pools(seed)
        random = Random(seed)
        for value, array in pool:
            assert value.shape == array.shape
            offset = tuple(random.randint(0, max(0, size - 1)) for size in array.shape)
            sizes = tuple(random.randint(min(1, n), n - low) for n, low in zip(array.shape, offset, strict=True))
            for box in (Box(offset, sizes), Box((0,) * array.ndim, array.shape)):
                filled = np.full(box.shape, -1)
                fragments = fragments_of(value.meeting(box), shapes_of(sources))
                for each in fragments:
                    view_of(each, filled, box.offset)[...] = sources[each.other][Box(each.offset, each.shape).slices()]
                assert np.array_equal(filled, array[box.slices()]), seed
                assert sum(each.num_elements for each in fragments) == filled.size


def test_a_value_knows_whether_it_is_a_source_and_whether_another_has_its_elements() -> None:
    identities = 0
    for seed in range(600):
        sources, pool = pools(seed)
        for value, array in pool:
            for name, source in sources.items():
                found = value.is_identity_of(name, TensorMeta(source.shape, "int64"))
                assert found == np.array_equal(array, source) or not array.size, seed
                identities += found
            if array.size:
                assert value.same_elements(value.reshape((array.size,)).reshape(array.shape))
            for other, theirs in pool:
                assert value.same_elements(other) == np.array_equal(array, theirs) or not array.size, seed
    assert identities > 600


def test_a_part_of_a_value_with_many_tiles_is_found_without_asking_all() -> None:
    sources = [ViewedTensor.source(f"s{number}", TensorMeta((2, 3), "float32")) for number in range(500)]
    value = ViewedTensor.stack(sources, 1)
    (view,) = value.crop(1, 321, 322).views
    assert view.source == "s321"
    assert [each.source for each in value.meeting(Box((0, 7, 1), (2, 2, 1)))] == ["s7", "s8"]


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
