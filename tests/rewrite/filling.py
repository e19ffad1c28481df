"""Fragments, carried out element by element: what a reader does that believes `Checked.resolve` and `Checked.push`."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.rewrite import Checked, Fragment, Rewrite
from shardwise.rewrite.strided_views import fill_of
from shardwise.space import Box
from tests.rewrite.oracle import Tensor, Values, cast, interpret, metas


def positions(fragment: Fragment, box: Box) -> NDArray[np.int64]:
    """Where in the row-major elements of the asked box the elements of a fragment's box lie: an array of its shape."""
    strides = [int(np.prod(box.shape[dim + 1 :], dtype=np.int64)) for dim in range(box.ndim)]
    where = np.full(fragment.shape, 0, np.int64)
    for dim in range(box.ndim):
        index = np.full(fragment.shape, fragment.first[dim] - box.offset[dim], np.int64)
        for at, (asked, step) in enumerate(fragment.dims):
            if asked == dim:
                steps = np.arange(fragment.shape[at]) * step
                index += steps.reshape([-1 if other == at else 1 for other in range(len(fragment.shape))])
        assert index.size, f"{fragment} has no elements"
        assert 0 <= index.min() <= index.max() < box.shape[dim], (fragment, box)
        where += index * strides[dim]
    return where


def _carried(values: Values, fragment: Fragment, dtypes: tuple[str, str]) -> Values:
    assert (fragment.dtypes[0], fragment.dtypes[-1]) == dtypes, fragment
    assert all(one != other for one, other in zip(fragment.dtypes, fragment.dtypes[1:], strict=False)), fragment
    for dtype in fragment.dtypes[1:]:
        values = cast(values, dtype)
    return values


def _other_box(fragment: Fragment, tensors: Mapping[str, Tensor]) -> tuple[slice, ...]:
    other = Box(fragment.offset, fragment.shape)
    shape = tensors[fragment.other].shape
    assert len(fragment.dims) == len(shape), fragment
    assert all(stop <= size for stop, size in zip(other.stop, shape, strict=True)), fragment
    return other.slices()


def fill(box: Box, dtype: str, fragments: Sequence[Fragment], sources: Mapping[str, Tensor]) -> Values:
    """The asked box of an output, each element of which is written exactly once."""
    local: Values = np.zeros(box.num_elements, np.float32)
    written = np.zeros(box.num_elements, np.int64)
    for fragment in fragments:
        where = positions(fragment, box)
        np.add.at(written, where.ravel(), 1)
        if (number := fill_of(fragment.other)) is not None:
            value = cast(np.full(fragment.shape, float(number), np.float32), fragment.dtypes[0])
            local[where] = _carried(value, fragment, (fragment.dtypes[0], dtype))
            continue
        source = sources[fragment.other]
        local[where] = _carried(source.values[_other_box(fragment, sources)], fragment, (source.dtype, dtype))
    assert (written == 1).all(), f"{box}: elements are written {sorted(set(written.tolist()))} times"
    return local.reshape(box.shape)


def resolved(
    checked: Checked, sources: Mapping[str, Tensor], partitions: Mapping[str, Sequence[Box]]
) -> dict[str, Tensor]:
    """All outputs, each put together box by box."""
    outputs = {}
    for name, meta in checked.outputs.items():
        values: Values = np.full(meta.shape, np.nan, np.float32)
        for box in partitions.get(name) or [whole(meta.shape)]:
            fragments = checked.resolve(name, box)
            assert {each.other for each in fragments if fill_of(each.other) is None} <= checked.sources_of(name)
            values[box.slices()] = fill(box, meta.dtype, fragments, sources)
        outputs[name] = Tensor(values, meta.dtype)
    return outputs


def pushed(
    checked: Checked, sources: Mapping[str, Tensor], partitions: Mapping[str, Sequence[Box]]
) -> dict[str, Tensor]:
    """All outputs, each written by the boxes of the sources; every element is written exactly once."""
    outputs = {n: Tensor(np.full(m.shape, np.nan, np.float32), m.dtype) for n, m in checked.outputs.items()}
    written = {name: np.zeros(meta.shape, np.int64) for name, meta in checked.outputs.items()}
    for name, source in sources.items():
        for box in partitions.get(name) or [whole(source.shape)]:
            local = source.values[box.slices()].reshape(-1)
            for fragment in checked.push(name, box):
                target = outputs[fragment.other]
                there = _other_box(fragment, outputs)
                taken = local[positions(fragment, box)]
                target.values[there] = _carried(taken, fragment, (source.dtype, target.dtype))
                written[fragment.other][there] += 1
    for name in outputs:
        for fragment in checked.padding(name):
            there = Box(fragment.first, fragment.shape).slices()
            value = cast(np.full(fragment.shape, float(fill_of(fragment.other) or ""), np.float32), fragment.dtypes[0])
            outputs[name].values[there] = _carried(value, fragment, (fragment.dtypes[0], outputs[name].dtype))
            written[name][there] += 1
    for name, times in written.items():
        assert (times == 1).all(), f"{name}: elements are written {sorted(set(times.ravel().tolist()))} times"
    return outputs


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, shapes and dtypes, and values to the bit."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        np.testing.assert_array_equal(actual[name].values, tensor.values, err_msg=name)


def proved(text: str, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs, once resolving, pushing and the oracle agree on them, and the inverse gives the sources back."""
    checked = Rewrite(text).check(metas(sources))
    outputs = resolved(checked, sources, {})
    assert_same(outputs, interpret(text, sources))
    assert_same(pushed(checked, sources, {}), outputs)
    if checked.invertible:
        inverse = checked.inverse()
        assert_same(resolved(inverse.check(metas(outputs)), outputs, {}), sources)
        assert_same(resolved(Rewrite(str(inverse)).check(metas(outputs)), outputs, {}), sources)
    return outputs
