"""Strided views: the source element of each element of a tensor. The geometry of rewrites.

What a variable stands for is a tensor that need not exist. Disjoint boxes make it up, each a strided view of a source:
a step along a dim is a fixed number of row-major steps there. So dims can be permuted, boxes cut and joined, and shapes
changed, without looking at an element.

Figure 1. `q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0` for heads of one element. The tensor
qkv is six views, each of one source::

    qkv    q0 q1 k0 v0 q2 q3 k1 v1
           ----- -- -- ----- -- --

A `Fragment` is a view as a box on both sides, which is what reads, copies and messages can carry.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from operator import mul
from typing import NamedTuple

from shardwise.rewrite.metas import TensorMeta
from shardwise.space import Box, Run, boxes_of_run
from shardwise.space.boxes import index_of_element, row_major_strides

_FILL = "\0fill "
"""Begins the source of elements that are in no tensor: of padding. No tensor has such a name."""

_FEW = 8
"""So many views are asked one by one; more are sorted first."""


def fill_of(source: str) -> str | None:
    """The value of all elements of a source that is no tensor (see `number_text`); None for a tensor."""
    return source[len(_FILL) :] if source.startswith(_FILL) else None


_SCALED = "\0scaled "
"""Begins an entry of `dtypes` that is no dtype: there values are multiplied by the scales of their blocks."""


class Scales(NamedTuple):
    """By what the elements of a source are multiplied when they have been read."""

    source: str
    """The tensor of scales."""
    block: tuple[int, ...]
    """Elements of each dim that have one scale."""

    def __str__(self) -> str:
        return f"{_SCALED}{','.join(map(str, self.block))} {self.source}"


def scales_of(dtypes: Sequence[str]) -> Scales | None:
    """The scales by which values are multiplied that pass through `dtypes`."""
    # Only what is stored is dequantised, so that scales come right after the dtype of the source.
    if len(dtypes) < 2 or not dtypes[1].startswith(_SCALED):
        return None
    block, source = dtypes[1][len(_SCALED) :].split(" ", 1)
    return Scales(source, tuple(map(int, filter(None, block.split(",")))))


def with_scales_named(dtypes: tuple[str, ...], names: Sequence[str]) -> tuple[str, ...]:
    """The dtypes with the name of the scales for their number, as for the source of a view."""
    scales = scales_of(dtypes)
    if scales is None:
        return dtypes
    return (dtypes[0], str(scales._replace(source=names[int(scales.source)])), *dtypes[2:])


class StridedView(NamedTuple):
    """A box of a tensor, and where in a source its elements are."""

    offset: tuple[int, ...]
    """Where in the tensor it begins."""
    shape: tuple[int, ...]
    source: str
    """The tensor that has its elements, or what `fill_of` reads: then they are one value, with strides of 0."""
    base: int
    """The row-major element of the source with which the box begins."""
    strides: tuple[int, ...]
    """Elements of the source that one step along each dim passes; 0 along dims of size 1."""
    dtypes: tuple[str, ...]
    """The dtypes that a value passes through: the source's first, no two alike next to each other.

    The second may be scales, see `scales_of`.
    """


class ViewedTensor:
    """What a variable stands for. Immutable; operations give new ones, and do not check their arguments."""

    __slots__ = ("_most_cut", "_sorted", "dtype", "shape", "views")

    def __init__(self, shape: tuple[int, ...], dtype: str, views: tuple[StridedView, ...]) -> None:
        self.shape = shape
        self.dtype = dtype
        """In which its elements come out."""
        self.views = views
        """Disjoint, together all elements; a tensor without elements may have none."""
        self._sorted: dict[int, tuple[list[StridedView], list[int], int]] | None = None
        self._most_cut: int | None = None
        """The dim along which most views follow one another."""

    @staticmethod
    def source(name: str, meta: TensorMeta) -> "ViewedTensor":
        """The whole of a source."""
        shape = meta.shape
        # Views are compared as tuples, so each has one form only: no step is written for a dim that takes none.
        strides = _normal(shape, row_major_strides(shape))
        return ViewedTensor(
            shape, meta.dtype, (StridedView((0,) * len(shape), shape, name, 0, strides, (meta.dtype,)),)
        )

    def permute(self, dims: Sequence[int]) -> "ViewedTensor":
        """Dim i of the result is dim `dims[i]` of this."""

        def permuted(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([numbers[dim] for dim in dims])

        views = tuple(
            [
                StridedView(permuted(offset), permuted(shape), source, base, permuted(strides), dtypes)
                for offset, shape, source, base, strides, dtypes in self.views
            ]
        )
        return ViewedTensor(permuted(self.shape), self.dtype, views)

    def cast(self, dtype: str) -> "ViewedTensor":
        """The same elements in another dtype."""
        if dtype == self.dtype:
            return self
        return ViewedTensor(
            self.shape, dtype, tuple([view._replace(dtypes=(*view.dtypes, dtype)) for view in self.views])
        )

    def scaled(self, scales: "ViewedTensor", block: tuple[int, ...]) -> "ViewedTensor":
        """The elements of a source, multiplied by the scales of their blocks, in float32."""
        # Scales that are themselves made have no views. They are met by proofs alone, which do not read.
        entries = [str(Scales(view.source, block)) for view in scales.views[:1]]
        views = [view._replace(dtypes=(*view.dtypes, *entries, "float32")) for view in self.views]
        return ViewedTensor(self.shape, "float32", tuple(views))

    def crop(self, axis: int, start: int, stop: int) -> "ViewedTensor":
        """The indices from `start` to `stop` of one dim."""
        shape = _put(self.shape, axis, stop - start)
        views = []
        # Of a fused tensor with thousands of views only those near the cut are looked at. Otherwise splitting into n
        # parts would cost n times the number of views.
        for view in self._meeting(axis, start, stop):
            first = view.offset[axis]
            low, high = max(first, start), min(first + view.shape[axis], stop)
            if low >= high:
                continue
            size = high - low
            views.append(
                StridedView(
                    _put(view.offset, axis, low - start),
                    _put(view.shape, axis, size),
                    view.source,
                    # The source is entered later by as many steps as were cut off in front. No element moves.
                    view.base + (low - first) * view.strides[axis],
                    view.strides if size > 1 else _put(view.strides, axis, 0),
                    view.dtypes,
                )
            )
        return ViewedTensor(shape, self.dtype, tuple(views))

    @staticmethod
    def concat(values: Sequence["ViewedTensor"], axis: int) -> "ViewedTensor":
        """The tensors one after the other along a dim."""
        views: list[StridedView] = []
        start = 0
        for value in values:
            for view in value.views:
                moved = view._replace(offset=_put(view.offset, axis, view.offset[axis] + start)) if start else view
                # What was split and is joined again becomes one view again, and so one read of the file. Only
                # neighbours are compared, which keeps this linear in the number of views. Views that stay apart cost a
                # read more and change nothing.
                joined = _joined(views[-1], moved, axis) if views else None
                if joined is None:
                    views.append(moved)
                else:
                    views[-1] = joined
            start += value.shape[axis]
        return ViewedTensor(_put(values[0].shape, axis, start), values[0].dtype, tuple(views))

    def resize(self, shape: tuple[int, ...], fill: str) -> "ViewedTensor":
        """Cropped to the sizes that are smaller, and padded with a value to those that are larger."""
        value = self
        for axis, size in enumerate(shape):
            missing = size - value.shape[axis]
            if missing < 0:
                value = value.crop(axis, 0, size)
            elif missing > 0:
                value = ViewedTensor.concat([value, value._filler(axis, missing, fill)], axis)
        return value

    def _filler(self, axis: int, size: int, fill: str) -> "ViewedTensor":
        """What stands behind this along a dim once it is padded."""
        shape = _put(self.shape, axis, size)
        nowhere = (0,) * len(shape)
        view = StridedView(nowhere, shape, _FILL + fill, 0, nowhere, (self.dtype,))
        return ViewedTensor(shape, self.dtype, () if 0 in shape else (view,))

    @staticmethod
    def stack(values: Sequence["ViewedTensor"], axis: int) -> "ViewedTensor":
        """The tensors, of one shape, one after the other along a new dim."""
        return ViewedTensor.concat([value._with_dim(axis) for value in values], axis)

    def drop_dim(self, axis: int) -> "ViewedTensor":
        """Without a dim of size 1."""

        def without(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return numbers[:axis] + numbers[axis + 1 :]

        views = tuple(
            [
                view._replace(offset=without(view.offset), shape=without(view.shape), strides=without(view.strides))
                for view in self.views
            ]
        )
        return ViewedTensor(without(self.shape), self.dtype, views)

    def _with_dim(self, axis: int) -> "ViewedTensor":
        """With a new dim of size 1."""

        def more(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
            return (*numbers[:axis], number, *numbers[axis:])

        views = tuple(
            [
                view._replace(offset=more(view.offset, 0), shape=more(view.shape, 1), strides=more(view.strides, 0))
                for view in self.views
            ]
        )
        return ViewedTensor(more(self.shape, 1), self.dtype, views)

    def reshape(self, shape: tuple[int, ...]) -> "ViewedTensor":
        """The same row-major elements in another shape, which has as many."""
        if shape == self.shape:
            return self
        # Sizes cannot be paired in `_groups` where one is 0, and there is nothing to map.
        if 0 in shape:
            return ViewedTensor(shape, self.dtype, ())
        return ViewedTensor(shape, self.dtype, tuple(_reshaped(self, shape)))

    def meeting(self, box: Box) -> Iterator[StridedView]:
        """The parts of views inside a box of the tensor."""
        if len(self.views) > _FEW:
            # A stack of experts is cut along its first dim, a fused matrix along another one. Sorting along the dim
            # with the most different offsets leaves the fewest views to look at for a box.
            if self._most_cut is None:
                self._most_cut = max(
                    range(len(self.shape)), key=lambda dim: len({view.offset[dim] for view in self.views})
                )
            axis = self._most_cut
            found: Sequence[StridedView] = self._meeting(axis, box.offset[axis], box.offset[axis] + box.shape[axis])
        else:
            found = self.views
        stop = box.stop
        for view in found:
            offset, shape, source, base, strides, dtypes = view
            # This loop runs for each view of each box that a rank asks for: plain tuples, no objects for corners.
            low = tuple(map(max, offset, box.offset))
            sizes = tuple([min(a + n, b) - c for a, n, b, c in zip(offset, shape, stop, low, strict=True)])
            if min(sizes, default=1) <= 0:
                continue
            # A view that is asked for as a whole stays the same object.
            if sizes == shape:
                yield view
                continue
            first = base + sum([(new - old) * step for new, old, step in zip(low, offset, strides, strict=True)])
            yield StridedView(low, sizes, source, first, _normal(sizes, strides), dtypes)

    def _meeting(self, axis: int, start: int, stop: int) -> Sequence[StridedView]:
        """The views that may have indices from `start` to `stop` of a dim: of many, only those nearby."""
        if len(self.views) <= _FEW:
            return self.views
        if self._sorted is None:
            self._sorted = {}
        if axis not in self._sorted:
            views = sorted(self.views, key=lambda view: view.offset[axis])
            starts = [view.offset[axis] for view in views]
            self._sorted[axis] = views, starts, max(view.shape[axis] for view in views)
        #     start - longest     start         stop
        #     -----|----------------|=============|----->  first indices of views, in order
        #      too short to reach | these may | too late
        #
        # No view is longer than `longest`, so none that begins at or before `start - longest` reaches `start`. The
        # caller crops, and drops those that end too early.
        views, starts, longest = self._sorted[axis]
        return views[bisect_right(starts, start - longest) : bisect_left(starts, stop)]

    def is_identity_of(self, name: str, meta: TensorMeta) -> bool:
        """Whether every element is the element of source `name` that has its place there."""
        # Dtypes do not count here: the caller wants to know whether elements change their places.
        if self.shape != meta.shape:
            return False
        strides = row_major_strides(self.shape)
        return all(
            view.source == name
            and view.base == sum(map(mul, view.offset, strides))
            and view.strides == _normal(view.shape, strides)
            for view in self.views
        )

    def same_elements(self, other: "ViewedTensor", *, but_fills: bool = False) -> bool:
        """Whether every element is the same element of the same source as in another tensor, by the same casts.

        but_fills: leave out the elements of the other tensor that are in no source.
        """
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        # Nearly always the two were made by the same steps. Only what was cut elsewhere is compared box by box.
        if self.views == other.views:
            return True
        # Views of a tensor are disjoint and cover it. So it is enough that each part of theirs within one of ours
        # enters the same source at the same element with the same steps.
        for view in self.views:
            box = Box(view.offset, view.shape)
            for theirs in other.meeting(box):
                if but_fills and fill_of(theirs.source) is not None:
                    continue
                delta = [b - a for a, b in zip(view.offset, theirs.offset, strict=True)]
                base = view.base + sum(map(mul, delta, view.strides))
                ours = (view.source, base, _normal(theirs.shape, view.strides), view.dtypes)
                if ours != (theirs.source, theirs.base, theirs.strides, theirs.dtypes):
                    return False
        return True


def _put(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


def _normal(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in their one form: 0 along dims in which there are no steps."""
    return tuple([stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True)])


