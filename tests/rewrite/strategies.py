"""Random rewrites: sources, and the text of valid statements on them, grown one by one with the oracle at hand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardwise.space import Box, Run, boxes_of_run
from tests.properties import tried
from tests.rewrite.oracle import Interpreter, Tensor, Values, cast, split_line

Shape = tuple[int, ...]

proven = tried(25)

shapes = st.lists(st.sampled_from([1, 2, 2, 3, 3, 4, 5, 6, 0]), max_size=3).map(tuple)
DTYPES = ("float32", "float32", "float16", "bfloat16")
NARROWER = {"float32": ("float16", "bfloat16"), "float16": ("bfloat16",), "bfloat16": ("float16",)}


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

    draw: st.DrawFn
    with_state: bool
    lossy: bool
    count: int = 0
    lines: list[str] = field(default_factory=list)
    sources: dict[str, Tensor] = field(default_factory=dict)
    oracle: Interpreter = field(default_factory=Interpreter)
    lost: bool = False

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def chosen(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def new(self) -> str:
        """A name that is not used, as it is written (quoted where it must be)."""
        self.count += 1
        return str(self.chosen(f"n{self.count}", f"l.{self.count}.w", f"{self.count}_a.b", f'"x-{self.count}/y"'))

    def target(self) -> str:
        """A name to assign: a new one, or one that was read before."""
        free = sorted(set(self.oracle.planes[""]) - self.oracle.unread - self.oracle.kept)
        return f'"{self.chosen(*free)}"' if free and self.number(0, 3) == 0 else self.new()

    def source(self, shape: Shape, dtype: str = "float32", name: str = "") -> str:
        """A source tensor, with its optimizer's state. Returns the name as it is written."""
        written = name or self.new()
        bare = written.replace('"', "")
        states = {f"optimizer/{bare}/exp_avg": (shape, "float32"), f"optimizer/{bare}/step": ((), "float32")}
        for key, (its_shape, its_dtype) in {bare: (shape, dtype), **(states if self.with_state else {})}.items():
            tensor = Tensor(
                numbered(7 if key.endswith("/step") else len(self.sources), its_shape, its_dtype), its_dtype
            )
            self.sources[key] = tensor
            self.oracle.add_source(key, tensor)
        return written

    def tensor(self, written: str) -> Tensor:
        return self.oracle.planes[""][written.replace('"', "")]

    def live(self, *, least_dims: int = 0) -> str:
        """A tensor that nothing has read yet; a new source where there is none."""
        plane = self.oracle.planes[""]
        free = self.oracle.unread - self.oracle.kept
        names = sorted(name for name in free if name in plane and plane[name].values.ndim >= least_dims)
        if names and self.number(0, 4):
            return f'"{self.chosen(*names)}"'
        shape = self.draw(shapes.filter(lambda s: len(s) >= max(least_dims, self.with_state)))
        return self.source(shape, self.chosen(*DTYPES))

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
        return list(writer.draw(st.permutations([0, writer.number(1, 3)])))
    shape: list[int] = []
    while count > 1 and len(shape) < 3:
        divisor = writer.chosen(*[d for d in range(1, count + 1) if count % d == 0])
        shape.append(divisor)
        count //= divisor
    return [*shape, count] if count > 1 or not shape else shape


def _unary(writer: Writer, tensor: Tensor) -> str:
    """Operations that leave one tensor one, as they are written after a name."""
    shape, written = tensor.shape, ""
    for kind in writer.draw(st.lists(st.sampled_from(["permute", "reshape", "pad"]), min_size=1, unique=True)):
        if kind == "pad":
            larger = [size + writer.number(0, 2) for size in shape]
            asked = [-1 if new == old and writer.number(0, 1) else new for old, new in zip(shape, larger, strict=True)]
            fill = writer.chosen("", ", fill=2", ", fill='-0.3'", ", fill='inf'")
            written += f", pad='{asked}'{fill}"
            shape = tuple(larger)
            continue
        if kind == "permute":
            dims = writer.chosen([], writer.draw(st.permutations(range(len(shape)))))
            written += f", permute='{dims}'"
            shape = tuple(shape[dim] for dim in dims) if dims else shape[::-1]
            continue
        sizes = _factored(writer, math.prod(shape))
        shape = tuple(sizes)
        if math.prod(shape) and writer.number(0, 2) == 0:
            sizes[writer.number(0, len(sizes) - 1)] = -1
        written += f", reshape='{sizes}'"
    return written


