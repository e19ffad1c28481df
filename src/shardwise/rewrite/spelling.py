"""Spelling: names read from tokens into parts, and names and statements written as text.

What is written is read back as an equal statement: inverses and records in saves rely on it.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from lark import Token

from shardwise.rewrite.statements import (
    Faults,
    Name,
    NamePart,
    Placeholder,
    Rest,
    Star,
    Statement,
    TextPlace,
)
from shardwise.rewrite.verbs.attributes import StatementNames
from shardwise.rewrite.verbs.axis import Concat, Split
from shardwise.rewrite.verbs.registry import WORDS

OFFSET: Final = "LAYER_ID_OFFSET"
"""AOA's placeholder that stands, on the right, for the number before the one on the left."""

_MOST_DIGITS: Final = 8
"""Of a number that is counted with."""

_MOST_NAMES: Final = 1_000_000
"""In one array."""

# A placeholder and its shift, stars, text, an escaped character, a stray `$` or backslash: in this order.
_PARTS = re.compile(r"\$([A-Z][A-Z0-9_]*)([-+][0-9]+)?|(\*\*?)|([^$*\\]+)|\\((?s:.))|(\$|\\)")
_UNQUOTED = re.compile(r"(?:\$[A-Z][A-Z0-9_]*(?:[-+][0-9]+)?|[A-Za-z0-9_.*])+")


def place_of(token: Token) -> TextPlace:
    """Return where a token stands."""
    return TextPlace(token.line or 1, token.column or 1, len(token))


def names_of(token: Token, faults: Faults, *, right: bool) -> list[Name]:
    """Return the names that a token stands for: one, or those of an array."""
    place = place_of(token)
    text = str(token)
    if text.isidentifier():  # by far the most names have dots: this is for temporaries
        return [Name((text,), False, place)]
    transposed = text.endswith("^T")
    body = text[:-2] if transposed else text
    numbers: list[str] = []
    if body.endswith("]"):
        body, _, bounds = body.rpartition("[")
        numbers = _counted(text, bounds[:-1], place, faults)
    if transposed and right:
        faults.append((place, _transposed_target(body)))
    # `_^T` and `_[0:3]`: without quotes `_` stands for no tensor.
    if body == "_":
        faults.append((place, f"'_' in {text} is no tensor; one that is called so is written \"_\""))
    parts = _parts(body, token, faults, right=right)
    if numbers and isinstance(parts[-1], Rest):
        faults.append((place, f"{text} has names behind **, which ends a name"))
    if not numbers:
        return [Name(parts, transposed, place)]
    return [Name(_merged([*parts, number]), transposed, place) for number in numbers]


def _counted(text: str, bounds: str, place: TextPlace, faults: Faults) -> list[str]:
    """What is appended to the name of an array, one by one."""
    digits = [bound.strip() for bound in bounds.split(":")]
    # `w[0:99999999999]` would take all memory before anybody sees that it is a slip.
    first, last = (int(bound) if len(bound) <= _MOST_DIGITS else _MOST_NAMES for bound in digits)
    if max(map(len, digits)) > _MOST_DIGITS or last - first > _MOST_NAMES:
        faults.append((place, f"{text} stands for more names than any state has"))
        return []
    if first >= last:
        faults.append((place, f"{text} stands for no name; it counts from {first} and ends before {last}"))
    return [f"_{number}" for number in range(first, last)]


def _transposed_target(body: str) -> str:
    return (
        f"{body}^T is a view of {body}, not a tensor to assign. Transpose on the left, 'a^T -> {body}', or assign "
        f"first, 'a -> {body}', and then '{body}^T -> {body}'"
    )


def _parts(body: str, token: Token, faults: Faults, *, right: bool) -> tuple[NamePart, ...]:
    """The parts of a name without its suffixes."""
    in_quotes = body[0] in "\"'"
    # Nothing to scan, as in by far the most names.
    if not in_quotes and "$" not in body and "*" not in body:
        if body.isdecimal():
            faults.append(
                (place_of(token), f'{body} alone is a number; a tensor that is called so is written "{body}"')
            )
        return (body,)
    parts = _merged(_scanned(body[1:-1] if in_quotes else body, token, faults, right=right))
    for fault in _faults_of(parts, str(token)):
        faults.append((place_of(token), fault))
    return parts or ("",)


