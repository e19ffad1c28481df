"""Degrees by brute force: every element of a fused tensor is followed on its own, through the plain interpreter.

[1] follow    Each tensor that a statement lays out for ranks is numbered anew, and the interpreter moves the numbers.
[2] ask       In the end each number is in some rank's box. So each index of the fused tensor has its ranks.
[3] say       The degrees are written to the operations, and the interpreter runs on values.

Nothing of it knows of views, strides or boxes. What it refuses, the library must refuse as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import numpy as np

from tests.rewrite.oracle import Interpreter, Line, Tensor, Values, laid, split_line

Layouts: TypeAlias = Mapping[str, tuple[int, ...]]
Owner: TypeAlias = tuple[Any, ...]

PER_RANK = ("fused_ffn", "fused_qkv_old")
BOUNDARY = "---"
_WHOLE: Owner = ("all ranks",)


class NotToldError(Exception):
    """The layouts do not tell a degree, or one that fits."""


@dataclass(slots=True)
class _Laying:
    """One instance of a statement that lays tensors out for ranks."""

    axis: int
    source: int | None
    """The degree of what it takes, None while it is open."""
    target: int | None
    takes_one: bool
    makes_one: bool
    taken: Values
    """The numbers of what it takes."""
    made: list[int]
    """The first number of each tensor that it makes."""
    shape: tuple[int, ...]
    """Of the first."""


@dataclass(slots=True)
class _Run(Interpreter):
    """The interpreter over all sections, with an eye on what lays tensors out."""

    def run_text(self, text: str, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in sources.items():
            self.add_source(name, tensor)
        for line in text.split("\n"):
            if line.strip() == BOUNDARY:
                self.next_section()
            else:
                self.run(split_line(line))
        return self.outputs()


@dataclass(slots=True)
class _Following(_Run):
    """[1] Tensors hold numbers that differ from element to element."""

    layings: list[_Laying] = field(default_factory=list)
    tensor_of: list[int] = field(default_factory=list)
    """Of each number, which tensor was given it."""
    casts: ClassVar[bool] = False
    """A cast would round the numbers."""

    def fresh(self, shape: Sequence[int]) -> Values:
        first, size = len(self.tensor_of), int(np.prod(shape, dtype=np.int64))
        self.tensor_of += [first] * size
        numbers: Any = np.arange(first, first + size).reshape(shape)
        found: Values = numbers
        return found

    def lay(self, flag: str, tensors: list[Tensor], line: Line, num_right: int, right: tuple[int, ...]) -> list[Values]:
        made = laid(flag, [replace(each, degrees=()) for each in tensors], line, num_right, ())
        if flag not in PER_RANK:
            return made
        starts = []
        for at, each in enumerate(made):
            starts.append(len(self.tensor_of))
            made[at] = self.fresh(each.shape)
        if not self.key:
            attributes = dict(line.attributes)
            ndim = tensors[0].values.ndim
            source, target = (int(attributes[side]) if side in attributes else None for side in ("src_tp", "dst_tp"))
            axis = int(attributes.get("axis", min(1, ndim - 1))) % ndim
            ones = len(tensors) == 1, num_right == 1
            taken = tensors[0].values
            self.layings.append(_Laying(axis, source, target, *ones, taken, starts, made[0].shape))
        return made


@dataclass(slots=True)
class _Saying(_Run):
    """[3] Tensors hold values, and degrees are known."""

    degrees: Sequence[tuple[int, int]] = ()
    number: int = -1
    """Of the laying that the current instance is."""

    def lay(self, flag: str, tensors: list[Tensor], line: Line, num_right: int, right: tuple[int, ...]) -> list[Values]:
        if flag not in PER_RANK:
            return laid(flag, tensors, line, num_right, right)
        # State of the optimizer comes after its parameter, and is laid out like it.
        self.number += not self.key
        source, target = self.degrees[self.number]
        others = tuple(each for each in line.attributes if each[0] not in ("src_tp", "dst_tp"))
        said = replace(line, attributes=(*others, ("src_tp", str(source)), ("dst_tp", str(target))))
        heads = [int(text) for key, text in others if key in ("num_heads", "num_key_value_groups")]
        if any(count % each for count in heads for each in (source, target)):
            raise NotToldError(f"heads {heads} are not divisible for degrees {source} and {target}")
        try:
            return laid(flag, tensors, said, num_right, ())
        except AssertionError as error:
            raise NotToldError(f"degrees {source} and {target} do not fit") from error


def _owners(shape: Sequence[int], degrees: Sequence[int]) -> list[Owner]:
    """Of each element, in row-major order, who has it; a position stands for whoever cuts a dim nobody knows how."""
    if max(degrees, default=1) == min(degrees, default=1) == 1:
        return [_WHOLE] * int(np.prod(shape, dtype=np.int64))
    owners: list[Owner] = []
    for index in np.ndindex(*shape):
        known = [(degrees[dim], at * degrees[dim] // shape[dim]) for dim, at in enumerate(index) if degrees[dim] > 1]
        unknown = [("?", at) for dim, at in enumerate(index) if degrees[dim] == 0]
        owners.append((tuple(each for each, _ in known), tuple(each for _, each in known), tuple(unknown)))
    return owners


def _degree(size: int, uses: Sequence[tuple[object, int, Owner]]) -> int:
    """[2] For how many ranks a dim of this size is laid out, given who has an index of it in which tensor."""
    merged: list[set[Owner]] = [set() for _ in range(size)]
    tensors: dict[object, list[set[Owner]]] = {}
    for tensor, at, owner in uses:
        tensors.setdefault(tensor, [set() for _ in range(size)])[at].add(owner)
    for has in tensors.values():
        kinds = {frozenset(each) for each in has if each}
        # All have parts of every index: it is cut along other dims, and whole along this one.
        whole = len(kinds) == 1 and len(next(iter(kinds))) > 1
        for at, each in enumerate(has):
            merged[at] |= {_WHOLE} if whole and each else each
    if len({frozenset(each) for each in merged if each}) <= 1:
        return 1
    if any(len(each) != 1 for each in merged):
        raise NotToldError("indices that are in no box, or in several")
    single = [next(iter(each)) for each in merged]
    kinds_of_cut = {(each[0], each[2]) for each in single if each != _WHOLE}
    if len(kinds_of_cut) > 1:
        raise NotToldError("boxes of several layouts")
    runs = [(owner, len(list(group))) for owner, group in groupby(single)]
    owners = [owner for owner, _ in runs]
    if _WHOLE in owners or len(set(owners)) < len(owners):
        return 1
    if len({length for _, length in runs}) > 1 or owners != sorted(owners):
        raise NotToldError("uneven boxes, or ranks in another order")
    return len(runs)


def _followed(text: str, sources: Mapping[str, Tensor], layouts: Layouts) -> list[tuple[int, int]]:
    """The degrees of each instance that lays tensors out: of what it takes, and of what it makes."""
    following = _Following()
    numbered = {name: replace(each, values=following.fresh(each.shape)) for name, each in sources.items()}
    outputs = following.run_text(text, numbered)
    # Where each number ends: in an output, or in what a statement takes for a degree that it says.
    ends = [(each.values, layouts.get(name, ())) for name, each in outputs.items()]
    ends += [(each.taken, _along(each.axis, each.source, each.taken.shape)) for each in following.layings]
    there: list[list[tuple[int, Owner]]] = [[] for _ in following.tensor_of]
    for at, (numbers, degrees) in enumerate(ends):
        for number, owner in zip(numbers.reshape(-1), _owners(numbers.shape, degrees), strict=True):
            if at < len(outputs) or following.layings[at - len(outputs)].source is not None:
                there[int(number)].append((at, owner))
    # Where it begins: in a source, or in what a statement makes.
    here: list[Owner] = [_WHOLE] * len(following.tensor_of)

    def begin(first: int, shape: Sequence[int], degrees: Sequence[int]) -> None:
        here[first : first + int(np.prod(shape, dtype=np.int64))] = _owners(shape, degrees)

    for name, each in numbered.items():
        begin(int(each.values.min(initial=len(here))), each.shape, sources[name].degrees)
    found = []
    for laying in following.layings:
        source, target = laying.source, laying.target
        if laying.makes_one:
            indices = enumerate(index[laying.axis] for index in np.ndindex(*laying.shape))
            uses = [(end, index, owner) for at, index in indices for end, owner in there[laying.made[0] + at]]
            target = target or _degree(laying.shape[laying.axis], uses)
            begin(laying.made[0], laying.shape, _along(laying.axis, target, laying.shape))
        if laying.takes_one and source is None:
            places = [(index[laying.axis], int(laying.taken[index])) for index in np.ndindex(*laying.taken.shape)]
            taken = [(following.tensor_of[number], index, here[number]) for index, number in places]
            source = _degree(laying.taken.shape[laying.axis], taken)
        found.append((source or 1, target or 1))
    return found


def _along(axis: int, degree: int | None, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(degree or 1 if dim == axis else 1 for dim in range(len(shape)))


def interpret_laid(text: str, sources: Mapping[str, Tensor], layouts: Layouts) -> dict[str, Tensor]:
    """What a text that leaves degrees open makes of sources in layouts, for a target in layouts.

    Raises NotToldError where the layouts do not tell a degree.
    """
    degrees = _followed(text, sources, layouts)
    plain = {name: replace(each, degrees=()) for name, each in sources.items()}
    return _Saying(degrees=degrees).run_text(text, plain)
