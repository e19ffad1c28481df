"""Compiled operations: what the operations of a statement do to tensors of given metas, checked and as steps.

Instances of one statement are alike: `layers.0` and `layers.31` have the same shapes. So what a statement does to given
metas is worked out once, as `CompiledOps` (or an `OpsRefusal`) that name no tensors.

Figure 1. `q, k -> qk, axis=0` for layers of equal shapes, from text to strided views::

    Statement       layers.$L.q, layers.$L.k -> layers.$L.qk      Concat(0)             parsed (syntax)
    instances       layers.0: q, k -> qk    layers.1: q, k -> qk                        expanded (expansion)
    CompiledOps     metas (2, 4), (2, 4)  -> Arrange(0, (2, 2), (((0, 0, 2), (1, 0, 2)),))    once for both
    Form            rows 0:2 of source 0, rows 2:4 of source 1                          once for both (nodes)
    Node            the form, with leaves ("layers.0.q", "layers.0.k")                  one for each
    StridedView     [0:2] of layers.0.q, [2:4] of layers.0.k                            when asked
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeAlias

from shardwise.rewrite.interleaving import fuse, heads_of_fused, heads_of_three, unfuse, unlike
from shardwise.rewrite.metas import TensorMeta, holds_number, keeps_values
from shardwise.rewrite.op_steps import (
    Arrange,
    Casts,
    Dequantises,
    Permutes,
    Quantises,
    Reshapes,
    Resizes,
    Stacks,
    Step,
    Unstacks,
    grid_of,
    inverted,
    is_grid,
    undone,
)
from shardwise.rewrite.statements import (
    Cast,
    Concat,
    Crop,
    Dequantise,
    Ffn,
    JoinOrSplit,
    Pad,
    Permute,
    Qkv,
    QkvPerRank,
    Quantise,
    Reshape,
    SplitStatement,
    Stack,
    StatementOperation,
    Unstack,
)

Degrees: TypeAlias = tuple[int | None, int | None]
"""For how many ranks along `tp` the fused tensor on the left is laid out, and that on the right.

None: no layout tells, so 1. 0: there is a layout, and it does not tell.
"""

OPEN: Degrees = (None, None)

QUANTISED = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of elements that have scales."""

SCALES = ("float32", "bfloat16", "float8_e8m0fnu", "uint8")
"""Dtypes of scales. In the last two a scale is a power of two: both have its exponent, plus 127."""


class OpsRefusal(Exception):  # noqa: N818 - it is a verdict that travels upwards, no user sees it
    """Why operations do not fit. In `text`, `_tensor(0)` stands for the name of the first left tensor."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    # A refusal is worked out once for all instances of a statement, before it is known which of them report it.
    def of(self, left: Sequence[str]) -> str:
        """The message for an instance with these left names."""
        return _TENSOR.sub(lambda match: left[int(match[1])], self.text)


_TENSOR = re.compile("\0([0-9]+)\0")


def _tensor(place: int) -> str:
    """What stands for the name of a left tensor in the text of a refusal."""
    return f"\0{place}\0"


@dataclass(frozen=True, slots=True)
class InverseOps:
    """What undoes operations on tensors of given metas, as operations that say everything."""

    after: tuple[tuple[StatementOperation, ...], ...]
    """For each result what is done with it first."""
    join_or_split: StatementOperation | None
    """What makes the tensors of the results."""
    before: tuple[tuple[StatementOperation, ...], ...]
    """For each tensor what is done with it last."""

    @property
    def alike(self) -> tuple[StatementOperation, ...] | None:
        """All in one go, where that is the same for all results and for all tensors; else None."""
        if len(set(self.after)) > 1 or len(set(self.before)) > 1:
            return None
        join_or_split = () if self.join_or_split is None else (self.join_or_split,)
        return (*self.after[0], *join_or_split, *self.before[0])


class Cropped(NamedTuple):
    """A tensor loses its last elements along some dims."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    fill: str | None
    """See `Crop`."""

    def __str__(self) -> str:
        return f"{list(self.old)} to {list(self.new)}"


