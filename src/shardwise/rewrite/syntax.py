"""Syntax: the text of a rewrite, read into statements, and what to say where it cannot be read.

The text is cut into tokens, the tokens into statements. Each statement is parsed alone, so that a bad one hides no
errors of others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final, TypeAlias, cast

from lark import Lark, Token, Transformer, UnexpectedToken
from lark.lexer import Lexer

from shardwise.rewrite.spelling import names_of, place_of, quoted
from shardwise.rewrite.statements import Faults, Name, Statement, StatementFinding, TextPlace, raise_all
from shardwise.rewrite.verbs.attributes import Argument, StatementNames
from shardwise.rewrite.verbs.operation import Operation
from shardwise.rewrite.verbs.registry import WORDS, hint_of, operations_of


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
        # The text of a statement is what the user wrote, with comments and line breaks inside, so that carets meet it.
        first = tokens[0]
        # A comma left over at the end would put the caret behind the statement.
        last = tokens[-2] if tokens[-1].type == "_COMMA" and len(tokens) > 1 else tokens[-1]
        written = text[first.start_pos : last.end_pos]
        place = TextPlace(first.line or 1, first.column or 1, len(written.partition("\n")[0].rstrip("\r")))
        try:
            left, right = cast("_ParsedSides", _parser().parse(tokens))
        # Only this statement is lost: the next one is parsed as if nothing had happened.
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
    # On tokens, not on the text: braces in a comment or in a quoted name are no parameters.
    values = (token for token in _tokens(text) if token.type == "VALUE")
    return frozenset(name for value in values for name in re.findall(r"\{\s*([^{}]*?)\s*\}", value) if name)


# Tokens

_NameOrAttribute: TypeAlias = Token | tuple[Token, Token]
"""A name, or an attribute and its value."""

_ParsedSides: TypeAlias = tuple[list[Token], list[_NameOrAttribute]]


# Statements are cut between tokens, so the lexer runs once over the whole text, before any statement is known.
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
# Read and built at the first rewrite, and not when shardwise is imported.
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
    # Figure 1. Four ways in which AOA configurations end a statement, and two in which they do not::
    #
    #     a -> b                 a newline               a, b            no: the arrow carries on
    #     c -> d; e -> f         a semicolon               -> c,         no: the comma carries on
    #     g -> h, axis=1 i -> j  glued                    axis=0
    #     k -> l,                a comma left over, where the next line has an arrow
    #     m -> n
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

    A comma or an arrow at the end of a line or at the beginning of the next one carries on. But not when both have an
    arrow: then the comma was left over.
    """
    if line[0].type not in _CARRYING and current[-1].type not in _CARRYING:
        return False
    # One statement has one arrow. Two lines with an arrow each are two statements, whatever stands between them.
    return not (_arrows(current) and _arrows(line))


def _arrows(tokens: Sequence[Token]) -> int:
    return sum(token.type == "ARROW" for token in tokens)


def _unglued(tokens: list[Token]) -> Iterator[list[Token]]:
    """Cut where a name follows a whole statement without a comma, and has its own arrow: `a -> b c -> d`."""
    ahead = _arrows(tokens)
    # One arrow: nothing is glued, as in nearly every statement.
    if ahead < 2:
        yield tokens
        return
    start, whole = 0, False
    for index, token in enumerate(tokens):
        if token.type == "ARROW":
            whole = True
            ahead -= 1
        # `whole`: this statement has its arrow. `ahead`: the next one will have its own. Without the second condition
        # `a -> b fused_ffn` would be cut before a flag whose comma is missing.
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
    # The grammar cannot tell a flag such as fused_ffn from a name: both are words. They are told apart here.
    targets, arguments = _parted(right, faults)
    sources, results = _side(left, faults, right=False), _side(targets, faults, right=True)
    operations: tuple[Operation, ...] = ()
    optional = gaps = False
    if not targets:
        word = arguments[0].word
        what = f"{word} is an attribute, and a tensor called so is written {quoted(word)}"
        faults.append((arguments[0].place, f"a name is missing on the right: {what}"))
    elif not sources and not results:
        faults.append((place, "'_ -> _' says nothing; 'a -> _' drops a, '_ -> b' adds b"))
    # A plain rename, as most lines are, has nothing to be checked for.
    elif arguments or len(sources) + len(results) != 2 or "*" in text:
        names = StatementNames(sources, results, targets[-1])
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
            faults.append((place_of(token), f"'_' stands among names; to {what}, as a separate statement"))
        else:
            names.extend(names_of(token, faults, right=right))
    return tuple(names)