def _scanned(body: str, token: Token, faults: Faults, *, right: bool) -> Iterator[NamePart]:
    for found in _PARTS.finditer(body):
        name, shift, star, text, escaped, stray = found.groups()
        if name is not None:
            if len(shift or "") > _MOST_DIGITS:
                faults.append((place_of(token), f"'{shift}' in {token} is more than any number in a name"))
            # `right and ...` is 1 there: AOA's $LAYER_ID_OFFSET is L on the left and L - 1 on the right. As a shift it
            # needs no rule of its own in matching, filling or the inverse.
            yield Placeholder(name, int((shift or "0")[:_MOST_DIGITS]) - (right and name == OFFSET))
        elif star is not None:
            yield Star() if star == "*" else Rest()
        elif stray is not None:
            faults.append(
                (place_of(token), f"'{stray}' begins nothing in {token}; the character itself is written '\\{stray}'")
            )
        else:
            yield text if text is not None else escaped


def _merged(parts: list[NamePart] | Iterator[NamePart]) -> tuple[NamePart, ...]:
    """The parts, texts that stand next to each other as one."""
    merged: list[NamePart] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(merged)


def _faults_of(parts: tuple[NamePart, ...], text: str) -> Iterator[str]:
    if not parts:
        yield f"{text} is empty; a name has at least one character"
    if any(isinstance(part, Rest) for part in parts) and not all(isinstance(each, str) for each in parts[:-1]):
        yield f"{text} has ** in a place where it cannot be; it ends a name, after text alone or nothing: module.**"
    elif sum(isinstance(part, Star) for part in parts) > 1:
        yield f"{text} has several stars; a name has at most one; use placeholders, such as $EXPERT_ID, for the others"
    for one, other in pairwise(parts):
        if not isinstance(one, str) and not isinstance(other, str):
            pair = f"{_symbol(one)} and {_symbol(other)} stand side by side in {text}"
            yield f"{pair}, and the digits of the first have no clear end; put text between them"


def _symbol(part: NamePart, *, right: bool = False) -> str:
    match part:
        case Placeholder(name, shift):
            shift += right and name == OFFSET
            return f"${name}{shift:+d}" if shift else f"${name}"
        case Star() | Rest():
            return str(part)
        case text:
            return text


def text_of_name(name: Name, *, right: bool) -> str:
    """Return how a name is written, in quotes where it has to be."""
    suffix = "^T" if name.transposed else ""
    text = "".join(_symbol(part, right=right) for part in name.parts)
    # A word that is also an attribute needs quotes on the right. They do no harm on the left.
    if _UNQUOTED.fullmatch(text) and text != "_" and not text.isdecimal() and text not in WORDS:
        again: Faults = []
        if name.plain == text and "$" not in text and "*" not in text:
            return text + suffix
        # Text that looks like a placeholder is text again only in quotes. Reading it back is the proof that it needs
        # none.
        if _merged(_scanned(text, Token("NAME", text), again, right=right)) == name.parts:
            return text + suffix
    return _in_quotes(name.parts, right=right) + suffix


def quoted(text: str) -> str:
    """Return how a tensor with exactly this name is written in quotes."""
    return _in_quotes((text,), right=False)


def _in_quotes(parts: tuple[NamePart, ...], *, right: bool) -> str:
    written = ""
    after_number = False
    for part in parts:
        text = _symbol(part, right=right)
        if isinstance(part, str):
            # Escapes as the grammar takes them: a backslash makes any character after it plain text.
            text = re.sub(r'[\\"$*\r\n]', r"\\\g<0>", text)
            if after_number and re.match(r"[A-Z0-9_]|[-+][0-9]", text):  # else it would belong to the placeholder
                text = "\\" + text
        written += text
        after_number = isinstance(part, Placeholder)
    return f'"{written}"'


def text_of(statement: Statement) -> str:
    """Return how a statement is written: on one line, names in quotes where they have to be.

    Parsing it gives an equal statement, but for places and text. What an inverse takes from the tensors that the
    forward rewrite was applied to is written as `recorded`: `a -> b, dtype=recorded`.
    """
    left, right = _side(statement.left, right=False), _side(statement.right, right=True)
    # AOA configurations write `a -> b, axis=0`. What it does not do is not written back.
    names = StatementNames(statement.left, statement.right)
    alone = not names.joins and not names.parts  # then joining or parting along a dim changes nothing
    operations = [each for each in statement.operations if not (alone and isinstance(each, Concat | Split))]
    arguments = [each for operation in operations for each in operation.written()]
    arguments += dict.fromkeys(each for operation in operations for each in operation.written_last())
    if statement.optional:
        arguments.append("optional=1")
    if statement.gaps:
        arguments.append("gaps=1")
    return ", ".join([f"{left} -> {right}", *arguments])


def _side(names: Iterable[Name], *, right: bool) -> str:
    return ", ".join(text_of_name(name, right=right) for name in names) or "_"
