"""Attributes: the words of statements and what their values can be; and the arguments of one statement, as read."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite.statements import Faults, Name, Star, TextPlace
from shardwise.rewrite.verbs.operation import RECORDED, Operation

Value: TypeAlias = int | str | tuple[int, ...]

# Eighteen digits fit in 64 bits, and int() refuses texts of thousands of digits with an error of its own.
_LIST = re.compile(r"\[\s*(?:-?[0-9]{1,18}\s*(?:,\s*-?[0-9]{1,18}\s*)*,?\s*)?\]")


@dataclass(frozen=True, slots=True)
class Attribute:
    """A word of statements."""

    example: str
    """How it is written: `axis=0`, or the word alone where it has no value."""
    read: "Callable[[Attribute, str], Value] | None" = None
    """Returns the value that a text is. Raises ValueError, with what is wrong. None: it has no value."""
    recordable: bool = False
    """Whether its value may be `recorded`."""
    repeatable: bool = False
    """Whether it may be there several times."""
    owners: tuple[str, ...] = ()
    """The words without which it says nothing. None: it says something by itself, or another rule looks at it."""
    stray_as: str = ""
    """What it is, where none of these is given; empty: it says something about them."""

    @property
    def word(self) -> str:
        """As it is written."""
        return self.example.partition("=")[0]

    @property
    def stray(self) -> str:
        """What is wrong with it where none of its owners is given."""
        return self.stray_as or f"says something about {' or '.join(self.owners)}, which is not given"

    def value_of(self, text: str) -> Value:
        """The value that a text is, maybe in quotes. Raises ValueError."""
        if text[:1] in ("'", '"') and text[-1:] == text[:1]:
            text = text[1:-1]
        text = text.strip()
        if self.recordable and text == RECORDED:
            return RECORDED
        return 1 if self.read is None else self.read(self, text)


def integer(fault: Callable[[int], str] = lambda number: "") -> Callable[[Attribute, str], int]:
    """What reads an integer. `fault` says what the attribute is instead of a wrong one; empty: nothing is wrong."""

    def read(attribute: Attribute, text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ValueError(f"{attribute.word} wants an integer, such as {attribute.example}")
        if wrong := fault(int(text)):
            raise ValueError(f"{attribute.word} is {wrong}")
        return int(text)

    return read


def integers(fault: Callable[[tuple[int, ...]], str]) -> Callable[[Attribute, str], tuple[int, ...]]:
    """What reads integers in brackets. `fault` says what is wrong with some; empty: nothing."""

    def read(attribute: Attribute, text: str) -> tuple[int, ...]:
        if not _LIST.fullmatch(text):
            raise ValueError(f"{attribute.word} wants a list of integers, such as {attribute.example}")
        numbers = tuple(map(int, re.findall(r"-?[0-9]+", text)))
        if wrong := fault(numbers):
            raise ValueError(wrong)
        return numbers

    return read


def dtype(attribute: Attribute, text: str) -> str:
    """Torch's name of a dtype."""
    if text in ITEMSIZE_BYTES:
        return text
    near = difflib.get_close_matches(text, ITEMSIZE_BYTES, n=1)
    hint = f"the nearest is {near[0]}" if near else f"there are {', '.join(ITEMSIZE_BYTES)}"
    raise ValueError(f"there is no such dtype; {hint}")


# Back into text


def listed(numbers: Iterable[int] | None) -> str:
    """Integers as they are written."""
    return RECORDED if numbers is None else f"'[{','.join(map(str, numbers))}]'"


def written_dtype(name: str | None) -> str:
    """A dtype as it is written."""
    return RECORDED if name is None else f"'{name}'"


# Of one statement


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument as it was written."""

    word: str
    text: str
    """Of the value, without the equals sign; empty where there is none."""
    place: TextPlace


@dataclass(frozen=True, slots=True)
class ReadArgument:
    """An argument whose value was read."""

    attribute: Attribute
    value: Value | None
    """None: what was written is no value of it, which has been reported."""
    shown: str
    """As it was written."""
    place: TextPlace

    @property
    def word(self) -> str:
        """Of its attribute."""
        return self.attribute.word

    @property
    def integers(self) -> tuple[int, ...] | None:
        """The value, where it is a list."""
        return self.value if isinstance(self.value, tuple) else None

    @property
    def integer(self) -> int | None:
        """The value, where it is an integer."""
        return self.value if isinstance(self.value, int) else None

    @property
    def text(self) -> str | None:
        """The value, where it is a word; None also where it is left to the record."""
        return self.value if isinstance(self.value, str) and self.value != RECORDED else None


@dataclass(frozen=True, slots=True)
class StatementNames:
    """The names of a statement, arrays expanded."""

    left: tuple[Name, ...]
    right: tuple[Name, ...]
    last: str = ""
    """The last word of the right, where it may be a misspelled attribute; else empty."""

    @property
    def stars(self) -> bool:
        """Whether there are any."""
        return _starred(self.left) or _starred(self.right)

    @property
    def joins(self) -> bool:
        """Whether the left stands for several tensors (or may, with a star)."""
        return len(self.left) > 1 or _starred(self.left)

    @property
    def parts(self) -> bool:
        """Whether the right does."""
        return len(self.right) > 1 or _starred(self.right)

    @property
    def counts(self) -> tuple[int, int]:
        """How many names stand on the left and on the right."""
        return len(self.left), len(self.right)

    @property
    def amount(self) -> str:
        """How many names stand on either side, in words."""
        sides = zip(self.counts, (self.left, self.right), strict=True)
        left, right = ("a star" if _starred(side) else f"{n} name{'s' * (n > 1)}" for n, side in sides)
        return f"{left} on the left and {right} on the right"


def _starred(names: Sequence[Name]) -> bool:
    return any(isinstance(part, Star) for name in names for part in name.parts)


class StatementArguments:
    """The arguments of a statement and its names. Verbs make operations of them, and add to the faults."""

    def __init__(self, given: Sequence[ReadArgument], names: StatementNames, faults: Faults) -> None:
        self.given = given
        self.names = names
        self.faults = faults

    @cached_property
    def once(self) -> Mapping[str, ReadArgument]:
        """By word; of several the last."""
        return {each.word: each for each in self.given}

    def integer(self, word: str) -> int | None:
        """The value of an argument, where it is there and an integer."""
        return self.once[word].integer if word in self.once else None

    def find(self, at: ReadArgument, fault: str) -> None:
        """Add what is wrong with an argument."""
        self.faults.append((at.place, fault))


@dataclass(frozen=True, slots=True)
class Verb:
    """What a statement can do to tensors, as it is written."""

    attributes: tuple[Attribute, ...]
    leading: tuple[str, ...]
    """Words that stand where the operation is carried out. The others say more about it."""
    read: Callable[[ReadArgument, StatementArguments], Operation | None]
    """Returns the operation of a leading word; None where it is none, or where something is wrong."""
    makes: bool = False
    """Whether it joins or splits tensors, which a statement does once."""
    at_axis: bool = False
    """Whether `axis=` says where it works. It then says by itself for how many names it is."""