_FORM: Final = "a statement is written 'a -> b': sources on the left, outputs on the right"
_OTHER_ARROWS = re.compile(r"<-+|-{2,}>|=+>|[\u2190\u2192\u21d2\u27f5\u27f6]")
_STRAYS: Final = {
    '"': 'this quote is not closed; a name in quotes ends on its line, and has \\" for a quote inside',
    "'": "this quote is not closed; a name in quotes ends on its line, and has \\' for a quote inside",
    "^": "the only suffix of a name is ^T, which reverses all dims",
    "$": 'a placeholder is a dollar sign and capital letters, such as $LAYER_ID; in a name itself it is written "\\$"',
    "{": "a parameter stands for the value of an attribute, such as num_heads={num_heads}, and nowhere else",
}


def complaint(tokens: Sequence[Token], unexpected: Token, text: str, place: TextPlace) -> tuple[TextPlace, str]:
    """Return where a statement's tokens cease to be one, and why; `unexpected` is the first that does not fit.

    `text` is all that was parsed, `place` the statement's own.
    """
    # The likeliest mistake first: `=>`, `<-` and arrows that an editor has put in.
    arrow = _OTHER_ARROWS.search(text, tokens[0].start_pos or 0, tokens[-1].end_pos or 0)
    if unexpected.type == "STRAY" and arrow and unexpected.start_pos == arrow.start():
        return _placed(unexpected, len(arrow[0])), f"the arrow is written '->', and points to the right; {_FORM}"
    if unexpected.type == "STRAY":
        return _stray(tokens, unexpected, text)
    index = next((number for number, token in enumerate(tokens) if token is unexpected), len(tokens))
    # What is wrong shows at a token, and what is missing shows in the one before it.
    before = tokens[index - 1] if index else None
    if not any(token.type == "ARROW" for token in tokens) and (unexpected.type in ("$END", "VALUE")):
        return place, _without_arrow(tokens)
    if unexpected.type == "$END":
        return place_of(tokens[-1]), f"a name is missing after the arrow; {_FORM}, and 'a -> _' drops a"
    return _misplaced(unexpected, before, any(token.type == "ARROW" for token in tokens[:index]))


def _placed(token: Token, width: int) -> TextPlace:
    return TextPlace(token.line or 1, token.column or 1, width)


def _without_arrow(tokens: Sequence[Token]) -> str:
    if tokens[0] in WORDS:
        return f"an arrow is missing in this statement; if {tokens[0]} belongs to the one before, end that with a comma"
    return f"an arrow is missing in this statement; {_FORM}"


def _misplaced(token: Token, before: Token | None, on_right: bool) -> tuple[TextPlace, str]:
    """What to say of a token that would be right elsewhere."""
    place = place_of(token)
    kind = before.type if before is not None else ""
    if token.type == "ARROW":
        if on_right:
            return place, "a second arrow; a newline or ';' stands between two statements"
        return place, f"a name is missing before the arrow; {_FORM}, and '_ -> b' adds b"
    if token.type == "_COMMA":
        return (
            place,
            "a name is missing between two commas" if kind == "_COMMA" else "a name is missing before the comma",
        )
    if token.type == "VALUE":
        if kind in ("", "ARROW", "_COMMA"):
            return place, f"an attribute is missing before '{token}', such as axis in axis=0"
        if kind == "VALUE":
            return place, f"a second value, '{token}'; an attribute has one, and a list is written '[2,0,1]'"
        return place, f"{before}{token} stands on the left; attributes come last, after the names on the right"
    return place, f"a comma is missing before {token}"


def _stray(tokens: Sequence[Token], stray: Token, text: str) -> tuple[TextPlace, str]:
    """What to say of a character that no token begins with."""
    place = place_of(stray)
    start = stray.start_pos or 0
    if stray == "=":
        if re.match(r"=[ \t]*[\"'\[{]", text[start:]):
            return place, "the value after this equals sign is not closed"
        before = next((token for token in reversed(tokens) if (token.end_pos or 0) <= start), None)
        what = (
            f"{before} has no value" if before is not None and before.type == "NAME" else "no attribute has this value"
        )
        return place, f"{what}; values are integers, words, and lists such as '[2,0,1]', after one equals sign"
    word, offset = _word_around(text, start)
    if stray in _STRAYS:
        return place, _STRAYS[stray]
    begins = TextPlace(place.line, place.column - offset, len(word))
    name = word.removesuffix("^T")
    meant = f'if all of it is a name, write "{name}"{word[len(name) :]}'
    if stray == "[":
        return begins, f"an array of names is written w[0:3], which is w_0, w_1, w_2; {meant}"
    return begins, f"'{stray}' has its place only in names in quotes; {meant}"


def _word_around(text: str, position: int) -> tuple[str, int]:
    """What stands around a position without a space, a comma or an arrow, and how far before the position it begins."""
    before = re.split(r"[\s,;\"'=]|->", text[:position])[-1]
    after = re.split(r"[\s,;\"'=]|->", text[position:])[0]
    return before + after or text[position], len(before)
