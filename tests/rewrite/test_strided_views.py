"""Values go through operations as arrays do, and fragments are boxes on both sides: against numpy, by element."""

from math import prod
from random import Random

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.strided_views import Fragment, Shapes, ViewedTensor, fragments_of
from shardwise.space import Box

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


def test_casts_are_kept_in_order_and_a_cast_to_the_same_dtype_is_none() -> None:
    value = ViewedTensor.source("a", TensorMeta((4,), "float32")).cast("float16").cast("float16").cast("float32")
    assert value.dtype == "float32"
    assert [view.dtypes for view in value.views] == [("float32", "float16", "float32")]
    assert not value.same_elements(ViewedTensor.source("a", TensorMeta((4,), "float32")))


def test_a_part_that_was_transposed_does_not_become_one_tile_with_its_neighbour() -> None:
    meta = TensorMeta((4, 3, 3), "int64")
    value = ViewedTensor.source("w", meta)
    below = value.crop(0, 2, 4).permute((0, 2, 1))
    joined = ViewedTensor.concat([value.crop(0, 0, 2), below], 0)
    assert not joined.is_identity_of("w", meta)
    assert ViewedTensor.concat([value.crop(0, 0, 2), below.permute((0, 2, 1))], 0).is_identity_of("w", meta)


def test_neighbouring_parts_of_one_source_become_one_tile_again() -> None:
    whole = ViewedTensor.source("a", TensorMeta((6, 5), "float32"))
    parts = [whole.crop(0, 0, 1), whole.crop(0, 1, 4), whole.crop(0, 4, 6)]
    assert ViewedTensor.concat(parts, 0).views == whole.views
    assert len(ViewedTensor.concat(parts[::-1], 0).views) == 3


def test_a_part_of_a_value_with_many_tiles_is_found_without_asking_all() -> None:
    sources = [ViewedTensor.source(f"s{number}", TensorMeta((2, 3), "float32")) for number in range(500)]
    value = ViewedTensor.stack(sources, 1)
    (view,) = value.crop(1, 321, 322).views
    assert view.source == "s321"
    assert [each.source for each in value.meeting(Box((0, 7, 1), (2, 2, 1)))] == ["s7", "s8"]
