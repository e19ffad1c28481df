"""Random rewrites: sources, and the text of valid statements on them, grown one by one with the oracle at hand.

`cases` are lossless or lossy, with the optimizer's state or without. `open_chain` has sources and outputs in layouts,
and leaves degrees open: what no rank could do alone is right as `degree_oracle` finds it out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardwise.rewrite import TensorMeta
from shardwise.space import Box, Run, boxes_of_run
from tests.properties import tried
from tests.rewrite.degree_oracle import BOUNDARY
from tests.rewrite.oracle import Interpreter, Tensor, Values, cast, split_line

Shape = tuple[int, ...]

proven = tried(25)

DTYPES = ("float32", "float32", "float16", "bfloat16")
NARROWER = {"float32": ("float16", "bfloat16"), "float16": ("bfloat16",), "bfloat16": ("float16",)}
SHARES = {"fused_ffn": (1, 1), "fused_qkv_old": (4, 2, 2), "fused_qkv": (4, 2, 2)}
"""Sizes of what is fused, by flag; of heads as HEADS says."""
HEADS = ", num_heads=4, num_key_value_groups=2"
MOST_ELEMENTS = 300


def numbered(number: int, shape: Shape, dtype: str = "float32") -> Values:
    """Values that tell which tensor and which element, most of them not far from where casts begin to round up."""
    count = math.prod(shape)
    values = number * 100 + np.arange(count, dtype=np.float32) * np.float32(1 + 2**-8 + 2**-13)
    return cast(values.astype(np.float32).reshape(shape), dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A rewrite, and what it is applied to."""

    text: str
    sections: tuple[str, ...]
    """The same in parts that can be applied one after the other."""
    sources: dict[str, Tensor]
    lossless: bool
    """No drop, no fan-out, no crop, no cast that loses values: what the rewrite does can be undone."""