class CompiledOps:
    """What operations do to tensors of given metas, whatever the tensors are called."""

    __slots__ = ("_undoing", "cropped", "inverse", "narrowed", "proved", "rescaling", "results", "steps", "undo")

    def __init__(
        self,
        steps: tuple[Step, ...],
        results: tuple[TensorMeta, ...],
        inverse: InverseOps,
        cropped: tuple[Cropped, ...],
    ) -> None:
        self.steps = steps
        self.results = results
        self.inverse = inverse
        self.undo = undone(steps)
        """The steps that lead back."""
        # One chain may narrow and widen again: float32 -> bfloat16 -> float32 ends in its dtype and has lost the
        # values. So each pair counts, not the two ends.
        casts = [step for step in steps if isinstance(step, Casts)]
        pairs = dict.fromkeys(pair for step in casts for pair in zip(step.old, step.dtypes, strict=True))
        self.narrowed = tuple([pair for pair in pairs if not keeps_values(*pair)])
        """Casts (from, to) that do not keep all values."""
        self.cropped = cropped
        self.rescaling = next((step for step in steps if isinstance(step, Dequantises | Quantises)), None)
        """What takes scales, or makes them: on the way back others are made of the values."""
        # Proved at the first instance that uses it. A statement with 100,000 instances has one object, and so one
        # proof.
        self.proved = False
        """Whether it was shown that `undo` leads back."""
        self._undoing: dict[CompiledOps, bool] = {}

    @property
    def does_nothing(self) -> bool:
        """Whether there is nothing to undo either: what is laid out as it was may be laid out anew on the way back."""
        return not self.steps and self.inverse.join_or_split is None

    def undone_by(self, other: "CompiledOps") -> bool:
        """Whether other operations, on what these made, do nothing but lead back; what was lost does not."""
        found = self._undoing.get(other)
        if found is None:
            # A pair of casts leads back by its steps alone. After a narrowing cast the values are others, so the nodes
            # have to be others too: a proof that took them for the same would prove nothing.
            loses = self.narrowed or self.cropped or self.rescaling
            found = self._undoing[other] = not loses and self.undo == other.steps
        return found


# From operations to steps


def compile_ops(
    operations: Sequence[StatementOperation],
    transposed: Sequence[bool],
    metas: Sequence[TensorMeta],
    num_results: int,
    degrees: Degrees,
) -> CompiledOps | OpsRefusal:
    """Return what operations do to tensors with these metas, or why they do not fit.

    `transposed` tells of each tensor whether all its dims are reversed first; `degrees` are the numbers of ranks for
    which a fused left and a fused right tensor are laid out. A degree that is not known (None) is 1, and stays open on
    the way back.
    """
    try:
        return _Working(metas, num_results, degrees).through(operations, transposed)
    except OpsRefusal as refusal:
        # The refusal is kept as a value. Its traceback would keep every frame of this call alive with it.
        return refusal.with_traceback(None)


