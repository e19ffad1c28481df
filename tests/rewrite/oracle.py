"""The plain slow version of the rewrite language, on small real arrays: every statement as its definition says.

It has nothing of the library but the shape of a `Fragment`: it splits statements itself, finds placeholders by trying
every number that is anywhere, and joins and parts in loops. Values are held as float32, whatever the dtype.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float32]
Degrees: TypeAlias = Mapping[str, tuple[int, ...]]

FUSED = ("fused_qkv", "fused_qkv_old", "fused_ffn")


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    values: Values
    dtype: str = "float32"
    degrees: tuple[int, ...] = ()
    """Into how many equal boxes its layout cuts each dim, where that is known."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def cast(values: Values, dtype: str) -> Values:
    """The values after they passed through `dtype`."""
    match dtype:
        case "float32":
            return values
        case "float16":
            return values.astype(np.float16).astype(np.float32)
        case "bfloat16":  # the upper half of a float32, rounded to nearest, ties to even
            bits = values.copy().view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
        case _:
            raise AssertionError(f"the oracle casts to no {dtype}")


# Text


@dataclass(frozen=True, slots=True)
class Line:
    """A statement, cut into words: names (with `^T`), and what follows the names."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...]


def _items(text: str) -> Iterator[str]:
    """What stands between the commas that are neither in quotes nor in brackets."""
    quote, depth, item = "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[(") - (character in ")]")
        if character == "," and not quote and not depth:
            yield item.strip()
            item = ""
        else:
            item += character
    if item.strip():
        yield item.strip()


def _is_attribute(item: str) -> bool:
    return item in FUSED or bool(re.fullmatch(r"[a-z_]+\s*=.*", item, re.DOTALL))


def _names(items: Iterable[str]) -> tuple[str, ...]:
    """The names, without quotes, arrays written out; `_` is no name."""
    names = []
    for item in items:
        array = re.fullmatch(r"(.*)\[(\d+):(\d+)\](.*)", item)
        if array:
            before, start, stop, after = array.groups()
            names += [f"{before}_{at}{after}" for at in range(int(start), int(stop))]
        elif item != "_":
            names.append(item.replace('"', ""))
    return tuple(names)


def split_line(text: str) -> Line:
    left, right = text.split("->")
    items = list(_items(right))
    attributes = tuple(
        (key.strip(), value.strip().strip("'\""))
        for key, _, value in (i.partition("=") for i in items if _is_attribute(i))
    )
    return Line(_names(_items(left)), _names(i for i in items if not _is_attribute(i)), attributes)


def split_lines(text: str) -> list[Line]:
    """The statements of a text that has one on each line; what follows a `#` is a comment."""
    written = (line.partition("#")[0].strip() for line in text.split("\n"))
    return [split_line(line) for line in written if line]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"-?\d+", text))


# Names


_HOLE = re.compile(r"\$([A-Z][A-Z0-9_]*)([+-]\d+)?|\*")


def _placeholders(names: Sequence[str]) -> list[str]:
    return sorted({hole[1] for name in names for hole in _HOLE.finditer(name) if hole[1]})


def _filled(name: str, digits: Mapping[str, str], *, right: bool) -> str:
    """The name with its placeholders replaced; a star stays."""

    def number(hole: re.Match[str]) -> str:
        if hole[0] == "*":
            return "*"
        shift = int(hole[2] or 0) - (right and hole[1] == "LAYER_ID_OFFSET")
        return str(int(digits[hole[1]]) + shift) if shift else digits[hole[1]]

    return _HOLE.sub(number, name)


def _starred(name: str, known: Iterable[str]) -> list[str]:
    """The names that there are for one with a star, by number; the name itself without a star."""
    if "*" not in name:
        return [name]
    pattern = re.compile(re.escape(name).replace(r"\*", "([0-9]+)"))
    found = [(int(match[1]), match[0]) for match in map(pattern.fullmatch, known) if match]
    return [text for _, text in sorted(found)]


@dataclass(frozen=True, slots=True)
class Instance:
    left: tuple[str, ...]
    flips: tuple[bool, ...]
    """Of each left name, whether `^T` follows it."""
    right: tuple[str, ...]
    line: Line


def instances(line: Line, known: Iterable[str], wanted: Iterable[str]) -> list[Instance]:
    """Every choice of numbers for which all left names are there; what only the right has is among the wanted names."""
    known, wanted = list(known), list(wanted)
    bare = [name.removesuffix("^T") for name in line.left]
    for_right = wanted if any("*" in name for name in line.right) or not line.left else known
    there = {digits for name in (*known, *wanted) for digits in re.findall(r"\d+", name)}
    shifted = {str(int(digits) + shift) for digits in there for shift in (-2, -1, 1, 2) if int(digits) + shift >= 0}
    tried = sorted(there | shifted, key=lambda digits: (int(digits), digits))
    found = []
    holes = _placeholders(bare or line.right)
    for choice in product(tried, repeat=len(holes)):
        digits = dict(zip(holes, choice, strict=True))
        left, flips = [], []
        for written in line.left:
            names = _starred(_filled(written.removesuffix("^T"), digits, right=False), known)
            left += names
            flips += [written.endswith("^T")] * len(names)
        right = [name for written in line.right for name in _starred(_filled(written, digits, right=True), for_right)]
        complete = all(name in known for name in left) and len(left) >= len(bare) and len(right) >= len(line.right)
        if complete and (bare or all(name in wanted for name in right)):
            found.append(Instance(tuple(left), tuple(flips), tuple(right), line))
    return found


# Operations


def _parts(values: Values, axis: int, sizes: Sequence[int]) -> list[Values]:
    """Consecutive parts along a dim, which the sizes exhaust."""
    assert sum(sizes) == values.shape[axis], (sizes, values.shape, axis)
    stops = list(accumulate(sizes))
    axis %= values.ndim
    return [
        values[(slice(None),) * axis + (slice(stop - size, stop),)] for size, stop in zip(sizes, stops, strict=True)
    ]


def _equal_parts(values: Values, axis: int, number: int) -> list[Values]:
    assert values.shape[axis] % number == 0, (values.shape, axis, number)
    return _parts(values, axis, [values.shape[axis] // number] * number)


def join_per_unit(tensors: Sequence[Values], axis: int, units: int) -> Values:
    """For unit after unit: its part of the first tensor, of the second, and so on."""
    parts = [_equal_parts(tensor, axis, units) for tensor in tensors]
    return np.concatenate([part[unit] for unit in range(units) for part in parts], axis)


def part_per_unit(fused: Values, axis: int, units: int, shares: Sequence[int]) -> list[Values]:
    """What `join_per_unit` made one of: tensors whose sizes along the dim are as `shares`."""
    collected: list[list[Values]] = [[] for _ in shares]
    for unit in _equal_parts(fused, axis, units):
        sizes = [share * unit.shape[axis] // sum(shares) for share in shares]
        for at, part in enumerate(_parts(unit, axis, sizes)):
            collected[at].append(part)
    return [np.concatenate(parts, axis) for parts in collected]


def _degree(attributes: Mapping[str, str], key: str, degrees: tuple[int, ...], axis: int) -> int:
    return int(attributes.get(key, degrees[axis] if degrees else 1))


def laid(flag: str, tensors: list[Tensor], line: Line, num_right: int, right: tuple[int, ...]) -> list[Values]:
    """A `fused_` operation. `right`: the degrees of the one tensor on the right, where they are known."""
    attributes = dict(line.attributes)
    values = [tensor.values for tensor in tensors]
    axis = int(attributes.get("axis", min(1, values[0].ndim - 1)))
    heads, groups = int(attributes.get("num_heads", 0)), int(attributes.get("num_key_value_groups", 0))
    shares = (1, 1) if flag == "fused_ffn" else numbers(attributes.get("sizes", "")) or (heads, groups, groups)
    if flag == "fused_qkv":
        joins = [join_per_unit(values, axis, groups)] if num_right == 1 else []
        return joins or part_per_unit(values[0], axis, groups, shares)
    source, target = (
        _degree(attributes, "src_tp", tensors[0].degrees, axis),
        _degree(attributes, "dst_tp", right, axis),
    )
    if len(values) == 1:
        values = part_per_unit(values[0], axis, source, shares)
    return values if num_right > 1 else [join_per_unit(values, axis, target)]


def _carried_out(key: str, text: str, tensors: list[Tensor], line: Line, num_right: int, model: bool) -> list[Tensor]:
    """The tensors after the operation that one attribute is (or is part of)."""

    def each(function: Callable[[Values], Values]) -> list[Tensor]:
        return [Tensor(function(tensor.values), tensor.dtype) for tensor in tensors]

    attributes, dtype = dict(line.attributes), tensors[0].dtype
    values = [tensor.values for tensor in tensors]
    joins = len(line.left) > 1 or "*" in "".join(line.left)
    match key:
        case "permute":
            dims = numbers(text) or tuple(reversed(range(values[0].ndim)))
            turned = [tuple(t.degrees[dim] for dim in dims) if t.degrees else () for t in tensors]
            return [Tensor(v.transpose(dims), dtype, d) for v, d in zip(values, turned, strict=True)]
        case "reshape":
            return each(lambda v: v.reshape(numbers(text)))
        case "pad":
            value = cast(np.array([attributes.get("fill", 0) if model else 0], np.float32), dtype)
            return each(lambda v: np.pad(v, _more(v.shape, numbers(text)), constant_values=value[0]) if v.ndim else v)
        case "crop":
            return each(
                lambda v: v[
                    tuple(slice(old if new == -1 else new) for old, new in zip(v.shape, numbers(text), strict=True))
                ]
            )
        case "dtype" | "dst_dtype" if model:
            return [Tensor(cast(tensor.values, text), text) for tensor in tensors]
        case "src_dtype" if model:
            assert {tensor.dtype for tensor in tensors} == {text}
        case "axis" if joins:
            return [Tensor(np.concatenate(values, int(text)), dtype)]
        case "axis" if num_right > 1:
            sizes = numbers(attributes.get("sizes", ""))
            parts = _parts(values[0], int(text), sizes) if sizes else _equal_parts(values[0], int(text), num_right)
            return [Tensor(part, dtype) for part in parts]
        case "stack" if joins:
            return [Tensor(np.stack(values, int(text)), dtype)]
        case "stack":
            return [Tensor(part.squeeze(int(text)), dtype) for part in _equal_parts(values[0], int(text), num_right)]
    return tensors


def _more(shape: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, 0 if new == -1 else new - old) for old, new in zip(shape, sizes, strict=True)]


Lay: TypeAlias = Callable[[str, list[Tensor], Line, int, tuple[int, ...]], list[Values]]
"""What carries out a `fused_` operation, such as `laid`."""


def perform(
    instance: Instance, tensors: list[Tensor], right: tuple[int, ...], *, model: bool, lay: Lay
) -> list[Tensor]:
    """The operations of a statement, from left to right. `model`: else it is state, whose dtype stays."""
    line, num_right = instance.line, len(instance.right)
    tensors = [
        Tensor(t.values.transpose(), t.dtype, t.degrees[::-1]) if flip else t
        for t, flip in zip(tensors, instance.flips, strict=True)
    ]
    fused = any(key in FUSED for key, _ in line.attributes)
    for key, text in line.attributes:
        if key in FUSED:
            dtype = tensors[0].dtype
            tensors = [Tensor(values, dtype) for values in lay(key, tensors, line, num_right, right)]
        elif not (fused and key == "axis"):
            tensors = _carried_out(key, text, tensors, line, num_right, model)
    assert len(tensors) == num_right, (line, len(tensors))
    return tensors


# Environments


def split_state(name: str) -> tuple[str, str]:
    """The model's name, and the key of the optimizer's state ("" of the model itself)."""
    state = re.fullmatch(r"optimizer/(.*)/([^/]*)", name, re.DOTALL)
    return (state[1], state[2]) if state else (name, "")


@dataclass(slots=True)
class Interpreter:
    """Runs statements, one after the other, on all planes: the model (key "") and each key of the optimizer's state."""

    wanted: Mapping[str, tuple[int, ...]] | None = None
    """The target's names, with the degrees of each."""
    planes: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {"": {}})
    unread: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    key: str = ""
    """Of the plane on which it is."""
    casts: ClassVar[bool] = True

    def lay(self, flag: str, tensors: list[Tensor], line: Line, num_right: int, right: tuple[int, ...]) -> list[Values]:
        """Carry out a `fused_` operation: see `laid`."""
        return laid(flag, tensors, line, num_right, right)

    def add_source(self, name: str, tensor: Tensor) -> None:
        model_name, key = split_state(name)
        self.planes.setdefault(key, {})[model_name] = tensor
        self.unread.add(model_name)

    def run(self, line: Line) -> None:
        """All instances read before any assigns."""
        results = []
        for instance in instances(line, self.planes[""], self.wanted or {}):
            results += [(key, name, tensor) for key in self.planes for name, tensor in self._results(instance, key)]
            self.unread -= set(instance.left)
            if instance.left == instance.right and not line.attributes and not line.left[0].endswith("^T"):
                self.kept |= set(instance.left)
            if not instance.left:
                self.added |= set(instance.right)
            for key in self.planes if not instance.right else ():
                self.planes[key].pop(instance.left[0], None)
                self.kept.discard(instance.left[0])
        for key, name, tensor in results:
            self.planes[key][name] = tensor
            self.unread.add(name)

    def next_section(self) -> None:
        """From here on there is only what has come out."""
        outputs = self.outputs()
        self.planes, self.unread, self.kept = {"": {}}, set(), set()
        for name, tensor in outputs.items():
            self.add_source(name, tensor)

    def _results(self, instance: Instance, key: str) -> list[tuple[str, Tensor]]:
        self.key = key
        plane, right = self.planes[key], instance.right
        if not instance.left or not right or instance.left[0] not in plane:
            return []
        tensors = [plane[name] for name in instance.left]
        if key and tensors[0].shape == () != self.planes[""][instance.left[0]].shape:
            return [(name, tensors[0]) for name in right]
        degrees = (self.wanted or {}).get(right[0], ())
        return list(
            zip(right, perform(instance, tensors, degrees, model=self.casts and not key, lay=self.lay), strict=True)
        )

    def outputs(self) -> dict[str, Tensor]:
        names = self.unread | self.kept if self.wanted is None else {split_state(name)[0] for name in self.wanted}
        return {
            f"optimizer/{name}/{key}" if key else name: tensor
            for key, plane in self.planes.items()
            for name, tensor in plane.items()
            if name in names - self.added
        }


def interpret(text: str, sources: Mapping[str, Tensor], wanted: Degrees | None = None) -> dict[str, Tensor]:
    """What the text makes of the sources. `wanted`: the target's names with the degrees of each, where it is known."""
    interpreter = Interpreter(wanted)
    for name, tensor in sources.items():
        interpreter.add_source(name, tensor)
    for line in split_lines(text):
        interpreter.run(line)
    return interpreter.outputs()


def metas(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Shape and dtype of each, as a rewrite is told."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
