"""Steps: what the operations of a statement come down to once shapes and dtypes are known. Each can be undone.

There are nine. Joining, splitting or interleaving tensors along a dim is one `Arrange`: for each result the stretches
of tensors that make it up, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.rewrite.strided_views import ViewedTensor

AxisSlice: TypeAlias = tuple[int, int, int]
"""Which tensor; from which index along the axis; to which (exclusive)."""


# Steps are data, so that a step and its inverse can be compared, and the same steps serve both for the views of a
# tensor and for the proof.
@dataclass(frozen=True, slots=True)
class Permutes:
    """Dim i of result j is dim `dims[j][i]` of tensor j. A tensor whose `dims` are None stays as it is."""

    dims: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Reshapes:
    """Tensor j gets shape `shapes[j]`, out of `old[j]`."""

    shapes: tuple[tuple[int, ...], ...]
    old: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Resizes:
    """Tensor j is cropped or padded to shape `shapes[j]`, out of `old[j]`. All elements that come in are `fill`."""

    shapes: tuple[tuple[int, ...], ...]
    old: tuple[tuple[int, ...], ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Casts:
    """Tensor j gets dtype `dtypes[j]`, out of `old[j]`."""

    dtypes: tuple[str, ...]
    old: tuple[str, ...]


# Figure 1. `qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2` for heads of one element: one tensor of
# size 8 in, three out. Each row of the table is a result; (0, 4, 6) are indices 4 and 5 of tensor 0::
#
#     qkv   0  1  2  3  4  5  6  7        table = (((0, 0, 2), (0, 4, 6)),      q
#           q  q  k  v  q  q  k  v                 ((0, 2, 3), (0, 6, 7)),      k
#                                                  ((0, 3, 4), (0, 7, 8)))      v
#
# Back, the table has one row of six slices: in the order of qkv, which result has each, and where.
@dataclass(frozen=True, slots=True)
class Arrange:
    """Result j consists of the stretches `table[j]`, one after the other along `axis`. Each index is used once."""

    axis: int
    sizes: tuple[int, ...]
    """Of the tensors, along the axis."""
    table: tuple[tuple[AxisSlice, ...], ...]


@dataclass(frozen=True, slots=True)
class Stacks:
    """All `count` tensors become one, along the new dim `axis`."""

    axis: int
    count: int


@dataclass(frozen=True, slots=True)
class Unstacks:
    """The tensor becomes `count`, one per index of dim `axis`."""

    axis: int
    count: int


@dataclass(frozen=True, slots=True)
class Dequantises:
    """Tensor 0 is multiplied by tensor 1, its scales, and becomes float32."""

    block: tuple[int, ...]
    element_dtype: str
    scale_dtype: str
    scale_dims: int | None
    """See `Quantise`."""


@dataclass(frozen=True, slots=True)
class Quantises:
    """The tensor becomes two, what is dequantised to it and the scales.

    The views of the first are those of the tensor. The second has none: each scale is of many elements.
    """

    block: tuple[int, ...]
    element_dtype: str
    scale_dtype: str
    scale_dims: int | None


def grid_of(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a tensor."""
    return tuple([-(-size // max(1, each)) for size, each in zip(shape, block, strict=True)])


def is_grid(scales: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether scales of this shape are those of a grid: the last dims may be left out where they have one block."""
    return scales == grid[: len(scales)] and all(size == 1 for size in grid[len(scales) :])


Step: TypeAlias = Permutes | Reshapes | Resizes | Casts | Arrange | Stacks | Unstacks | Dequantises | Quantises


def undone(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps that lead back."""
    return tuple([_undo(step) for step in reversed(steps)])


def _undo(step: Step) -> Step:
    match step:
        case Permutes(dims):
            # A tensor that stayed as it was has no order to invert.
            return Permutes(tuple([None if each is None else inverted(each) for each in dims]))
        # Steps carry what they replaced (`old`, `count`, `sizes`), because a step alone has to say how it is undone.
        case Reshapes(shapes, old):
            return Reshapes(old, shapes)
        case Resizes(shapes, old, fill):
            return Resizes(old, shapes, fill)
        case Casts(dtypes, old):
            return Casts(old, dtypes)
        case Dequantises(block, elements, scales, dims):
            return Quantises(block, elements, scales, dims)
        case Quantises(block, elements, scales, dims):
            return Dequantises(block, elements, scales, dims)
        case Stacks(axis, count):
            return Unstacks(axis, count)
        case Unstacks(axis, count):
            return Stacks(axis, count)
        case Arrange():
            return _rearranged(step)


def inverted(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the dims that permute back."""
    return tuple(sorted(range(len(dims)), key=dims.__getitem__))


def _rearranged(step: Arrange) -> Arrange:
    """Where each stretch went, in the order in which the tensors have them."""
    # For each tensor: the index of each of its slices, and where that slice went.
    went: list[list[tuple[int, AxisSlice]]] = [[] for _ in step.sizes]
    sizes = []
    for result, stretches in enumerate(step.table):
        at = 0
        for tensor, start, stop in stretches:
            went[tensor].append((start, (result, at, at + stop - start)))
            at += stop - start
        sizes.append(at)
    # In the order of the tensor's own indices, whatever order the results took them in.
    table = tuple([tuple([stretch for _, stretch in sorted(stretches)]) for stretches in went])
    # An index that no result takes could not be given back, and would vanish without a word.
    for size, stretches in zip(step.sizes, table, strict=True):
        assert size == sum(stop - start for _, start, stop in stretches), "an arrangement uses every index once"
    return Arrange(step.axis, tuple(sizes), table)


def apply_steps(steps: Sequence[Step], values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
    """Return what the steps make of tensors of the shapes for which they were made."""
    current = list(values)
    for step in steps:
        current = _applied(step, current)
    return current


def _applied(step: Step, values: list[ViewedTensor]) -> list[ViewedTensor]:
    match step:
        case Permutes(dims):
            return [v if order is None else v.permute(order) for v, order in zip(values, dims, strict=True)]
        case Reshapes(shapes, _):
            return [value.reshape(shape) for value, shape in zip(values, shapes, strict=True)]
        case Resizes(shapes, _, fill):
            return [value.resize(shape, fill) for value, shape in zip(values, shapes, strict=True)]
        case Casts(dtypes, _):
            return [value.cast(dtype) for value, dtype in zip(values, dtypes, strict=True)]
        case Dequantises(block):
            return [values[0].scaled(values[1], block)]
        case Quantises(block, elements, scales, dims):
            value = values[0]
            of_scales = ViewedTensor(grid_of(value.shape, block)[:dims], scales, ())
            return [ViewedTensor(value.shape, elements, value.views), of_scales]
        case Stacks(axis, _):
            return [ViewedTensor.stack(values, axis)]
        # This is the only step that makes several views of each view, and `crop` looks only at those near its index.
        case Unstacks(axis, count):
            return [values[0].crop(axis, index, index + 1).drop_dim(axis) for index in range(count)]
        case Arrange(axis, sizes, table):
            return [_arranged(values, axis, sizes, stretches) for stretches in table]


def _arranged(
    values: list[ViewedTensor], axis: int, sizes: tuple[int, ...], stretches: tuple[AxisSlice, ...]
) -> ViewedTensor:
    parts = [
        # A slice of all is the tensor itself, with its views as they are.
        values[tensor] if stop - start == sizes[tensor] else values[tensor].crop(axis, start, stop)
        for tensor, start, stop in stretches
    ]
    return parts[0] if len(parts) == 1 else ViewedTensor.concat(parts, axis)
