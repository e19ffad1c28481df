"""Random chains of statements around fused tensors, beside what each rank along `tp` has to hold, by hand.

A chain is carried out twice. The rewrite sees whole tensors and layouts, and no statement says a degree. The oracle
sees ranks: each has its own part of gate and up (or of query, key and value), one after the other, and does with it
what the statements do with whole tensors. Where ranks hold other than their boxes of what the rewrite makes, it is
wrong.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.rewrite import Rewrite, TensorMeta
from tests.rewrite.filling import assert_same, resolved
from tests.rewrite.oracle import Tensor, Values

Ranks = list[Values]
"""What each rank has of a tensor."""

HEADS = {"fused_ffn": (1, 1), "fused_qkv_old": (8, 4, 4)}


@dataclass(slots=True)
class Family:
    """Tensors that are alike, each cut in equal boxes along the same dim."""

    random: random.Random
    tensors: dict[str, Ranks]
    cut: int
    lines: list[str]
    marks: Iterator[int]
    stacked: list[int] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what a rank has."""
        return next(iter(self.tensors.values()))[0].shape

    def _renamed(self, apply: Callable[[Values], Values], attributes: str = "", flip: str = "") -> None:
        """One statement for each tensor, or one with a placeholder for all."""
        mark = next(self.marks)
        names = {name: f"t{mark}.{at}" for at, name in enumerate(self.tensors)}
        alike = all(name.rpartition(".")[2] == new.rpartition(".")[2] for name, new in names.items())
        if alike and len({name.rpartition(".")[0] for name in names}) == 1 and self.random.random() < 0.5:
            self.lines.append(f"{self.names[0].rpartition('.')[0]}.$N{flip} -> t{mark}.$N{attributes}")
        else:
            self.lines += [f"{name}{flip} -> {new}{attributes}" for name, new in names.items()]
        self.tensors = {new: [apply(each) for each in self.tensors[name]] for name, new in names.items()}

    def rename(self) -> None:
        self._renamed(lambda values: values)

    def flip(self) -> None:
        self._renamed(np.transpose, flip="^T")
        self.cut = len(self.shape) - 1 - self.cut

    def permute(self) -> None:
        dims = self.random.sample(range(len(self.shape)), len(self.shape))
        self._renamed(lambda values: values.transpose(dims), f", permute='{dims}'")
        self.cut = dims.index(self.cut)

    def _reshape(self, local: Sequence[int], cut: int) -> None:
        ranks = len(next(iter(self.tensors.values())))
        sizes = [size * ranks if dim == cut else size for dim, size in enumerate(local)]
        self._renamed(lambda values: values.reshape(local), f", reshape='{sizes}'")
        self.cut = cut

    def wrap(self) -> None:
        at = self.random.randint(0, len(self.shape))
        self._reshape((*self.shape[:at], 1, *self.shape[at:]), self.cut + (at <= self.cut))

    def halve(self) -> None:
        """Of one dim make two; of the one that is cut the first of them is."""
        dims = [dim for dim, size in enumerate(self.shape) if size % 2 == 0 and size > 2]
        if dims and len(self.shape) < 5:
            at = self.random.choice(dims)
            size = self.shape[at]
            first = self.random.choice([each for each in range(1, size) if size % each == 0])
            self._reshape((*self.shape[:at], first, size // first, *self.shape[at + 1 :]), self.cut + (at < self.cut))

    def merge(self) -> None:
        """Of two dims make one; not where the second is the one that is cut."""
        dims = [dim for dim in range(len(self.shape) - 1) if dim + 1 != self.cut]
        if dims:
            at = self.random.choice(dims)
            size = self.shape[at] * self.shape[at + 1]
            self._reshape((*self.shape[:at], size, *self.shape[at + 2 :]), self.cut - (at < self.cut))

    def join(self) -> None:
        """Stack, or concatenate along a dim that is not cut."""
        if len(self.tensors) == 1:
            return self.rename()
        name = f"t{next(self.marks)}"
        parts = [list(each) for each in zip(*self.tensors.values(), strict=True)]
        others = [dim for dim in range(len(self.shape)) if dim != self.cut]
        if others and self.random.random() < 0.5:
            axis = self.random.choice(others)
            self.lines.append(f"{', '.join(self.names)} -> {name}.0, axis={axis}")
            self.tensors = {f"{name}.0": [np.concatenate(each, axis) for each in parts]}
            return None
        axis = self.random.randint(0, len(self.shape))
        starred = [each.rpartition(".") for each in self.names]
        in_order = [last for *_, last in starred] == [str(at) for at in range(len(starred))]
        family = in_order and len({first for first, *_ in starred}) == 1
        left = f"{starred[0][0]}.*" if family and self.random.random() < 0.5 else ", ".join(self.names)
        self.lines.append(f"{left} -> {name}.0, stack={axis}")
        self.tensors = {f"{name}.0": [np.stack(each, axis) for each in parts]}
        self.cut += axis <= self.cut
        return None

    def part(self) -> None:
        """Unstack, or split along a dim that is not cut."""
        dims = [dim for dim, size in enumerate(self.shape) if dim != self.cut and size in (2, 3)]
        if len(self.tensors) > 1 or not dims:
            return self.rename()
        axis, name = self.random.choice(dims), f"t{next(self.marks)}"
        count, ((old, ranks),) = self.shape[axis], self.tensors.items()
        goes = self.random.random() < 0.5 and len(self.shape) > 1
        names = [f"{name}.{at}" for at in range(count)]
        self.lines.append(f"{old} -> {', '.join(names)}, {'stack' if goes else 'axis'}={axis}")
        parts = [np.split(each, count, axis) for each in ranks]
        self.tensors = {
            new: [each[at].squeeze(axis) if goes else each[at] for each in parts] for at, new in enumerate(names)
        }
        self.cut -= goes and axis < self.cut
        return None

    def boundary(self) -> None:
        self.lines.append("---")

    def go_on(self, num_steps: int) -> None:
        steps = [
            self.rename,
            self.flip,
            self.permute,
            self.wrap,
            self.halve,
            self.merge,
            self.join,
            self.part,
            self.boundary,
        ]
        for _ in range(num_steps):
            self.random.choice(steps)()

    @property
    def whole(self) -> dict[str, Tensor]:
        """The tensors, with their layout."""
        return {name: _laid(ranks, self.cut) for name, ranks in self.tensors.items()}


def _laid(ranks: Ranks, cut: int) -> Tensor:
    values = np.concatenate(ranks, cut)
    degrees = tuple(len(ranks) if dim == cut else 1 for dim in range(values.ndim))
    return Tensor(values, "float32", degrees if len(ranks) > 1 else ())


@dataclass(frozen=True, slots=True)
class Chain:
    """A rewrite that says no degree, what it is applied to, and what it makes, each with its layout."""

    text: str
    sources: dict[str, Tensor]
    outputs: dict[str, Tensor]


def chain(seed: int) -> Chain:
    """A chain from tensors that are apart, or fused for some ranks, to tensors that are apart, or fused for others."""
    drawn = random.Random(seed)
    flag = drawn.choice(["fused_ffn", "fused_qkv_old"])
    shares = HEADS[flag]
    attributes = "" if flag == "fused_ffn" else ", num_heads=8, num_key_value_groups=4"
    kind = drawn.choice(["make", "take", "again"])
    marks, lines = iter(range(10**9)), list[str]()
    size, ndim = drawn.choice([1, 2]) * (4 if flag == "fused_ffn" else 1), drawn.choice([1, 2, 2, 3])
    cut, shape = drawn.randrange(ndim), [drawn.choice([2, 3, 4]) for _ in range(ndim)]
    logical = [
        [_numbered(100 * (10 * at + n), shape, cut, size * each) for n, each in enumerate(shares)]
        for at in range(drawn.choice([1, 1, 2, 3]))
    ]
    source_degree, target_degree = drawn.choice([1, 2, 4]), drawn.choice([1, 2, 4])
    sources: dict[str, Tensor] = {}
    if kind == "make":
        names = [[f"s{n}.{at}" for n in range(len(shares))] for at in range(len(logical))]
        sources = {
            name: Tensor(v) for ns, vs in zip(names, logical, strict=True) for name, v in zip(ns, vs, strict=True)
        }
    else:
        family = Family(
            drawn, {f"x.{at}": _fused(each, cut, source_degree) for at, each in enumerate(logical)}, cut, lines, marks
        )
        sources = family.whole
        family.go_on(drawn.randint(0, 5))
        parts = [_apart(ranks, family.cut, shares) for ranks in family.tensors.values()]
        names = [[name] for name in family.names]
        cut = family.cut
        logical = [each for each in parts if each is not None]
        if len(logical) < len(parts):
            return chain(seed + 10**6)
    how = f", {flag}{attributes}, axis={drawn.choice([cut, cut - logical[0][0].ndim])}"
    if kind == "take":
        outputs: dict[str, Tensor] = {}
        for ns, values in zip(names, logical, strict=True):
            right = [f"o.{n}.{ns[0]}" for n in range(len(shares))]
            lines.append(f"{ns[0]} -> {', '.join(right)}{how}")
            outputs |= {name: Tensor(v) for name, v in zip(right, values, strict=True)}
        return Chain("\n".join(lines), sources, outputs)
    mark = next(marks)
    lines += [f"{', '.join(ns)} -> t{mark}.{at}{how}" for at, ns in enumerate(names)]
    family = Family(
        drawn, {f"t{mark}.{at}": _fused(each, cut, target_degree) for at, each in enumerate(logical)}, cut, lines, marks
    )
    family.go_on(drawn.randint(0, 5))
    return Chain("\n".join(lines), sources, family.whole)


def _numbered(first: int, shape: Sequence[int], cut: int, size: int) -> Values:
    full = [*shape[:cut], size, *shape[cut + 1 :]]
    full[cut] = size * 4
    return (first * 10 + np.arange(np.prod(full), dtype=np.float32)).reshape(full).astype(np.float32)


def _fused(tensors: Sequence[Values], cut: int, degree: int) -> Ranks:
    """For each rank its part of each tensor, one after the other."""
    parts = [np.split(each, degree, cut) for each in tensors]
    return [np.concatenate(each, cut) for each in zip(*parts, strict=True)]


def _apart(ranks: Ranks, cut: int, shares: Sequence[int]) -> list[Values] | None:
    """Of what each rank has of them, the tensors; None where the dim has become too short to be parted."""
    size = ranks[0].shape[cut]
    if size % sum(shares) or any(size * len(ranks) // sum(shares) * share % 4 for share in shares):
        return None
    stops = np.cumsum([size // sum(shares) * share for share in shares])[:-1]
    parts = [np.split(each, stops, cut) for each in ranks]
    return [np.concatenate(each, cut) for each in zip(*parts, strict=True)]


def laid_out(tensors: dict[str, Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(each.shape, each.dtype, each.degrees) for name, each in tensors.items()}


def forward(case: Chain) -> None:
    checked = Rewrite(case.text).check(laid_out(case.sources), laid_out(case.outputs))
    assert_same(resolved(checked, case.sources, {}), case.outputs)


def back_by_the_text(case: Chain) -> None:
    checked = Rewrite(case.text).inverse().check(laid_out(case.outputs), laid_out(case.sources))
    assert_same(resolved(checked, case.outputs, {}), case.sources)


def back_by_the_check(case: Chain) -> None:
    """What was checked with both layouts is undone without."""
    checked = Rewrite(case.text).check(laid_out(case.sources), laid_out(case.outputs)).inverse()
    bare = {name: (each.shape, each.dtype) for name, each in case.outputs.items()}
    assert_same(resolved(checked.check(bare), case.outputs, {}), case.sources)


def back_by_a_check_without_layouts(case: Chain) -> None:
    """What was checked without layouts is undone with them."""
    bare = {name: (each.shape, each.dtype) for name, each in case.sources.items()}
    inverse = Rewrite(str(Rewrite(case.text).check(bare).inverse()))
    checked = inverse.check(laid_out(case.outputs), laid_out(case.sources))
    assert_same(resolved(checked, case.outputs, {}), case.sources)


WAYS = (forward, back_by_the_text, back_by_the_check, back_by_a_check_without_layouts)