def _joined(a: StridedView, b: StridedView, axis: int) -> StridedView | None:
    """Two views as one, where the second goes on along `axis` as the first does; None where it does not."""
    if a.source != b.source or a.dtypes != b.dtypes:
        return None
    size, more = a.shape[axis], b.shape[axis]
    # A view of one index has no step of its own along this dim and takes that of its neighbour. Two views of one index
    # each have no step to agree on and stay apart.
    stride = a.strides[axis] or b.strides[axis]
    if (
        not stride
        or b.base != a.base + size * stride
        or b.offset != _put(a.offset, axis, a.offset[axis] + size)
        or b.shape != _put(a.shape, axis, more)
        or {a.strides[axis], b.strides[axis]} - {0, stride}
        or _put(a.strides, axis, 0) != _put(b.strides, axis, 0)
    ):
        return None
    return StridedView(
        a.offset, _put(a.shape, axis, size + more), a.source, a.base, _put(a.strides, axis, stride), a.dtypes
    )


_Indices = tuple[int, ...]

_DimGroup = tuple[slice, slice]
"""Dims of the old shape and dims of the new one that hold equally many elements."""

_SubBox = tuple[_Indices, _Indices, int, _Indices]
"""Within the new dims of a group a box (offset, shape), its first element, counted from the view's, and strides."""


