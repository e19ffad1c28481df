"""Texts: what a rewrite is made of, before it is read as statements: sections of text, with their parameters."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

from shardwise.errors import RewriteError
from shardwise.rewrite.sections import Section
from shardwise.rewrite.statement_arguments import TextParameters
from shardwise.rewrite.syntax import needed_parameters, parse

__all__ = ["BOUNDARY", "Text", "parsed", "texts_of", "with_parameters"]

BOUNDARY = "---"
"""A line of its own between two sections: what follows sees only what has come out so far."""

_INVERSE = "# inverse of:"
"""A line before what is written the way there, and is carried out backward."""

_AOA_KEYS = frozenset({"aoa_statements", "aoa_config_reverse"})


class Text(NamedTuple):
    """A section as it was written, which way it is carried out, and the parameters that were given to it."""

    text: str
    inverted: bool
    lossy: bool
    given: tuple[tuple[str, int | str], ...] = ()

    @property
    def needed(self) -> frozenset[str]:
        """What the text names in braces."""
        return needed_parameters(self.text) if "{" in self.text else frozenset()

    @property
    def lacking(self) -> frozenset[str]:
        """What of it has no value."""
        return self.needed - dict(self.given).keys()

    def with_parameters(self, parameters: TextParameters) -> "Text":
        """The text with those of the parameters that it lacks; what it was given it keeps."""
        lacking = self.lacking
        given = {**dict(self.given), **{name: value for name, value in parameters.items() if name in lacking}}
        return self._replace(given=tuple(sorted(given.items())))

    def __str__(self) -> str:
        """As it was written, under a comment that says so where it is undone."""
        written = self.text.strip("\n")
        return f"{_INVERSE}\n{written}" if self.inverted else written


def texts_of(source: object, parameters: object) -> tuple[Text, ...]:
    """The sections of a rewrite in the order in which they are carried out. Raises RewriteError for what is none."""
    text, inverted = _read(source)
    texts = [Text(part, inverted, lossy=False) for part in _parts(text)]
    return with_parameters(reversed(texts) if inverted else texts, parameters)


def with_parameters(texts: Iterable[Text], parameters: object) -> tuple[Text, ...]:
    """Give each text the parameters that it names and lacks.

    Raises RewriteError for those that none names, for bad values, and for another value of what none lacks.
    """
    if not isinstance(parameters, Mapping):
        raise RewriteError(f"parameters are a mapping of names to integers or text, not {parameters!r:.100}")
    known = tuple(texts)
    named = sorted(frozenset().union(*[each.needed for each in known]))
    problems = []
    for name, value in parameters.items():
        if name not in named:
            close = get_close_matches(str(name), named, n=1)
            hint = f"; the nearest is {close[0]!r}" if close else ""
            has = f"it names {', '.join(map(repr, named))}" if named else "it names none"
            problems.append(f"the rewrite has no parameter {name!r}: {has}{hint}")
        elif not isinstance(value, int | str) or isinstance(value, bool):
            problems.append(f"the parameter {name!r} is {value!r:.100}; parameters are integers or text")
        elif (held := _held(known, name)) and value not in held:
            has = " and ".join(map(repr, held))
            problems.append(
                f"the parameter {name!r} is {has} already, and is not changed to {value!r:.100}; make the rewrite "
                "anew, from its text"
            )
    if problems:
        raise RewriteError(*problems)
    return tuple([each.with_parameters(parameters) for each in known])


def _held(texts: Iterable[Text], name: str) -> list[int | str]:
    """The values that a parameter has; none while a text lacks it."""
    naming = [each for each in texts if name in each.needed]
    if any(name in each.lacking for each in naming):
        return []
    return list(dict.fromkeys([dict(each.given)[name] for each in naming]))


def parsed(texts: Sequence[Text]) -> tuple[Section, ...] | None:
    """The sections, None while parameters are lacking. Raises RewriteError with what is wrong in any."""
    if any(each.lacking for each in texts):
        return None
    sections = []
    problems: list[str] = []
    for each in texts:
        try:
            sections.append(Section(parse(each.text, dict(each.given)), each.inverted, each.lossy))
        except RewriteError as error:
            problems += error.problems
    if problems:
        raise RewriteError(*problems)
    return tuple(sections)


def _parts(text: str) -> list[str]:
    """The text of each section, at its line of the whole."""
    lines = text.splitlines()
    bounds = [-1, *(at for at, line in enumerate(lines) if line.strip() == BOUNDARY), len(lines)]
    return ["\n" * (start + 1) + "\n".join(lines[start + 1 : stop]) for start, stop in pairwise(bounds)]


def _read(source: object) -> tuple[str, bool]:
    """The text of a rewrite, and whether it is to be undone."""
    if isinstance(source, Mapping):
        return _configured(source)
    text = _joined(source)
    if text is None:
        hint = "; read a file by Rewrite.file(path)" if isinstance(source, PathLike) else ""
        raise RewriteError(
            f"a rewrite is text, a sequence of statements, or an AOA configuration, not {source!r:.100}{hint}"
        )
    return text, False


def _configured(source: Mapping[Any, Any]) -> tuple[str, bool]:
    if not source.keys() <= _AOA_KEYS or "aoa_statements" not in source:
        has = ", ".join(map(repr, source)) or "nothing"
        raise RewriteError(f"an AOA configuration has aoa_statements and perhaps aoa_config_reverse; this has {has}")
    problems = []
    text = _joined(source["aoa_statements"])
    if text is None:
        problems.append(f"aoa_statements are text or a sequence of statements, not {source['aoa_statements']!r:.100}")
    inverted = source.get("aoa_config_reverse", False)
    if not isinstance(inverted, bool):
        problems.append(f"aoa_config_reverse is True or False, not {inverted!r:.100}")
    if problems or text is None:
        raise RewriteError(*problems)
    return text, inverted


def _joined(statements: object) -> str | None:
    if isinstance(statements, str):
        return statements
    if isinstance(statements, Sequence) and all(isinstance(each, str) for each in statements):
        return "\n".join(statements)
    return None