class _Working:
    """Shapes and dtypes while operations are gone through from left to right."""

    def __init__(self, metas: Sequence[TensorMeta], num_results: int, degrees: Degrees) -> None:
        self.shapes = [meta.shape for meta in metas]
        self.dtypes = [meta.dtype for meta in metas]
        self.num_results = num_results
        self.source_degree, self.target_degree = degrees
        self.steps: list[Step] = []
        self.cropped: list[Cropped] = []
        self.join_or_split: StatementOperation | None = None
        """What undoes the operation that joins or splits, once it was gone through."""
        self.back: list[list[StatementOperation]] = [[] for _ in metas]
        """What undoes the operations since then, for each tensor, in the order in which it undoes."""
        self.before: list[list[StatementOperation]] | None = None
        """What undoes those before it."""

    def through(self, operations: Sequence[StatementOperation], transposed: Sequence[bool]) -> CompiledOps:
        # `^T` stands at a name, so it comes before every operation, whatever their order.
        if any(transposed):
            self._permute(
                [tuple(range(len(s)))[::-1] if t else None for s, t in zip(self.shapes, transposed, strict=True)]
            )
        for operation in operations:
            self._take(operation)
        # The count of names is checked last: until then an operation may still join or split.
        if len(self.shapes) != self.num_results:
            raise OpsRefusal(
                f"{len(self.shapes)} tensors are to become {self.num_results}: say how, by axis=, stack= or a fused_ "
                f"operation"
            )
        metas = tuple([TensorMeta(shape, dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)])
        # Without an operation that joins or splits there is one phase, and it belongs to the tensors that went in.
        after, before = (self.back, self.before) if self.before is not None else ([[]], self.back)
        inverse = InverseOps(tuple(map(tuple, after)), self.join_or_split, tuple(map(tuple, before)))
        return CompiledOps(tuple(self.steps), metas, inverse, tuple(self.cropped))

    def _take(self, operation: StatementOperation) -> None:
        places = range(len(self.shapes))
        if any(isinstance(step, Quantises) for step in self.steps):
            raise OpsRefusal("quantise is the last operation of a statement: scales belong to elements in their places")
        match operation:
            case Permute(dims):
                self._permute([self._order(place, dims) for place in places])
            case Reshape(shape):
                self._reshape([self._shape_asked(place, shape) for place in places])
            case Pad() | Crop():
                self._resize(operation)
            case Cast():
                self._cast([self._dtype_asked(place, operation) for place in places])
            case _:
                self._make(operation)

    def _make(self, operation: JoinOrSplit) -> None:
        """Take an operation that makes other tensors."""
        match operation:
            case Concat(axis, sizes):
                self._concat(axis, sizes)
            case SplitStatement():
                self._split(operation)
            case Stack(axis):
                self._stack(axis)
            case Unstack(axis):
                self._unstack(axis)
            case Qkv():
                self._qkv(operation)
            case QkvPerRank():
                self._qkv_per_rank(operation)
            case Ffn():
                self._ffn(operation)
            case Dequantise(block):
                self._dequantise(block)
            case Quantise():
                self._quantise(operation)

    def _join(self, steps: Sequence[Step], back: StatementOperation) -> None:
        """Take the steps of an operation that joins or splits, which `back` undoes."""
        self.steps += steps
        # From here on there are other tensors. What undoes the earlier operations is put aside for those that were
        # there, and the new ones begin with nothing to undo.
        self.join_or_split, self.before = back, self.back
        self.back = [[] for _ in range(self.num_results)]

    def _named(self, place: int) -> str:
        """A tensor as it is called in messages."""
        return _tensor(place) if self.before is None else "the result"

    def _order(self, place: int, dims: tuple[int, ...] | None) -> tuple[int, ...]:
        shape = self.shapes[place]
        if dims is None:
            return tuple(range(len(shape)))[::-1]
        if len(dims) != len(shape):
            raise OpsRefusal(
                f"permute {list(dims)} is for {len(dims)} dims, but {self._named(place)} has {len(shape)}: "
                f"{list(shape)}"
            )
        return dims

    def _permute(self, orders: list[tuple[int, ...] | None]) -> None:
        # A permute that changes nothing leaves no step, so that its tensor stays the same node.
        orders = [None if order is None or order == tuple(range(len(order))) else order for order in orders]
        if all(order is None for order in orders):
            return
        self.steps.append(Permutes(tuple(orders)))
        for place, order in enumerate(orders):
            if order is not None:
                self.shapes[place] = tuple([self.shapes[place][dim] for dim in order])
                _prepend(self.back[place], Permute(inverted(order)))

    def _shape_asked(self, place: int, asked: tuple[int, ...] | None) -> tuple[int, ...]:
        shape = self.shapes[place]
        if asked is None:
            raise OpsRefusal(
                f"the shape of {self._named(place)} before the reshape is not known. Check the inverse against the "
                "tensors of the rewrite, or write reshape='[..]'"
            )
        elements, known = prod(shape), prod(size for size in asked if size != -1)
        # With a size of 0 beside it, -1 could be any number: it is refused rather than guessed.
        fits = elements == known if -1 not in asked else known != 0 and elements % known == 0
        if not fits:
            raise OpsRefusal(
                f"{self._named(place)} has {elements} elements {list(shape)}, which do not make up {list(asked)}"
            )
        return tuple([elements // known if size == -1 else size for size in asked])

    def _reshape(self, shapes: list[tuple[int, ...]]) -> None:
        # The inverse needs no reshape either: it is built from what was done, not from what was written.
        if shapes == self.shapes:
            return
        self.steps.append(Reshapes(tuple(shapes), tuple(self.shapes)))
        for back, old, new in zip(self.back, self.shapes, shapes, strict=True):
            if old != new:
                _prepend(back, Reshape(old))
        self.shapes = shapes

    def _resize(self, operation: Pad | Crop) -> None:
        fill = operation.fill or "0"
        shapes = [self._sizes_asked(place, operation) for place in range(len(self.shapes))]
        for place, (old, new) in enumerate(zip(self.shapes, shapes, strict=True)):
            if old == new:
                continue
            if not holds_number(self.dtypes[place], fill):
                raise OpsRefusal(
                    f"fill is {fill}, which no element of {self._named(place)} can be: its dtype is "
                    f"{self.dtypes[place]}"
                )
            if isinstance(operation, Crop):
                self.cropped.append(Cropped(old, new, operation.fill))
            _prepend(self.back[place], Crop(old, fill) if isinstance(operation, Pad) else Pad(old, fill))
        if shapes != self.shapes:
            self.steps.append(Resizes(tuple(shapes), tuple(self.shapes), fill))
        self.shapes = shapes

    def _sizes_asked(self, place: int, operation: Pad | Crop) -> tuple[int, ...]:
        shape, asked = self.shapes[place], operation.sizes
        word, wrong = ("pad", "smaller") if isinstance(operation, Pad) else ("crop", "larger")
        if asked is None:
            other = "crop" if word == "pad" else "pad"
            raise OpsRefusal(
                f"the sizes of {self._named(place)} before the {other} are not known. Check the inverse against the "
                f"tensors of the rewrite, or write {word}='[..]'"
            )
        if len(asked) != len(shape):
            raise OpsRefusal(
                f"{word} {list(asked)} is for {len(asked)} dims, but {self._named(place)} has {len(shape)}: "
                f"{list(shape)}"
            )
        sizes = tuple([old if new == -1 else new for old, new in zip(shape, asked, strict=True)])
        if any(new != old and (new < old) == (word == "pad") for old, new in zip(shape, sizes, strict=True)):
            raise OpsRefusal(
                f"{word} {list(asked)} asks for a {wrong} size than {self._named(place)} has: {list(shape)}"
            )
        return sizes

    def _dtype_asked(self, place: int, cast: Cast) -> str:
        if cast.source is not None and cast.source != self.dtypes[place]:
            raise OpsRefusal(f"src_dtype is {cast.source!r}, but {self._named(place)} has dtype {self.dtypes[place]}")
        if cast.to is None:
            raise OpsRefusal(
                f"the dtype of {self._named(place)} before the cast is not known. Check the inverse against the "
                "tensors of the rewrite, or write src_dtype= and dst_dtype= in it"
            )
        return cast.to

    def _cast(self, dtypes: list[str]) -> None:
        if dtypes == self.dtypes:
            return
        self.steps.append(Casts(tuple(dtypes), tuple(self.dtypes)))
        for back, old, new in zip(self.back, self.dtypes, dtypes, strict=True):
            if old != new:
                # Out of which dtype a cast was made is what text alone does not say. Here it is known, and so the
                # inverse is exact.
                _prepend(back, Cast(old))
        self.dtypes = dtypes

    def _axis(self, place: int, axis: int | None, *, new: bool = False) -> int:
        """The dim that is meant, counted from the front."""
        rank = len(self.shapes[place]) + new
        # AOA's default: the fused dim of weights that are stored (in, out).
        if axis is None:
            axis = 1 if rank > 1 else 0
        if not -rank <= axis < rank:
            dims = f"{rank} dims" if rank != 1 else "one dim"
            shape = list(self.shapes[place])
            made = f" would have {dims} then" if new else f" has {dims}: {shape}"
            raise OpsRefusal(f"there is no dim {axis} in {self._named(place)}, which{made}")
        return axis % rank

    def _one(self, what: str) -> None:
        if len(self.shapes) != 1:
            raise OpsRefusal(f"{what} parts one tensor, but there are {len(self.shapes)}")

    def _alike(self, axis: int | None) -> None:
        """All tensors have one dtype, and one shape but for a dim."""
        first = self.shapes[0]
        # Tensors of different dtypes are not promoted here. The statement has to say the cast, or its inverse would not
        # know it.
        for place, shape in enumerate(self.shapes[1:], 1):
            same = len(shape) == len(first) and all(
                a == b for dim, (a, b) in enumerate(zip(shape, first, strict=True)) if dim != axis
            )
            if not same:
                besides = "" if axis is None else f" but for dim {axis}"
                raise OpsRefusal(
                    f"tensors that are joined have the same shape{besides}, but {_tensor(0)} has {list(first)} "
                    f"and {_tensor(place)} has {list(shape)}"
                )
            if self.dtypes[place] != self.dtypes[0]:
                raise OpsRefusal(
                    f"tensors that are joined have the same dtype, but "
                    f"{_tensor(0)} has {self.dtypes[0]} and {_tensor(place)} "
                    f"has {self.dtypes[place]}: cast one of them in a statement before"
                )

    def _sizes(self, axis: int) -> tuple[int, ...]:
        return tuple([shape[axis] for shape in self.shapes])

    def _concat(self, asked_axis: int, sizes: tuple[int, ...] | None) -> None:
        axis = self._axis(0, asked_axis)
        self._alike(axis)
        actual = self._sizes(axis)
        if sizes is not None and sizes != actual:
            raise OpsRefusal(f"sizes says {list(sizes)} along dim {axis}, but the tensors have {list(actual)} there")
        # A star may stand for one tensor only, and joining one tensor changes nothing. Neither does the way back.
        if len(actual) > 1:
            self._arrange([fuse(axis, actual, 1)], SplitStatement(axis, None if len(set(actual)) == 1 else actual))

    def _split(self, split: SplitStatement) -> None:
        self._one("a split")
        axis = self._axis(0, split.axis)
        size, parts = self.shapes[0][axis], self.num_results
        sizes = split.sizes
        # `recorded` comes from an inverse of text whose target is not known. Equal parts would be a guess that often
        # fits.
        if sizes is None and split.recorded and parts > 1:
            raise OpsRefusal(
                f"the sizes of the {parts} parts of {self._named(0)} along dim {axis} are not known. Check the "
                "inverse against the tensors of the rewrite, or write sizes='[..]'"
            )
        if sizes is None:
            if size % parts:
                raise OpsRefusal(
                    f"{self._named(0)} has size {size} along dim {axis}, which is not divisible into {parts} equal "
                    f"parts: say which by sizes='[..]'"
                )
            sizes = (size // parts,) * parts
        if len(sizes) != parts or sum(sizes) != size:
            raise OpsRefusal(
                f"sizes {list(sizes)} are {len(sizes)} parts with {sum(sizes)} together, but {self._named(0)} has size "
                f"{size} along dim {axis} and becomes {parts} tensors"
            )
        if parts > 1:
            self._arrange([unfuse(axis, sizes, 1)], Concat(axis))

    def _arrange(self, steps: list[Arrange], back: StatementOperation) -> None:
        """Rearrange along an axis; the tensors were found to be alike."""
        axis = steps[-1].axis
        first = self.shapes[0]
        sizes = [sum([stop - start for _, start, stop in stretches]) for stretches in steps[-1].table]
        self._join(steps, back)
        self.shapes = [(*first[:axis], size, *first[axis + 1 :]) for size in sizes]
        self.dtypes = [self.dtypes[0]] * len(sizes)

    def _stack(self, asked_axis: int) -> None:
        axis = self._axis(0, asked_axis, new=True)
        self._alike(None)
        shape, count = self.shapes[0], len(self.shapes)
        # A stack of one tensor is a reshape, and its inverse needs nothing that splits.
        if count == 1:
            self._reshape([(*shape[:axis], 1, *shape[axis:])])
            return
        self._join([Stacks(axis, count)], Unstack(axis))
        self.shapes, self.dtypes = [(*shape[:axis], count, *shape[axis:])], self.dtypes[:1]

    def _unstack(self, asked_axis: int) -> None:
        self._one("stack=")
        axis = self._axis(0, asked_axis)
        shape = self.shapes[0]
        if shape[axis] != self.num_results:
            raise OpsRefusal(
                f"{self._named(0)} has {shape[axis]} indices along dim {axis}, one tensor each, but "
                f"{self.num_results} are named"
            )
        part = shape[:axis] + shape[axis + 1 :]
        if self.num_results == 1:
            self._reshape([part])
            return
        self._join([Unstacks(axis, self.num_results)], Stack(axis))
        self.shapes = [part] * self.num_results
        self.dtypes = self.dtypes * self.num_results

    def _block(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """The block that is meant for the first tensor."""
        shape = self.shapes[0]
        if len(asked) != len(shape):
            raise OpsRefusal(
                f"the block {list(asked)} is for {len(asked)} dims, but {self._named(0)} has {list(shape)}"
            )
        return tuple([max(1, size) if each == -1 else each for size, each in zip(shape, asked, strict=True)])

    def _dequantise(self, asked: tuple[int, ...]) -> None:
        if self.steps:
            raise OpsRefusal("dequantise is the first operation of a statement: scales belong to elements as stored")
        block = self._block(asked)
        grid, (elements, scales) = grid_of(self.shapes[0], block), self.dtypes
        if elements not in QUANTISED or scales not in SCALES:
            raise OpsRefusal(
                f"dequantise takes elements of {', '.join(QUANTISED)} and scales of {', '.join(SCALES)}, but "
                f"{_tensor(0)} has {elements} and {_tensor(1)} has {scales}"
            )
        if not is_grid(self.shapes[1], grid):
            raise OpsRefusal(
                f"{_tensor(0)} of shape {list(self.shapes[0])} has {list(grid)} blocks of {list(block)}, but "
                f"{_tensor(1)} has {list(self.shapes[1])} scales"
            )
        dims = len(self.shapes[1]) if len(self.shapes[1]) < len(grid) else None
        self._join([Dequantises(block, elements, scales, dims)], Quantise(asked, elements, scales, dims))
        self.shapes, self.dtypes = self.shapes[:1], ["float32"]

    def _quantise(self, operation: Quantise) -> None:
        self._one("quantise")
        block, elements, scales = self._block(operation.block), operation.element_dtype, operation.scale_dtype
        if elements is None or scales is None:
            raise OpsRefusal(
                "the dtypes of elements and scales are not known. Check the inverse against the tensors of the "
                "rewrite, or write element_dtype= and scale_dtype="
            )
        if elements not in QUANTISED or scales not in SCALES:
            raise OpsRefusal(
                f"quantise makes elements of {', '.join(QUANTISED)} and scales of {', '.join(SCALES)}, not "
                f"{elements} and {scales}"
            )
        if not keeps_values(self.dtypes[0], "float32"):
            raise OpsRefusal(f"quantise computes in float32, which does not hold {self.dtypes[0]}: cast it before")
        self._cast(["float32"])
        grid, dims = grid_of(self.shapes[0], block), operation.scale_dims
        if dims is not None and not (0 <= dims < len(grid) and is_grid(grid[:dims], grid)):
            raise OpsRefusal(f"scale_dims={dims} leaves out dims of {list(grid)} blocks that have more than one")
        self._join([Quantises(block, elements, scales, dims)], Dequantise(operation.block))
        self.shapes, self.dtypes = [self.shapes[0], grid[:dims]], [elements, scales]

    def _heads(self, axis: int, qkv: Qkv | QkvPerRank) -> tuple[int, ...]:
        """Sizes of query, key and value along the axis, whether they are fused or not."""
        num_heads, num_groups = qkv.num_heads, qkv.num_groups
        # One size: a fused tensor is there. Three: query, key and value are.
        there = self._sizes(axis)
        by_size = heads_of_fused(sum(there), num_heads, num_groups)
        if len(there) == 1 and qkv.sizes is None:
            if by_size is None:
                raise OpsRefusal(
                    f"{self._named(0)} has size {there[0]} along dim {axis}, which its {num_heads} query heads and "
                    f"twice {num_groups} key-value heads do not divide. Check axis=, num_heads= and "
                    "num_key_value_groups=, or give the sizes of query, key and value by sizes='[..]'"
                )
            return by_size
        sizes = there if qkv.sizes is None else qkv.sizes
        if sizes != there and (sum(sizes),) != there:
            raise OpsRefusal(f"sizes says {list(sizes)} along dim {axis}, but there is {' and '.join(map(str, there))}")
        wrong = heads_of_three(sizes, num_heads, num_groups)
        if wrong is not None:
            raise OpsRefusal(f"along dim {axis}, {wrong}")
        # Multi-head latent attention has value heads of their own size. Fused without `sizes`, such a tensor would part
        # into heads of one size on the way back, without an error and wrongly.
        if qkv.sizes is None and by_size not in (None, sizes):
            raise OpsRefusal(
                f"along dim {axis}, value heads have another size than key heads, and the fused tensor could also "
                f"consist of heads of one size. Write sizes='{list(sizes)}', so that it can be split again"
            )
        return sizes

    def _joined_axis(self, axis: int | None) -> int:
        found = self._axis(0, axis)
        self._alike(found)
        return found

    def _qkv(self, qkv: Qkv) -> None:
        axis = self._joined_axis(qkv.axis)
        sizes = self._heads(axis, qkv)
        made = fuse if qkv.joins else unfuse
        # The inverse says the axis and, where they are not the obvious ones, the sizes: it shall not depend on
        # defaults.
        back = replace(qkv, axis=axis, joins=not qkv.joins, sizes=unlike(sizes, qkv.num_heads, qkv.num_groups))
        self._arrange([made(axis, sizes, qkv.num_groups)], back)

    def _qkv_per_rank(self, qkv: QkvPerRank) -> None:
        axis = self._joined_axis(qkv.axis)
        sizes = self._heads(axis, qkv)
        for side, degree in self._degrees(qkv, axis):
            if qkv.num_heads % degree or qkv.num_groups % degree:
                raise OpsRefusal(
                    f"the {side} tensor is fused for tensor-parallel degree {degree}, which does not divide num_heads="
                    f"{qkv.num_heads} and num_key_value_groups={qkv.num_groups}"
                )
        self._lay(replace(qkv, sizes=unlike(sizes, qkv.num_heads, qkv.num_groups)), axis, sizes)

    def _degrees(self, operation: Ffn | QkvPerRank, axis: int) -> Iterator[tuple[str, int]]:
        """The degrees of what is fused, with the side on which it is."""
        for side, attribute, count, degree in (
            ("left", "src_tp", operation.sources, self.source_degree),
            ("right", "dst_tp", operation.targets, self.target_degree),
        ):
            # Three tensors on a side are not fused, and have no degree. None says that nothing tells one, and 1 is
            # meant.
            if count != 1 or degree is None:
                continue
            # 0: a layout cuts the tensor, and FSDP may have done so as well as tensor parallelism. To guess would be to
            # shuffle rows silently.
            if not degree:
                raise OpsRefusal(
                    f"the {side} tensor is cut along dim {axis} by its layout, which has no number of ranks for the "
                    f"fusing. Write {attribute}= with the tensor-parallel degree, or {attribute}=1 if data "
                    "parallelism cuts it"
                )
            yield side, degree

    def _ffn(self, ffn: Ffn) -> None:
        axis = self._joined_axis(ffn.axis)
        sizes = self._sizes(axis)
        if len(sizes) == 1:
            if sizes[0] % 2:
                raise OpsRefusal(
                    f"{self._named(0)} has size {sizes[0]} along dim {axis}, which is not divisible into gate and up: "
                    f"check axis="
                )
            sizes = (sizes[0] // 2,) * 2
        if sizes[0] != sizes[1]:
            raise OpsRefusal(
                f"gate and up have the same size, but along dim {axis} they have {sizes[0]} and {sizes[1]}"
            )
        for side, degree in self._degrees(ffn, axis):
            if sizes[0] % degree:
                raise OpsRefusal(
                    f"the {side} tensor is fused for tensor-parallel degree {degree}. It does not divide gate and up "
                    f"of size {sizes[0]} each, {sum(sizes)} together, along dim {axis}"
                )
        self._lay(ffn, axis, sizes)

    def _lay(self, operation: QkvPerRank | Ffn, axis: int, sizes: tuple[int, ...]) -> None:
        """Bring what is fused for one degree, or not fused, to what is fused for another, or not."""
        sources, targets = operation.sources, operation.targets
        left = self.source_degree if sources == 1 else None
        right = self.target_degree if targets == 1 else None
        back = replace(operation, axis=axis, sources=targets, targets=sources, source_degree=right, target_degree=left)
        # From one degree to the same nothing moves. Still the inverse names the operation: an open side may have a
        # layout on the way back, and then elements do move; a degree that is said tells those of other statements.
        if sources == targets and (left or 1) == (right or 1):
            self._join([], back)
            return
        # Between two degrees the way is through the unfused tensors: there are two ways to and from them, and not one
        # for each pair of degrees.
        steps = [unfuse(axis, sizes, left or 1)] if sources == 1 else []
        steps += [fuse(axis, sizes, right or 1)] if targets == 1 else []
        self._arrange(steps, back)


def _prepend(back: list[StatementOperation], operation: Permute | Reshape | Pad | Crop | Cast) -> None:
    """Let an operation be carried out before others: with the first of them in one, where they are of one kind."""
    if back and type(back[0]) is type(operation):
        # Two permutes are one, which has to be composed. Of two reshapes or casts the earlier result is only passed
        # through: what is already in `back` leads all the way.
        if isinstance(operation, Permute) and isinstance(back[0], Permute):
            dims, others = operation.dims, back[0].dims
            assert dims is not None
            assert others is not None
            back[0] = Permute(tuple([dims[dim] for dim in others]))
        return
    back.insert(0, operation)