# Figure 2. A reshape pairs dims of both shapes that hold equally many elements. Each pair is cut for itself, and the
# boxes of a view are the products of what is cut in each, so that only dims that are regrouped cost more views::
#
#     (4, 6, 5) -> (4, 2, 15)      4 | 4      6, 5 | 2, 15
#
#     rows 1 to 4 of 6, all of 5:   elements 5 to 20 of 30:   [0, 5:15] and [1, 0:5]


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[_DimGroup]:
    """Pair dims of two shapes of equally many elements and no dim of size 0 or 1, as few at a time as possible."""
    at_old = at_new = 0
    while at_old < len(old):
        begun_old, begun_new = at_old, at_new
        size_old, size_new = old[at_old], new[at_new]
        at_old, at_new = at_old + 1, at_new + 1
        while size_old != size_new:
            if size_old < size_new:
                size_old *= old[at_old]
                at_old += 1
            else:
                size_new *= new[at_new]
                at_new += 1
        yield slice(begun_old, at_old), slice(begun_new, at_new)


def _reshaped(value: ViewedTensor, shape: tuple[int, ...]) -> Iterator[StridedView]:
    """The views of a tensor with elements under another shape."""
    # Dims of size 1 hold no steps, and a pairing by products of sizes could not say to which side they belong.
    old = [dim for dim, size in enumerate(value.shape) if size > 1]
    new = [dim for dim, size in enumerate(shape) if size > 1]
    old_shape, new_shape = (tuple([sizes[dim] for dim in dims]) for sizes, dims in ((value.shape, old), (shape, new)))
    groups = list(_groups(old_shape, new_shape))
    for view in value.views:
        if 0 in view.shape:
            continue
        offset, sizes, strides = (tuple([each[dim] for dim in old]) for each in (view.offset, view.shape, view.strides))
        # Pairs of dims are independent: a view is cut in each for itself, and the product of the cuts makes up the
        # view.
        parts = [list(_regrouped(old_shape[a], offset[a], sizes[a], strides[a], new_shape[b])) for a, b in groups]
        for chosen in product(*parts):
            offsets, lengths, steps = [0] * len(shape), [1] * len(shape), [0] * len(shape)
            dims = iter(new)
            for part_offset, part_shape, _, part_strides in chosen:
                for start, size, stride in zip(part_offset, part_shape, part_strides, strict=True):
                    dim = next(dims)
                    offsets[dim], lengths[dim], steps[dim] = start, size, stride
            base = view.base + sum(first for _, _, first, _ in chosen)
            yield StridedView(tuple(offsets), tuple(lengths), view.source, base, tuple(steps), view.dtypes)