def rename(writer: Writer) -> None:
    writer.write(f"{writer.live()} -> {writer.target()}")


def swap(writer: Writer) -> None:
    one = writer.live()
    other = writer.source((2, 3))
    temporary = writer.new()
    writer.write(f"{one} -> {temporary}")
    writer.write(f"{other} -> {one}{writer.chosen('', ', dtype=' + repr('float32'))}")
    writer.write(f"{temporary} -> {other}")


def change(writer: Writer) -> None:
    name = writer.live()
    flip = writer.chosen("", "^T")
    tensor = writer.tensor(name)
    flipped = Tensor(tensor.values.transpose(), tensor.dtype) if flip else tensor
    target = name if writer.number(0, 5) == 0 else writer.target()
    writer.write(f"{name}{flip} -> {target}{_unary(writer, flipped)}")


def join(writer: Writer) -> None:
    """Concatenate a tensor with others that differ along the dim, each perhaps transposed."""
    name = writer.live(least_dims=1)
    tensor = writer.tensor(name)
    axis, written = _axis(writer, len(tensor.shape))
    names, sizes = [name], [tensor.shape[axis]]
    for _ in range(writer.number(1, 2)):
        size = writer.number(1, 4)
        shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
        flip = writer.chosen("", "^T")
        names.append(writer.source(shape[::-1] if flip else shape, tensor.dtype) + flip)
        sizes.append(size)
    extra = f", sizes='{sizes}'" if writer.number(0, 3) == 0 else ""
    after = ", permute='[]'" if writer.number(0, 3) == 0 else ""
    writer.write(f"{', '.join(names)} -> {writer.target()}, axis={written}{extra}{after}")


def part(writer: Writer) -> None:
    name = writer.live(least_dims=1)
    tensor = writer.tensor(name)
    axis, written = _axis(writer, len(tensor.shape))
    size = tensor.shape[axis]
    before = "^T" if writer.number(0, 3) == 0 else ""
    size = tensor.shape[len(tensor.shape) - 1 - axis] if before else size
    number = writer.chosen(*[n for n in (2, 3, 4, 5) if size % n == 0] or [0])
    if number:
        sizes = ""
    elif size >= 2:
        first = writer.number(1, size - 1)
        number, sizes = 2, f", sizes='[{first}, {size - first}]'"
    else:
        return
    names = [writer.new() for _ in range(number)]
    after = ", permute='[]'" if writer.number(0, 3) == 0 else ""
    writer.write(f"{name}{before} -> {', '.join(names)}, axis={written}{sizes}{after}")


def stack(writer: Writer) -> None:
    name = writer.live()
    tensor = writer.tensor(name)
    others = [writer.source(tensor.shape, tensor.dtype) for _ in range(writer.number(1, 2))]
    _, written = _axis(writer, len(tensor.shape) + 1)
    writer.write(f"{', '.join([name, *others])} -> {writer.target()}, stack={written}")


def unstack(writer: Writer) -> None:
    shape = writer.draw(shapes.filter(lambda s: len(s) >= 1 + writer.with_state))
    axis, written = _axis(writer, len(shape))
    number = writer.number(2, 3)
    name = writer.source((*shape[:axis], number, *shape[axis + 1 :]))
    writer.write(f"{name} -> {', '.join(writer.new() for _ in range(number))}, stack={written}")


def _sized(writer: Writer, axis: int, sizes: Sequence[int]) -> list[str]:
    """Sources of one shape but for their sizes along the dim."""
    other = writer.number(1, 3)
    return [writer.source((size,) if axis < 0 else (other, size) if axis else (size, other)) for size in sizes]