@dataclass(slots=True)
class Writer:
    """Writes a rewrite; knows at each moment which tensors there are, for the oracle runs along."""

    random: Random
    with_state: bool = False
    is_open: bool = False
    """Sources lie in layouts, and degrees may be left open."""
    count: int = 0
    lines: list[str] = field(default_factory=list)
    sources: dict[str, Tensor] = field(default_factory=dict)
    oracle: Interpreter = field(default_factory=Interpreter)
    lost: bool = False
    opens: bool = False
    """Whether a degree was left open."""

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def chosen(self, *options: Any) -> Any:
        return self.random.choice(options)

    def chance(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def shape(self, least_dims: int = 0) -> Shape:
        sizes = self.chosen((2, 4, 4, 8, 16), (2, 4)) if self.is_open else (1, 2, 2, 3, 3, 4, 5, 6, 0)
        least = max(least_dims, self.with_state or self.is_open)
        return tuple(self.random.choice(sizes) for _ in range(self.number(least, 3)))

    def layout(self, shape: Shape) -> Shape:
        """None, an even cut of a dim for some ranks, or a cut that nothing more is known about."""
        dims = [dim for dim, size in enumerate(shape) if size % 2 == 0]
        if not self.is_open or not dims or self.chance(3):
            return ()
        cut = self.random.choice(dims)
        degree = 0 if self.chance(6) else self.random.choice([each for each in (2, 4, 8) if shape[cut] % each == 0])
        return tuple(degree if dim == cut else 1 for dim in range(len(shape)))

    def new(self) -> str:
        """A name that is not used, as it is written (quoted where it must be)."""
        self.count += 1
        return str(self.chosen(f"n{self.count}", f"l.{self.count}.w", f"{self.count}_a.b", f'"x-{self.count}/y"'))

    def target(self) -> str:
        """A name to assign: a new one, or one that was read before."""
        free = sorted(set(self.oracle.planes[""]) - self.oracle.unread - self.oracle.kept)
        return f'"{self.chosen(*free)}"' if free and self.chance(4) else self.new()

    def source(self, shape: Shape, dtype: str = "float32", name: str = "") -> str:
        """A source tensor, with its optimizer's state. Returns the name as it is written."""
        written = name or self.new()
        bare = written.replace('"', "")
        states = {f"optimizer/{bare}/exp_avg": (shape, "float32"), f"optimizer/{bare}/step": ((), "float32")}
        for key, (its_shape, its_dtype) in {bare: (shape, dtype), **(states if self.with_state else {})}.items():
            number = 7 if key.endswith("/step") else len(self.sources)
            values = numbered(number, its_shape, its_dtype)
            self.sources[key] = Tensor(values, its_dtype, self.layout(its_shape))
            self.oracle.add_source(key, Tensor(values, its_dtype))
        return written

    def tensor(self, written: str) -> Tensor:
        return self.oracle.planes[""][written.replace('"', "")]

    def unread(self, fits: Callable[[Tensor], bool]) -> list[str]:
        """The names of tensors that nothing has read yet."""
        plane = self.oracle.planes[""]
        return sorted(name for name in self.oracle.unread - self.oracle.kept if name in plane and fits(plane[name]))

    def live(self, *, least_dims: int = 0) -> str:
        """A tensor that nothing has read yet; a new source where there is none."""
        names = self.unread(lambda tensor: tensor.values.ndim >= least_dims)
        if names and (self.is_open or not self.chance(5)):
            return f'"{self.chosen(*names)}"'
        return self.source(self.shape(least_dims), self.chosen(*DTYPES))

    def beside(self, shape: Shape, *others: str) -> str:
        """A tensor of this shape and of the dtype of others, to be joined with them: one that is there, or new."""
        dtype = self.tensor(others[0]).dtype
        taken = {each.replace('"', "") for each in others}
        names = self.unread(lambda each: (each.shape, each.dtype) == (shape, dtype))
        names = [each for each in names if each not in taken]
        return f'"{self.chosen(*names)}"' if names and not self.chance(3) else self.source(shape, dtype)

    def write(self, line: str) -> None:
        self.lines.append(line)
        self.oracle.run(split_line(line))


def _axis(writer: Writer, ndim: int) -> tuple[int, str]:
    """A dim, and how it is written: from the front or from the back."""
    axis = writer.number(0, ndim - 1)
    return axis, str(writer.chosen(axis, axis - ndim))


def _factored(writer: Writer, count: int) -> list[int]:
    """A shape with so many elements."""
    if count == 0:
        return [0, writer.number(1, 3)]
    shape: list[int] = []
    while count > 1 and len(shape) < 3:
        shape.append(writer.chosen(*[d for d in range(1, count + 1) if count % d == 0]))
        count //= shape[-1]
    return [*shape, count] if count > 1 or not shape else shape


def _unary(writer: Writer, shape: Shape) -> str:
    """Operations that leave one tensor one, as they are written after a name."""
    written, kinds = "", ["permute", "reshape", *([] if writer.is_open else ["pad"])]
    for kind in writer.random.sample(kinds, writer.number(1, len(kinds))):
        if kind == "pad":
            larger = [size + writer.number(0, 2) for size in shape]
            asked = [-1 if new == old and writer.chance(2) else new for old, new in zip(shape, larger, strict=True)]
            fill = writer.chosen("", ", fill=2", ", fill='-0.3'", ", fill='inf'")
            written += f", pad='{asked}'{fill}"
            shape = tuple(larger)
        elif kind == "permute":
            dims = writer.chosen([], writer.random.sample(range(len(shape)), len(shape)))
            written += f", permute='{dims}'"
            shape = tuple(shape[dim] for dim in dims) if dims else shape[::-1]
        else:
            sizes = _factored(writer, math.prod(shape))
            shape = tuple(sizes)
            if math.prod(shape) and writer.chance(3):
                sizes[writer.number(0, len(sizes) - 1)] = -1
            written += f", reshape='{sizes}'"
    return written


def rename(writer: Writer) -> None:
    writer.write(f"{writer.live()} -> {writer.target()}")


def change(writer: Writer) -> None:
    name = writer.live()
    flip, shape = writer.chosen("", "^T"), writer.tensor(name).shape
    target = name if writer.chance(6) else writer.target()
    writer.write(f"{name}{flip} -> {target}{_unary(writer, shape[::-1] if flip else shape)}")


def join(writer: Writer) -> None:
    """Concatenate a tensor with others that differ along the dim, each perhaps transposed, or stack equal ones."""
    name = writer.live(least_dims=1)
    shape = writer.tensor(name).shape
    if math.prod(shape) > MOST_ELEMENTS:
        return
    if writer.chance(3):
        _, written = _axis(writer, len(shape) + 1)
        names = [name]
        for _ in range(writer.number(1, 2)):
            names.append(writer.beside(shape, *names))
        writer.write(f"{', '.join(names)} -> {writer.target()}, stack={written}")
        return
    axis, written = _axis(writer, len(shape))
    names, sizes = [name], [shape[axis]]
    for _ in range(writer.number(1, 2)):
        size = writer.chosen(1, 2, 4, shape[axis]) if writer.is_open else writer.number(1, 4)
        other = (*shape[:axis], size, *shape[axis + 1 :])
        flip = writer.chosen("", "^T")
        names.append(writer.beside(other[::-1] if flip else other, *(each.removesuffix("^T") for each in names)) + flip)
        sizes.append(size)
    extra = f", sizes='{sizes}'" if writer.chance(4) else ""
    after = ", permute='[]'" if writer.chance(4) else ""
    writer.write(f"{', '.join(names)} -> {writer.target()}, axis={written}{extra}{after}")


def part(writer: Writer) -> None:
    """Equal parts, single indices, or two uneven parts."""
    name = writer.live(least_dims=1)
    shape = writer.tensor(name).shape
    flip = "^T" if writer.chance(4) else ""
    axis, written = _axis(writer, len(shape))
    size = shape[::-1][axis] if flip else shape[axis]
    after = ", permute='[]'" if writer.chance(4) else ""
    divisors = [each for each in (2, 3, 4, 5) if size and size % each == 0]
    if 2 <= size <= 4 and writer.chance(2) and len(shape) > writer.with_state:
        number, how = size, f"stack={written}"
    elif divisors and not writer.chance(3):
        number, how = writer.chosen(*divisors), f"axis={written}"
    elif size >= 2:
        first = writer.number(1, size - 1)
        number, how = 2, f"axis={written}, sizes='[{first}, {size - first}]'"
    else:
        return
    writer.write(f"{name}{flip} -> {', '.join(writer.new() for _ in range(number))}, {how}{after}")


def fused(writer: Writer) -> None:
    """One of the `fused_` statements, in any direction, between degrees that are said, open, or no fit for heads."""
    flag = writer.chosen("fused_qkv", "fused_qkv_old", "fused_ffn")
    shares, degrees = SHARES[flag], (writer.chosen(1, 2), writer.chosen(1, 2))
    form = writer.chosen("make", "take", *([] if flag == "fused_qkv" else ["again"]))
    unit = shares[0] if form == "make" else sum(shares)
    name = writer.live(least_dims=1)
    shape = writer.tensor(name).shape
    axis = writer.number(0, len(shape) - 1)
    if not writer.is_open and (not shape[axis] or shape[axis] % (unit * math.prod(degrees))):
        size = unit * math.prod(degrees) * writer.number(1, 2)
        name = writer.source((*shape[:axis], size, *shape[axis + 1 :]))
        shape = writer.tensor(name).shape
    if shape[axis] % unit or math.prod(shape) > MOST_ELEMENTS:
        return
    left, right = [name], [writer.new() for _ in range(len(shares) if form == "take" else 1)]
    for share in shares[1:] if form == "make" else ():
        left.append(writer.beside((*shape[:axis], shape[axis] // unit * share, *shape[axis + 1 :]), *left))
    how = f", {flag}{HEADS if flag != 'fused_ffn' else ''}, axis={axis}"
    for side, degree, is_fused in zip(("src_tp", "dst_tp"), degrees, (form != "make", form != "take"), strict=True):
        if is_fused and flag != "fused_qkv":
            says = not writer.is_open or writer.chance(5)
            # A degree that does not divide would stop the oracle here, which knows no layout yet.
            fits = shape[axis] % (2 * unit) == 0
            how += f", {side}={degree if fits or not writer.is_open else 1}" if says else ""
            writer.opens |= not says
    writer.write(f"{', '.join(left)} -> {', '.join(right)}{how}")


def placeholders(writer: Writer) -> None:
    """A statement on a family of names: for each layer, or for each expert that the layer has, or for a star."""
    writer.count += 1
    family = f"f{writer.count}"
    shape = (writer.number(1, 3), writer.number(1, 3))
    for layer in writer.random.sample(range(12), writer.number(1, 3)):
        for expert in writer.random.sample(range(12), writer.number(1, 3)):
            for which in "ab":
                writer.source(shape, name=f"{family}.{layer}.{expert}.{which}")
    a, b, g = f"{family}.$L.$E.a", f"{family}.$L.$E.b", f"g{writer.count}"
    square = shape[0] == shape[1]
    match writer.chosen("each", "pair", "star", "shift"):
        case "each":
            writer.write(f"{a}^T -> {g}.$E.of.$L.a")
        case "pair":
            writer.write(f"{a}, {b}{'^T' * square} -> {g}.$L.$E, axis={writer.number(0, 1)}")
        case "star":
            writer.write(f"{family}.$L.*.a -> {g}.$L.a, {writer.chosen('axis=0', 'axis=1', 'stack=0, gaps=1')}")
        case _:
            writer.write(f"{a} -> {g}.$L+1.$E.a")


def widen(writer: Writer) -> None:
    name = writer.live()
    old = writer.tensor(name).dtype
    written = writer.chosen("dtype='float32'", f"src_dtype='{old}', dst_dtype='float32'")
    writer.write(f"{name} -> {writer.target()}, {written}")


def keep(writer: Writer) -> None:
    name = writer.live()
    writer.write(f"{name} -> {name}")


def drop(writer: Writer) -> None:
    writer.write(f"{writer.live()} -> _")
    writer.lost = True


def crop(writer: Writer) -> None:
    name = writer.live(least_dims=1)
    smaller = [writer.chosen(-1, writer.number(0, size)) for size in writer.tensor(name).shape]
    writer.write(f"{name} -> {writer.target()}, crop='{smaller}'")
    writer.lost = True


def fan_out(writer: Writer) -> None:
    name = writer.live()
    writer.write(f"{name} -> {writer.target()}")
    writer.write(f"{name}^T -> {writer.new()}")
    writer.lost = True


def narrow(writer: Writer) -> None:
    name, target = writer.live(), writer.target()
    writer.write(f"{name} -> {target}, dtype='{writer.chosen(*NARROWER[writer.tensor(name).dtype])}'")
    if writer.chance(2):
        writer.write(f"{target} -> {writer.new()}, dtype='float32'")
    writer.lost = True


def boundary(writer: Writer) -> None:
    if writer.lines and writer.lines[-1] != BOUNDARY:
        writer.lines.append(BOUNDARY)
        writer.oracle.next_section()


LOSSLESS = (rename, change, change, join, join, part, part, fused, fused, placeholders, widen, keep)
LOSSY = (*LOSSLESS, drop, fan_out, narrow, crop, drop, fan_out, narrow, crop)
OPEN = (*[fused] * 5, part, part, join, join, change, change, widen, narrow, drop, fan_out, boundary)


@st.composite
def cases(draw: st.DrawFn, *, lossy: bool = False, with_state: bool = False) -> Case:
    """Up to five forms on sources of random shapes and dtypes (and sources that no statement mentions)."""
    writer = Writer(draw(st.randoms(use_true_random=False)), with_state)
    for _ in range(draw(st.integers(0, 2))):
        writer.live()
    sections = []
    for form in draw(st.lists(st.sampled_from(LOSSY if lossy else LOSSLESS), min_size=1, max_size=5)):
        before = len(writer.lines)
        form(writer)
        sections.append("\n".join(writer.lines[before:]))
    return Case("\n".join(writer.lines), tuple(sections), writer.sources, not writer.lost)


@dataclass(frozen=True, slots=True)
class OpenChain:
    """A rewrite, what it is applied to, and the layouts of what it makes."""

    text: str
    sources: dict[str, Tensor]
    """Each with its layout."""
    target: dict[str, TensorMeta]
    relaid: dict[str, TensorMeta]
    """The target, cut in other ways."""


def open_chain(drawn: Random) -> OpenChain:
    """A chain of up to nine statements; at least one leaves a degree open."""
    while True:
        writer = Writer(drawn, is_open=True)
        for _ in range(drawn.randint(1, 2)):
            writer.source(writer.shape(), writer.chosen(*DTYPES))
        for _ in range(drawn.randint(3, 9)):
            drawn.choice(OPEN)(writer)
        if writer.opens and writer.lines[-1] != BOUNDARY:
            made = writer.oracle.outputs()
            target, relaid = (
                {name: TensorMeta(each.shape, each.dtype, writer.layout(each.shape)) for name, each in made.items()}
                for _ in range(2)
            )
            return OpenChain("\n".join(writer.lines), writer.sources, target, relaid)


@st.composite
def partitions(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Boxes that have each element once: the whole, rows, columns, a grid, single elements, or the boxes of runs."""
    kind = draw(st.sampled_from(["whole", "rows", "columns", "grid", "elements", "runs"]))
    count = math.prod(shape)
    if kind == "runs" and count:
        cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=3))})
        runs = [Run(start, stop) for start, stop in pairwise(cuts)]
        return [box for run in runs for box in boxes_of_run(shape, run)]
    boxes = [Box((), ())]
    for dim, size in enumerate(shape):
        cut = {"rows": dim == 0, "columns": dim == len(shape) - 1, "grid": True}.get(kind, False) and size > 1
        inner: Sequence[int] = draw(st.lists(st.integers(1, size - 1), max_size=2)) if cut else ()
        inner = range(1, size) if kind == "elements" else inner
        stops = sorted({0, size, *inner})
        pieces = list(pairwise(stops)) or [(0, 0)]
        boxes = [Box((*box.offset, a), (*box.shape, b - a)) for box in boxes for a, b in pieces]
    return boxes
