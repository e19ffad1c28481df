"""Statements: what one line of a rewrite says, as data. Parsed from text, expanded to instances, inverted, printed.

A statement takes the tensors of its left names, carries its operations out from left to right, and gives the results to
its right names. An operation either changes each tensor that is there (`Permute`, `Reshape`, `Cast`), or makes other
tensors of them (the others: one joins several into one, or parts one into several).
"""

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Cast",
    "Concat",
    "Ffn",
    "JoinOrSplit",
    "Name",
    "NamePart",
    "Permute",
    "Placeholder",
    "Qkv",
    "QkvPerRank",
    "Reshape",
    "SplitStatement",
    "Stack",
    "Star",
    "Statement",
    "StatementOperation",
    "TextPlace",
    "Unstack",
]


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Where something stands in the text of a rewrite."""

    line: int
    """Counted from 1, through all statements."""
    column: int
    """Of the first character, counted from 1."""
    width: int
    """Number of characters."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder: `$LAYER_ID` stands for the digits that keys have there, the same in the whole statement."""

    name: str
    """Without the dollar sign."""
    shift: int = 0
    """Added to the number: -1 for `$LAYER_ID-1`, and for `$LAYER_ID_OFFSET` on the right."""

    def __str__(self) -> str:
        return f"${self.name}" + (f"{self.shift:+d}" if self.shift else "")


@dataclass(frozen=True, slots=True)
class Star:
    """`*`: stands for all digits that keys have there, in numeric order; the name becomes as many names."""

    def __str__(self) -> str:
        return "*"


NamePart: TypeAlias = str | Placeholder | Star


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a tensor, or of many that are alike."""

    parts: tuple[NamePart, ...]
    """Text, placeholders, at most one star. A single text part is the name itself. Never empty."""
    transposed: bool
    """Whether `^T` follows it (left side only): all dims are reversed before anything else happens."""
    place: TextPlace

    @property
    def plain(self) -> str | None:
        """The name itself, where it is one."""
        return self.parts[0] if len(self.parts) == 1 and isinstance(self.parts[0], str) else None

    @property
    def text(self) -> str:
        """The name as messages show it: without quotes, with `$LAYER_ID+1` and `*`."""
        return "".join([part if isinstance(part, str) else str(part) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Permute:
    """Dim i of the result is dim `dims[i]` of the tensor; None reverses all dims."""

    dims: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same row-major elements in another shape; one size may be -1. None: as recorded (only in inverses)."""

    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Cast:
    """To the dtype `to` (None: as recorded, only in inverses), out of `source`, where that is said and verified."""

    to: str | None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Concat:
    """Join several tensors along a dim. `sizes`: what each has there, verified; None: whatever it has."""

    axis: int
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SplitStatement:
    """Part one tensor along a dim. None: in equal parts, or as recorded (`recorded`, only in inverses)."""

    axis: int
    sizes: tuple[int, ...] | None = None
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Join several tensors of one shape along a new dim, which is dim `axis` of the result."""

    axis: int


@dataclass(frozen=True, slots=True)
class Unstack:
    """Part one tensor into one per index of dim `axis`, which goes."""

    axis: int


@dataclass(frozen=True, slots=True)
class Qkv:
    """`fused_qkv`: q, k, v and one tensor in which each group has its query heads, its key head, its value head."""

    num_heads: int
    num_groups: int
    """Key-value heads."""
    axis: int | None
    """None: 1, or 0 of a tensor with one dim."""
    joins: bool
    """Three become one; else one becomes three."""
    sizes: tuple[int, ...] | None = None
    """Of query, key and value along the dim; None: what they have, and in a fused tensor those of heads of one size."""


@dataclass(frozen=True, slots=True)
class QkvPerRank:
    """`fused_qkv_old`: one tensor in which each tensor-parallel rank has its query, key and value heads."""

    num_heads: int
    num_groups: int
    axis: int | None
    sources: int
    """Left names: 1 or 3."""
    targets: int
    """Right names: 1 or 3."""
    source_degree: int | None
    """Tensor-parallel degree of a fused left tensor; None: as its layout has it, else 1."""
    target_degree: int | None
    """The same of a fused right tensor."""
    sizes: tuple[int, ...] | None = None
    """As of `Qkv`."""


@dataclass(frozen=True, slots=True)
class Ffn:
    """`fused_ffn`: one tensor in which each tensor-parallel rank has its part of gate, then its part of up."""

    axis: int | None
    sources: int
    """Left names: 1 or 2."""
    targets: int
    """Right names: 1 or 2."""
    source_degree: int | None
    target_degree: int | None


JoinOrSplit: TypeAlias = Concat | SplitStatement | Stack | Unstack | Qkv | QkvPerRank | Ffn
"""What makes other tensors of those that are there; a statement has at most one, and needs one for several names."""

StatementOperation: TypeAlias = Permute | Reshape | Cast | JoinOrSplit


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement. `left` or `right` has exactly one name (before stars and arrays are expanded)."""

    left: tuple[Name, ...]
    """Empty: `_ -> b`, b keeps its current value."""
    right: tuple[Name, ...]
    """Empty: `a -> _`, a is dropped."""
    operations: tuple[StatementOperation, ...]
    optional: bool
    """Whether it may match nothing (`optional=1`)."""
    place: TextPlace
    text: str
    """As it was written, for messages; of statements that were derived: as it would be written."""
    gaps: bool = False
    """Whether the numbers of a star that stacks may be others than 0, 1, 2 and so on (`gaps=1`)."""