def _regrouped(
    old: tuple[int, ...],
    offset: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    new: tuple[int, ...],
) -> Iterator[_SubBox]:
    """A box within the old dims of a group, cut into boxes within its new dims."""
    if len(old) == len(new) == 1:
        yield offset, sizes, 0, strides
        return
    # Inner dims that are there as a whole, and through which the source is passed in even steps, are one stretch.
    dim = len(old) - 1
    step = strides[dim]
    while dim > 0 and sizes[dim] == old[dim] and (sizes[dim - 1] == 1 or strides[dim - 1] == old[dim] * strides[dim]):
        dim -= 1
    length = prod(sizes[dim:])
    passed, steps = row_major_strides(old), tuple([step * each for each in row_major_strides(new)])
    begin = sum(map(mul, offset, passed))
    # Outer dims are passed one index at a time: between two rows the source makes another step. A run of the remaining
    # elements is a few boxes of the new dims (at most 2n - 1 for n dims), as `boxes_of_run` cuts it.
    for index in product(*map(range, sizes[:dim])):
        start = begin + sum(map(mul, index, passed))
        first = sum(map(mul, index, strides))
        for box in boxes_of_run(new, Run(start, start + length)):
            yield box.offset, box.shape, first, _normal(box.shape, steps)
            first += box.num_elements * step


