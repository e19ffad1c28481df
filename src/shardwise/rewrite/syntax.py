"""Syntax: the text of a rewrite, read into statements, and statements written as text.

The text is cut into tokens, the tokens into statements, and each statement is parsed alone, so that a bad one hides no
errors of others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final, TypeAlias, cast

from lark import Lark, Token, Transformer, UnexpectedToken
from lark.lexer import Lexer

from shardwise.rewrite.complaints import complaint
from shardwise.rewrite.findings import Faults, StatementFinding, raise_all
from shardwise.rewrite.spelling import names_of, place_of, quoted
from shardwise.rewrite.statement_arguments import WORDS, Argument, StatementNames, hint_of, operations_of
from shardwise.rewrite.statement_text import text_of
from shardwise.rewrite.statements import Name, Statement, StatementOperation, TextPlace

__all__ = ["needed_parameters", "parse", "text_of"]


def parse(text: str, parameters: Mapping[str, int | str]) -> tuple[Statement, ...]:
    """Return the statements of a text.

    Raises RewriteError with all findings of all statements.

    >>> [statement.right[0].plain for statement in parse("a -> b; b, c -> d, axis=0", {})]
    ['b', 'd']
    """
    statements: list[Statement] = []
    findings: list[StatementFinding] = []
    for tokens in _cut(_tokens(text)):
        faults: Faults = []
        first = tokens[0]
        last = tokens[-2] if tokens[-1].type == "_COMMA" and len(tokens) > 1 else tokens[-1]
        written = text[first.start_pos : last.end_pos]
        place = TextPlace(first.line or 1, first.column or 1, len(written.partition("\n")[0].rstrip("\r")))
        try:
            left, right = cast("_ParsedSides", _parser().parse(tokens))
        except UnexpectedToken as error:
            faults.append(complaint(tokens, error.token, text, place))
        else:
            statements.append(_statement(left, right, place, written, parameters, faults))
        findings.extend(StatementFinding(where, written, message, start=place) for where, message in faults)
    raise_all(findings)
    return tuple(statements)


def needed_parameters(text: str) -> frozenset[str]:
    """Return the names of the parameters that values of a text name.

    >>> sorted(needed_parameters("q, k, v -> x, fused_qkv, num_heads={heads}, num_key_value_groups={groups}"))
    ['groups', 'heads']
    """
    values = (token for token in _tokens(text) if token.type == "VALUE")
    return frozenset(name for value in values for name in re.findall(r"\{\s*([^{}]*?)\s*\}", value) if name)


# Tokens

_NameOrAttribute: TypeAlias = Token | tuple[Token, Token]
"""A name, or an attribute and its value."""

_ParsedSides: TypeAlias = tuple[list[Token], list[_NameOrAttribute]]


class _TokensAsTheyAre(Lexer):
    """Gives the parser the tokens of a statement, which are there."""

    def __init__(self, _conf: object) -> None:
        pass

    def lex(self, tokens: Sequence[Token]) -> Iterator[Token]:  # type: ignore[override]  # as Lark calls a custom lexer
        return iter(tokens)


class _Sort(Transformer[Token, object]):
    """The names of the left, and the names and attributes of the right, as they stand."""

    def attribute(self, children: list[Token]) -> tuple[Token, Token]:
        word, value = children
        return word, value

    def statement(self, children: list[_NameOrAttribute]) -> _ParsedSides:
        arrow = 1
        while cast("Token", children[arrow]).type != "ARROW":
            arrow += 1
        return cast("list[Token]", children[:arrow]), children[arrow + 1 :]


@cache
def _grammar() -> str:
    return files("shardwise.rewrite").joinpath("grammar.lark").read_text(encoding="ascii")


@cache
def _lexer() -> Lark:
    return Lark(_grammar(), parser=None, lexer="basic", start="statement")


@cache
def _parser() -> Lark:
    return Lark(_grammar(), parser="lalr", lexer=_TokensAsTheyAre, start="statement", transformer=_Sort())


def _tokens(text: str) -> Iterator[Token]:
    return _lexer().lex(text)


# Cutting

_CARRYING: Final = ("ARROW", "_COMMA")


def _cut(tokens: Iterable[Token]) -> Iterator[Sequence[Token]]:
    """The tokens of each statement: lines, with those that carry them on, in parts where statements are glued."""
    current: list[Token] = []
    for line, ended in _lines(tokens):
        if current and (ended or not _carries_on(current, line)):
            yield from _unglued(current)
            current = line
        else:
            current = current + line if current else line
    if current:
        yield from _unglued(current)


def _lines(tokens: Iterable[Token]) -> Iterator[tuple[list[Token], bool]]:
    """The tokens between separators, where there are some; and whether a semicolon stands before them."""
    line: list[Token] = []
    ended = False
    for token in tokens:
        if token.type != "SEPARATOR":
            line.append(token)
            continue
        if line:
            yield line, ended
            line, ended = [], False
        ended = ended or token == ";"
    if line:
        yield line, ended


def _carries_on(current: Sequence[Token], line: Sequence[Token]) -> bool:
    """Whether a line belongs to the statement before it.

    A comma or an arrow at the end of a line or at the beginning of the next one carries on; but not when both have an
    arrow: then the comma was left over.
    """
    if line[0].type not in _CARRYING and current[-1].type not in _CARRYING:
        return False
    return not (_arrows(current) and _arrows(line))


def _arrows(tokens: Sequence[Token]) -> int:
    return sum(token.type == "ARROW" for token in tokens)


def _unglued(tokens: list[Token]) -> Iterator[list[Token]]:
    """Cut where a name follows on a whole statement without a comma, and has an arrow of its own: `a -> b c -> d`."""
    ahead = _arrows(tokens)
    if ahead < 2:
        yield tokens
        return
    start, whole = 0, False
    for index, token in enumerate(tokens):
        if token.type == "ARROW":
            whole = True
            ahead -= 1
        elif (
            whole
            and ahead
            and token.type in ("NAME", "QUOTED")
            and tokens[index - 1].type in ("NAME", "QUOTED", "VALUE")
        ):
            yield tokens[start:index]
            start, whole = index, False
    yield tokens[start:]


# Statements

_NOTHING: Final = "_"


def _statement(
    left: Sequence[Token],
    right: Sequence[_NameOrAttribute],
    place: TextPlace,
    text: str,
    parameters: Mapping[str, int | str],
    faults: Faults,
) -> Statement:
    targets, arguments = _parted(right, faults)
    sources, results = _side(left, faults, right=False), _side(targets, faults, right=True)
    operations: tuple[StatementOperation, ...] = ()
    optional = gaps = False
    if not targets:
        word = arguments[0].word
        what = f"{word} is an attribute, and a tensor called so is written {quoted(word)}"
        faults.append((arguments[0].place, f"a name is missing on the right: {what}"))
    elif not sources and not results:
        faults.append((place, "'_ -> _' says nothing; 'a -> _' drops a, '_ -> b' adds b"))
    elif arguments or len(sources) + len(results) != 2 or "*" in text:
        names = StatementNames.of(sources, results, targets[-1])
        operations, optional, gaps = operations_of(arguments, names, place, parameters, faults)
    return Statement(sources, results, operations, optional, place, text, gaps)


def _parted(right: Sequence[_NameOrAttribute], faults: Faults) -> tuple[list[Token], list[Argument]]:
    """The names of the right, and the attributes after them."""
    targets: list[Token] = []
    arguments: list[Argument] = []
    for each in right:
        if isinstance(each, tuple):
            word, value = each
            place = place_of(word)
            width = (value.end_pos or 0) - (word.start_pos or 0)
            arguments.append(Argument(str(word), value[1:].strip(), TextPlace(place.line, place.column, width)))
        elif each in WORDS:
            arguments.append(Argument(str(each), "", place_of(each)))
        elif arguments:
            what = f"{each} stands after {arguments[-1].word}; names come first, then attributes"
            faults.append((place_of(each), what + hint_of(each)))
        else:
            targets.append(each)
    return targets, arguments


def _side(tokens: Sequence[Token], faults: Faults, *, right: bool) -> tuple[Name, ...]:
    """The names of a side; none where it is `_`."""
    if len(tokens) == 1 and tokens[0] == _NOTHING:
        return ()
    names: list[Name] = []
    for token in tokens:
        if token == _NOTHING:
            what = "drop a tensor write 'a -> _'" if right else "add a tensor write '_ -> b'"
            faults.append((place_of(token), f"'_' stands among names; to {what}, as a statement of its own"))
        else:
            names.extend(names_of(token, faults, right=right))
    return tuple(names)
