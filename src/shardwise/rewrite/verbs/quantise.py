"""Quantise: narrow floats that have a scale for each block, and the values that they stand for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from shardwise.rewrite.metas import TensorMeta, keeps_values
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.attributes import (
    Attribute,
    ReadArgument,
    StatementArguments,
    Verb,
    dtype,
    integer,
    integers,
    listed,
    written_dtype,
)
from shardwise.rewrite.verbs.cast import Cast
from shardwise.rewrite.verbs.operation import Operation, OpsRefusal, Work, unknown

QUANTISED = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of elements that have scales."""

SCALES = ("float32", "bfloat16", "float8_e8m0fnu", "uint8")
"""Dtypes of scales. In the last two a scale is a power of two: both have its exponent, plus 127."""

ANEW = "quantised values have new scales, and are rounded"
"""What is lost where tensors are quantised, on the way there or back."""


@dataclass(frozen=True, slots=True)
class Rescaling:
    """The step of both: tensor 0 times tensor 1, its scales, becomes float32; or the other way round.

    The views of elements are those of the values. Scales that are made have none: each is of many elements.
    """

    block: tuple[int, ...]
    element_dtype: str
    scale_dtype: str
    scale_dims: int | None
    """See `Quantise`."""
    quantises: bool

    def undone(self) -> "Rescaling":
        """The other way round."""
        return replace(self, quantises=not self.quantises)

    def applied(self, values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
        """Elements and scales, or what they are together."""
        if not self.quantises:
            return [values[0].scaled(values[1], self.block)]
        (value,) = values
        scales = ViewedTensor(grid_of(value.shape, self.block)[: self.scale_dims], self.scale_dtype, ())
        return [ViewedTensor(value.shape, self.element_dtype, value.views), scales]


def grid_of(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a tensor."""
    return tuple([-(-size // max(1, each)) for size, each in zip(shape, block, strict=True)])


def _is_grid(scales: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether scales of this shape are those of a grid: the last dims may be left out where they have one block."""
    return scales == grid[: len(scales)] and all(size == 1 for size in grid[len(scales) :])


def _block_for(work: Work, asked: tuple[int, ...]) -> tuple[int, ...]:
    """The block that is meant for the first tensor."""
    if len(asked) != len(work.shape):
        shape = list(work.shape)
        raise OpsRefusal(f"the block {list(asked)} is for {len(asked)} dims, but {work.named(0)} has {shape}")
    return tuple([max(1, size) if each == -1 else each for size, each in zip(work.shape, asked, strict=True)])


@dataclass(frozen=True, slots=True)
class Dequantise(Operation):
    """Multiply narrow floats by the scales of their blocks: two tensors become one of float32."""

    block: tuple[int, ...]
    """Elements of each dim that have one scale; -1 is all. The last block of a dim may be smaller."""

    rescales: ClassVar[bool] = True

    def written(self) -> Iterator[str]:
        yield f"dequantise={listed(self.block)}"

    def undone(self) -> "Quantise":
        return Quantise(self.block, None, None)

    @property
    def loss(self) -> str:
        return f"dequantises: {ANEW}"

    def take(self, work: Work) -> None:
        if work.steps:
            raise OpsRefusal("dequantise is the first operation of a statement: scales belong to elements as stored")
        block = _block_for(work, self.block)
        (shape, elements, *_), (scales_shape, scales, *_) = work.metas
        grid = grid_of(shape, block)
        if elements not in QUANTISED or scales not in SCALES:
            raise OpsRefusal(
                f"dequantise takes elements of {', '.join(QUANTISED)} and scales of {', '.join(SCALES)}, but "
                f"{work.named(0)} has {elements} and {work.named(1)} has {scales}"
            )
        if not _is_grid(scales_shape, grid):
            raise OpsRefusal(
                f"{work.named(0)} of shape {list(shape)} has {list(grid)} blocks of {list(block)}, but "
                f"{work.named(1)} has {list(scales_shape)} scales"
            )
        dims = len(scales_shape) if len(scales_shape) < len(grid) else None
        step = Rescaling(block, elements, scales, dims, quantises=False)
        work.make([step], [TensorMeta(shape, "float32")], Quantise(self.block, elements, scales, dims))


@dataclass(frozen=True, slots=True)
class Quantise(Operation):
    """The reverse: one tensor becomes its narrow floats and the scales of their blocks."""

    block: tuple[int, ...]
    element_dtype: str | None
    """None: as recorded (only in inverses)."""
    scale_dtype: str | None
    scale_dims: int | None = None
    """So many dims the scales have; those behind them have one block and are left out. None: a dim for each."""

    rescales: ClassVar[bool] = True

    def written(self) -> Iterator[str]:
        yield f"quantise={listed(self.block)}"
        yield f"element_dtype={written_dtype(self.element_dtype)}"
        yield f"scale_dtype={written_dtype(self.scale_dtype)}"
        if self.scale_dims is not None:
            yield f"scale_dims={self.scale_dims}"

    def undone(self) -> Dequantise:
        return Dequantise(self.block)

    @property
    def loss(self) -> str:
        return f"quantises: {ANEW}"

    def take(self, work: Work) -> None:
        work.check_single("quantise")
        block, elements, scales = _block_for(work, self.block), self.element_dtype, self.scale_dtype
        if elements is None or scales is None:
            raise unknown("the dtypes of elements and scales are", "element_dtype= and scale_dtype=")
        if elements not in QUANTISED or scales not in SCALES:
            raise OpsRefusal(
                f"quantise makes elements of {', '.join(QUANTISED)} and scales of {', '.join(SCALES)}, not "
                f"{elements} and {scales}"
            )
        wide = work.metas[0].dtype
        if not keeps_values(wide, "float32"):
            raise OpsRefusal(f"quantise computes in float32, which does not hold {wide}: cast it before")
        work.change([Cast("float32")])
        grid, dims = grid_of(work.shape, block), self.scale_dims
        if dims is not None and not (0 <= dims < len(grid) and _is_grid(grid[:dims], grid)):
            raise OpsRefusal(f"scale_dims={dims} leaves out dims of {list(grid)} blocks that have more than one")
        step = Rescaling(block, elements, scales, dims, quantises=True)
        made = [TensorMeta(work.shape, elements), TensorMeta(grid[:dims], scales)]
        work.make([step], made, Dequantise(self.block))
        work.ended = "quantise is the last operation of a statement: scales belong to elements in their places"


# Its text

_FORMS: Final[Mapping[str, tuple[tuple[int, int], str]]] = {
    "dequantise": ((2, 1), "'elements, scales -> a'"),
    "quantise": ((1, 2), "'a -> elements, scales'"),
}


def _read(word: ReadArgument, arguments: StatementArguments) -> Dequantise | Quantise | None:
    counts, form = _FORMS[word.word]
    if arguments.names.stars or arguments.names.counts != counts:
        arguments.find(word, f"{word.word} is for {form}; here are {arguments.names.amount}")
        return None
    if word.integers is None:
        return None
    if word.word == "dequantise":
        return Dequantise(word.integers)
    elements, scales = (
        arguments.once[key].text if key in arguments.once else default
        for key, default in (("element_dtype", "float8_e4m3fn"), ("scale_dtype", "float32"))
    )
    return Quantise(word.integers, elements, scales, arguments.integer("scale_dims"))


def _fault(block: tuple[int, ...]) -> str:
    is_block = 0 not in block and min(block, default=1) >= -1
    return "" if is_block else "a block has at least one element along each dim; -1 is all"


QUANTISE = Verb(
    (
        Attribute("dequantise='[128,128]'", integers(_fault)),
        Attribute("quantise='[128,128]'", integers(_fault)),
        Attribute("element_dtype='float8_e4m3fn'", dtype, recordable=True, owners=("quantise",)),
        Attribute("scale_dtype='float32'", dtype, recordable=True, owners=("quantise",)),
        Attribute("scale_dims=1", integer(), owners=("quantise",)),
    ),
    tuple(_FORMS),
    _read,
    makes=True,
)
