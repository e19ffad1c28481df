"""Complaints: what to say of a statement that the grammar does not know."""

import re
from collections.abc import Sequence
from typing import Final

from lark import Token

from shardwise.rewrite.spelling import place_of
from shardwise.rewrite.statement_arguments import WORDS
from shardwise.rewrite.statements import TextPlace

__all__ = ["complaint"]

_FORM: Final = "a statement is written 'a -> b': what is there on the left, what becomes of it on the right"
_OTHER_ARROWS = re.compile(r"<-+|-{2,}>|=+>|[\u2190\u2192\u21d2\u27f5\u27f6]")
_STRAYS: Final = {
    '"': 'this quote is not closed; a name in quotes ends on its line, and has \\" for a quote of its own',
    "'": "this quote is not closed; a name in quotes ends on its line, and has \\' for a quote of its own",
    "^": "the only suffix of a name is ^T, which reverses all dims",
    "$": 'a placeholder is a dollar sign and capital letters, such as $LAYER_ID; in a name itself it is written "\\$"',
    "{": "a parameter stands for the value of an attribute, such as num_heads={num_heads}, and nowhere else",
}


def complaint(tokens: Sequence[Token], unexpected: Token, text: str, place: TextPlace) -> tuple[TextPlace, str]:
    """Return where a statement's tokens cease to be one, and why; `unexpected` is the first that does not fit.

    `text` is all that was parsed, `place` the statement's own.
    """
    arrow = _OTHER_ARROWS.search(text, tokens[0].start_pos or 0, tokens[-1].end_pos or 0)
    if unexpected.type == "STRAY" and arrow and unexpected.start_pos == arrow.start():
        return _placed(unexpected, len(arrow[0])), f"the arrow is written '->', and points to the right; {_FORM}"
    if unexpected.type == "STRAY":
        return _stray(tokens, unexpected, text)
    index = next((number for number, token in enumerate(tokens) if token is unexpected), len(tokens))
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
            return place, "what begins after this equals sign is not closed"
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