# Figure 3. Fragments of `w` of shape (3, 4), flattened and cropped to elements 2 to 11. The view is one loop of nine
# steps of one element. A box of `w` cannot turn a corner, so the loop is cut at rows::
#
#     . . a a      first=(0,)  offset=(0, 2)  shape=(1, 2)
#     b b b b      first=(2,)  offset=(1, 0)  shape=(1, 4)
#     c c c .      first=(6,)  offset=(2, 0)  shape=(1, 3)
#
# Flattened after a transpose, `w` is four views, one for each column, and each view is one fragment with `step` 1: the
# box goes down a column of `w` while the result goes along its only dim.
class Fragment(NamedTuple):
    """Elements that two tensors have in common: one was asked about, and here is a box of the other.

    In memory with `strides` that begins at index `origin`, the other's box is a view. Its shape is `shape`, its strides
    are `view_strides(strides)`, and its first element `view_start(strides, origin)`.
    """

    other: str
    """The tensor on the other side: the source where a target was asked about, and the target where a source was.

    Of padding, which is in no source, what `fill_of` reads.
    """
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


# Many fragments ask for the same few tensors: strides are computed at the first question.
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
        # A box without elements has no first one.
        if 0 in view.shape:
            continue
        if fill_of(view.source) is not None:
            dims = tuple([(dim, 1) if size > 1 else (0, 0) for dim, size in enumerate(view.shape)])
            found.append(Fragment(view.source, view.strides, view.shape, view.offset, dims, view.dtypes))
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
    """For each other tensor its boxes, as views whose source is the tensor asked about: `name`, of this shape.

    Padding is in no tensor.
    """
    strides = row_major_strides(shape)
    views: dict[str, list[StridedView]] = {}
    for each in fragments:
        if fill_of(each.other) is not None:
            continue
        # A fragment says where in the tensor asked about each step of its box leads. Read from the box, that is a view.
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
    # The box begins at `index`. Each loop may widen it along the one dim of the source along which the loop goes.
    index = index_of_element(shape, base)
    sizes = [1] * len(shape)
    dims = [(0, 0)] * len(shape)
    for number, loop in enumerate(loops):
        dim = _dim_of(loop.stride, shape, strides)
        # Steps that skip indices: a box has no holes, so each index is a box of its own.
        if loop.stride != strides[dim]:
            cut: Iterable[tuple[int, list[_Loop]]] = ((at, []) for at in range(loop.size))
        # Steps that run past the end of a row go on in the next one, which a box cannot do.
        elif index[dim] + loop.size > shape[dim]:
            cut = _at_rows(loop, index[dim], shape[dim])
        else:
            sizes[dim], dims[dim] = loop.size, (loop.dim, loop.step)
            continue
        # Every part of the loop that was cut begins at another element, so the other loops are looked at again from
        # there.
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
    # Row-major strides fall from the first dim to the last. A dim of size 1 may have the stride of its neighbour, and
    # no step can go along it.
    return next(dim for dim, each in enumerate(strides) if shape[dim] > 1 and each <= stride)


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
