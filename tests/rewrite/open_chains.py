"""Random statements on tensors in random layouts, most of them on what others made, that leave degrees open.

Unlike those of `chains.py` they do with a tensor what no rank could do with its part: join and part along the dim that
is cut, unevenly too, drop, copy, stack what is cut with what is whole, and lay out again and again. So what is right
is not what ranks have, but what `degree_oracle.py` finds out.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.rewrite import TensorMeta
from tests.rewrite.degree_oracle import BOUNDARY
from tests.rewrite.oracle import Interpreter, Tensor, cast, split_line

Shape = tuple[int, ...]

_HEADS = ", num_heads=4, num_key_value_groups=2"
_FUSED = {"fused_ffn": (1, 1), "fused_qkv_old": (4, 2, 2), "fused_qkv": (4, 2, 2)}
_MOST_ELEMENTS = 300


@dataclass(frozen=True, slots=True)
class OpenChain:
    """A rewrite, what it is applied to, and the layouts of what it makes."""

    text: str
    sources: dict[str, Tensor]
    """Each with its layout."""
    target: dict[str, TensorMeta]
    relaid: dict[str, TensorMeta]
    """The target, cut in other ways."""


@dataclass(slots=True)
class _Writer:
    random: random.Random
    lines: list[str] = field(default_factory=list)
    sources: dict[str, Tensor] = field(default_factory=dict)
    oracle: Interpreter = field(default_factory=Interpreter)
    count: int = 0
    opens: bool = False
    """Whether a degree was left open."""

    def new(self) -> str:
        self.count += 1
        return f"l.{self.count}.w" if self.random.random() < 0.5 else f"n{self.count}"

    def layout(self, shape: Shape) -> Shape:
        """None, an even cut of a dim for some ranks, or a cut that nothing more is known about."""
        kind, dims = self.random.random(), [dim for dim, size in enumerate(shape) if size % 2 == 0]
        if not dims or kind < 0.35:
            return ()
        cut = self.random.choice(dims)
        degrees = [degree for degree in (2, 4, 8) if shape[cut] % degree == 0]
        degree = 0 if kind < 0.45 else self.random.choice(degrees)
        return tuple(degree if dim == cut else 1 for dim in range(len(shape)))

    def source(self, shape: Shape, dtype: str = "float32") -> str:
        name = self.new()
        numbers = (200 * len(self.sources) + np.arange(np.prod(shape), dtype=np.float32)) % 256
        values = cast(numbers.reshape(shape).astype(np.float32), dtype)
        self.sources[name] = Tensor(values, dtype, self.layout(shape))
        self.oracle.add_source(name, Tensor(values, dtype))
        return name

    def tensor(self, name: str) -> Tensor:
        return self.oracle.planes[""][name]

    def live(self, fits: Callable[[Tensor], bool] = lambda tensor: True) -> str | None:
        """A tensor that nothing has read."""
        names = [each for each in sorted(self.oracle.unread) if fits(self.tensor(each))]
        return self.random.choice(names) if names else None

    def beside(self, one: str, shape: Shape, *others: str) -> str:
        """A tensor of this shape and the dtype of another, to be joined with that: one that is there, or a new one."""
        dtype = self.tensor(one).dtype
        found = self.live(lambda each: (each.shape, each.dtype) == (shape, dtype))
        return self.source(shape, dtype) if found is None or found in (one, *others) else found

    def target(self) -> str:
        """A name to assign: a new one, or one that was read."""
        free = sorted(set(self.oracle.planes[""]) - self.oracle.unread)
        return self.random.choice(free) if free and self.random.random() < 0.25 else self.new()

    def write(self, line: str) -> None:
        self.oracle.run(split_line(line))
        self.lines.append(line)

    # Statements

    def turn(self, name: str, shape: Shape) -> None:
        dims = self.random.sample(range(len(shape)), len(shape))
        how = self.random.choice(["^T -> {}", " -> {}", " -> {}, permute='{}'"])
        self.write(name + how.format(self.target(), dims or "[]"))

    def reshape(self, name: str, shape: Shape) -> None:
        count, sizes = int(np.prod(shape)), list[int]()
        while count > 1 and len(sizes) < 2:
            sizes.append(self.random.choice([each for each in range(1, count + 1) if count % each == 0]))
            count //= sizes[-1]
        self.write(f"{name} -> {self.target()}, reshape='{[*sizes, count]}'")

    def cast(self, name: str, shape: Shape) -> None:
        to = "float32" if self.tensor(name).dtype != "float32" or self.random.random() < 0.7 else "bfloat16"
        self.write(f"{name} -> {self.target()}, dtype='{to}'")

    def part(self, name: str, shape: Shape) -> None:
        axis = self.random.randrange(len(shape))
        size = shape[axis]
        if size < 2:
            return
        if 2 <= size <= 4 and self.random.random() < 0.4:
            self.write(f"{name} -> {', '.join(self.new() for _ in range(size))}, stack={axis}")
        elif size % 2 == 0 and self.random.random() < 0.7:
            number = self.random.choice([each for each in (2, 4) if size % each == 0])
            self.write(f"{name} -> {', '.join(self.new() for _ in range(number))}, axis={axis}")
        else:
            first = self.random.randrange(1, size)
            self.write(f"{name} -> {self.new()}, {self.new()}, axis={axis}, sizes='[{first},{size - first}]'")

    def join(self, name: str, shape: Shape) -> None:
        axis = self.random.randrange(len(shape))
        stacks = self.random.random() < 0.4
        size = shape[axis] if stacks else self.random.choice([1, 2, 4, shape[axis]])
        if np.prod(shape) < _MOST_ELEMENTS:
            pair = [name, self.beside(name, (*shape[:axis], size, *shape[axis + 1 :]))]
            self.random.shuffle(pair)
            self.write(f"{', '.join(pair)} -> {self.target()}, {'stack' if stacks else 'axis'}={axis}")

    def fuse(self, name: str, shape: Shape) -> None:
        """Any of the `fused_` statements, in any direction; most degrees are left open."""
        flag = self.random.choice(["fused_ffn", "fused_ffn", "fused_qkv_old", "fused_qkv_old", "fused_qkv"])
        forms = ["make", "take", *(["again"] if flag != "fused_qkv" else [])]
        form, axis, shares = self.random.choice(forms), self.random.randrange(len(shape)), _FUSED[flag]
        unit = shares[0] if form == "make" else sum(shares)
        if shape[axis] % unit or np.prod(shape) > _MOST_ELEMENTS:
            return
        left, right = [name], [self.target()]
        for share in shares[1:] if form == "make" else ():
            left.append(self.beside(name, (*shape[:axis], shape[axis] // unit * share, *shape[axis + 1 :]), *left))
        if form == "take":
            right = [self.new() for _ in shares]
        how = f", {flag}{_HEADS if flag != 'fused_ffn' else ''}, axis={axis}"
        for side, is_fused in (("src_tp", form != "make"), ("dst_tp", form != "take")):
            if is_fused and flag != "fused_qkv":
                says = self.random.random() < 0.2
                # A degree that does not divide would stop the oracle here, which knows no layout yet.
                most = 2 if shape[axis] % (2 * unit) == 0 else 1
                how += f", {side}={self.random.randint(1, most)}" if says else ""
                self.opens |= not says
        self.write(f"{', '.join(left)} -> {', '.join(right)}{how}")

    def lose(self, name: str, shape: Shape) -> None:
        if self.random.random() < 0.3:
            self.write(f"{name} -> _")
        elif self.random.random() < 0.5:
            self.write(f"{name} -> {self.target()}")
            self.write(f"{name} -> {self.new()}")

    def boundary(self, name: str, shape: Shape) -> None:
        if self.lines and self.lines[-1] != BOUNDARY:
            self.lines.append(BOUNDARY)
            self.oracle.next_section()


def open_chain(seed: int) -> OpenChain:
    """A chain of up to nine statements; at least one leaves a degree open."""
    drawn = random.Random(seed)
    while True:
        writer = _Writer(drawn)
        for _ in range(drawn.randint(1, 2)):
            sizes: Sequence[int] = drawn.choice([(2, 4, 4, 8, 16), (2, 4)])
            shape = tuple(drawn.choice(sizes) for _ in range(drawn.choice([1, 1, 2, 2, 3][: len(sizes)])))
            writer.source(shape, drawn.choice(["float32", "float32", "bfloat16", "float16"]))
        once = [writer.turn, writer.reshape, writer.cast, writer.lose, writer.boundary]
        for _ in range(drawn.randint(3, 9)):
            step = drawn.choice([*once, writer.part, writer.part, writer.join, writer.join, *[writer.fuse] * 5])
            name = writer.live()
            if name is not None and writer.tensor(name).shape:
                step(name, writer.tensor(name).shape)
        if writer.opens and writer.lines[-1] != BOUNDARY:
            made = writer.oracle.outputs()
            target, relaid = (
                {name: TensorMeta(each.shape, each.dtype, writer.layout(each.shape)) for name, each in made.items()}
                for _ in range(2)
            )
            return OpenChain("\n".join(writer.lines), writer.sources, target, relaid)
