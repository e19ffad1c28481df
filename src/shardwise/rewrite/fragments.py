"""Fragments: strided views as boxes on both sides, which is what reads, copies and messages can carry.

A view passes through its source in even steps; a fragment is a box of the source. One view is one fragment unless its
tensor was reshaped, and then as few as the boxes allow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import mul
from typing import NamedTuple

from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.strided_views import StridedView, ViewedTensor
from shardwise.space.boxes import index_of_element, row_major_strides

__all__ = ["Fragment", "Shapes", "fragments_of", "turned"]


class Fragment(NamedTuple):
    """Elements that two tensors have in common: one was asked about, and here is a box of the other.

    In memory that holds the elements asked for with `strides`, index `origin` first, the other's box is a view: its
    shape is `shape`, its strides are `view_strides(strides)`, and its first element `view_start(strides, origin)`.
    """

    other: str
    """The tensor on the other side: the source where a target was asked about, and the target where a source was."""
    offset: tuple[int, ...]
    """Where in the other tensor the box begins."""
    shape: tuple[int, ...]
    first: tuple[int, ...]
    """The index, in the tensor asked about, of the element with which the box begins."""
    dims: tuple[tuple[int, int], ...]
    """For each dim of the box (d, step): one step along it is `step` steps along dim d of the tensor asked about.

    (0, 0) for dims of size 1.
    """
    dtypes: tuple[str, ...]
    """The dtypes that a value passes through, the source's first; no two alike next to each other."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def view_strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """The strides of the box in memory in which the tensor asked about has `strides`."""
        return tuple([step * strides[dim] if step else 0 for dim, step in self.dims])

    def view_start(self, strides: Sequence[int], origin: Sequence[int]) -> int:
        """How many elements after that of index `origin` the box begins there."""
        return sum([(index - zero) * step for index, zero, step in zip(self.first, origin, strides, strict=True)])


class _Loop(NamedTuple):
    """`size` steps of `stride` elements of the source, each `step` steps along dim `dim` of the tensor."""

    size: int
    stride: int
    dim: int
    step: int


class Shapes(dict[str, tuple[tuple[int, ...], tuple[int, ...]]]):
    """Shape and row-major strides of tensors by name; strides are found when first asked for."""

    def __init__(self, tensors: Mapping[str, TensorMeta] | Mapping[str, ViewedTensor]) -> None:
        self._tensors = tensors

    def __missing__(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = self._tensors[name].shape
        self[name] = found = shape, row_major_strides(shape)
        return found


def fragments_of(views: Iterable[StridedView], shapes: Shapes) -> list[Fragment]:
    """The views as boxes of their sources, whose shapes are known by name."""
    found: list[Fragment] = []
    for view in views:
        if 0 in view.shape:
            continue
        shape, strides = shapes[view.source]
        loops = [
            _Loop(size, stride, dim, 1)
            for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True))
            if size > 1
        ]
        found += _boxes(view, shape, strides, view.base, view.offset, loops)
    return found


def turned(fragments: Iterable[Fragment], shape: tuple[int, ...], name: str) -> dict[str, list[StridedView]]:
    """For each other tensor its boxes, as views whose source is the tensor asked about: `name`, of this shape."""
    strides = row_major_strides(shape)
    views: dict[str, list[StridedView]] = {}
    for each in fragments:
        base = sum(map(mul, each.first, strides))
        view = StridedView(each.offset, each.shape, name, base, each.view_strides(strides), each.dtypes)
        views.setdefault(each.other, []).append(view)
    return views


def _boxes(
    view: StridedView,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    base: int,
    first: tuple[int, ...],
    loops: list[_Loop],
) -> Iterator[Fragment]:
    """What the loops visit from element `base` of the source on, as boxes of it."""
    index = index_of_element(shape, base)
    sizes = [1] * len(shape)
    dims = [(0, 0)] * len(shape)
    for number, loop in enumerate(loops):
        dim = _dim_of(loop.stride, shape, strides)
        if loop.stride != strides[dim]:
            cut = _singly(loop)
        elif index[dim] + loop.size > shape[dim]:
            cut = _at_rows(loop, index[dim], shape[dim])
        else:
            sizes[dim], dims[dim] = loop.size, (loop.dim, loop.step)
            continue
        others = loops[:number] + loops[number + 1 :]
        for skipped, inner in cut:
            start = base + skipped * loop.stride
            moved = first[loop.dim] + skipped * loop.step
            corner = (*first[: loop.dim], moved, *first[loop.dim + 1 :])
            yield from _boxes(view, shape, strides, start, corner, others + inner)
        return
    yield Fragment(view.source, index, tuple(sizes), first, tuple(dims), view.dtypes)


def _dim_of(stride: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The dim of the source along which steps of `stride` elements go."""
    return next(dim for dim, each in enumerate(strides) if shape[dim] > 1 and each <= stride)


def _singly(loop: _Loop) -> Iterator[tuple[int, list[_Loop]]]:
    """Cut a loop whose steps skip indices of the source: one index at a time."""
    return ((index, []) for index in range(loop.size))


def _at_rows(loop: _Loop, index: int, row: int) -> Iterator[tuple[int, list[_Loop]]]:
    """Cut a loop that begins at `index` of a row and goes on through more rows: a part, whole rows, a part."""
    done = 0
    if index:
        done = row - index
        yield 0, [loop._replace(size=done)] if done > 1 else []
    num_rows, rest = divmod(loop.size - done, row)
    if num_rows:
        inner = [loop._replace(size=row)]
        if num_rows > 1:
            inner.append(_Loop(num_rows, loop.stride * row, loop.dim, loop.step * row))
        yield done, inner
    if rest:
        yield done + num_rows * row, [loop._replace(size=rest)] if rest > 1 else []