def fused(writer: Writer) -> None:
    """One of the `fused_` statements, in any direction, between any degrees."""
    flag = writer.chosen("fused_qkv", "fused_qkv_old", "fused_ffn")
    source, target, axis = writer.chosen(1, 2, 3), writer.chosen(1, 2), writer.chosen(-1, 0, 1)
    groups = writer.number(1, 3) * (1 if flag == "fused_qkv" else source * target)
    heads, size = groups * writer.number(1, 2), writer.number(1, 2)
    sizes = [heads * size, groups * size, groups * size]
    attributes = f", num_heads={heads}, num_key_value_groups={groups}"
    if flag == "fused_ffn":
        sizes, attributes = [source * target * size] * 2, ""
    attributes += ", axis=0" if axis == 0 else ""
    form = writer.chosen("join", "part", *([] if flag == "fused_qkv" else ["again"]))
    left = _sized(writer, axis, sizes if form == "join" else [sum(sizes)])
    right = [writer.new() for _ in range(len(sizes) if form == "part" else 1)]
    if flag != "fused_qkv":
        attributes += f", src_tp={source}" if form != "join" else ""
        attributes += f", dst_tp={target}" if form != "part" else ""
    writer.write(f"{', '.join(left)} -> {', '.join(right)}, {flag}{attributes}")


def placeholders(writer: Writer) -> None:
    """A statement on a family of names: for each layer, or for each expert that the layer has, or for a star."""
    writer.count += 1
    family = f"f{writer.count}"
    shape = (writer.number(1, 3), writer.number(1, 3))
    layers = writer.draw(st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True))
    experts = {x: writer.draw(st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True)) for x in layers}
    for layer in layers:
        for expert in experts[layer]:
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


def array(writer: Writer) -> None:
    writer.count += 1
    number, base = writer.number(2, 4), f"w{writer.count}"
    for at in range(number):
        writer.source((2, 3), name=f"{base}_{at}")
    writer.write(f"{base}[0:{number}] -> {writer.target()}, axis=1")


def widen(writer: Writer) -> None:
    name = writer.source(writer.draw(shapes.filter(lambda s: len(s) >= writer.with_state)), writer.chosen(*DTYPES[2:]))
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
    shape = writer.tensor(name).shape
    smaller = [writer.chosen(-1, writer.number(0, size)) for size in shape]
    writer.write(f"{name} -> {writer.target()}, crop='{smaller}'")
    writer.lost = True


def fan_out(writer: Writer) -> None:
    name = writer.live()
    writer.write(f"{name} -> {writer.target()}")
    writer.write(f"{name}^T -> {writer.new()}")
    writer.lost = True


def narrow(writer: Writer) -> None:
    name = writer.live()
    target = writer.target()
    writer.write(f"{name} -> {target}, dtype='{writer.chosen(*NARROWER[writer.tensor(name).dtype])}'")
    if writer.chosen(True, False):
        writer.write(f"{target} -> {writer.new()}, dtype='float32'")
    writer.lost = True


LOSSLESS = (
    rename, swap, change, join, part, stack, unstack, fused, placeholders, array, widen, keep, change, part, fused,
)  # fmt: skip
LOSSY = (*LOSSLESS, drop, fan_out, narrow, crop, drop, fan_out, narrow, crop)


@st.composite
def cases(draw: st.DrawFn, *, lossy: bool = False, with_state: bool = False) -> Case:
    """Up to five forms on sources of random shapes and dtypes (and sources that no statement mentions)."""
    writer = Writer(draw, with_state, lossy)
    for _ in range(draw(st.integers(0, 2))):
        writer.live()
    sections = []
    for form in draw(st.lists(st.sampled_from(LOSSY if lossy else LOSSLESS), min_size=1, max_size=5)):
        before = len(writer.lines)
        form(writer)
        sections.append("\n".join(writer.lines[before:]))
    return Case("\n".join(writer.lines), tuple(sections), writer.sources, not writer.lost)


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
