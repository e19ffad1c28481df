"""Registry: the verbs that there are, and the arguments of a statement, checked and made into its operations."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from shardwise.rewrite.statements import Faults, TextPlace
from shardwise.rewrite.verbs.attributes import (
    Argument,
    Attribute,
    ReadArgument,
    StatementArguments,
    StatementNames,
    integer,
)
from shardwise.rewrite.verbs.axis import AXIS
from shardwise.rewrite.verbs.cast import CAST
from shardwise.rewrite.verbs.fused import FUSED
from shardwise.rewrite.verbs.operation import Operation
from shardwise.rewrite.verbs.permute import PERMUTE
from shardwise.rewrite.verbs.quantise import QUANTISE
from shardwise.rewrite.verbs.reshape import RESHAPE
from shardwise.rewrite.verbs.resize import RESIZE
from shardwise.rewrite.verbs.stack import STACK

VERBS: Final = (AXIS, STACK, FUSED, PERMUTE, RESHAPE, RESIZE, CAST, QUANTISE)
"""In the order in which messages list their attributes."""

_SWITCHES: Final = (
    Attribute(
        "optional=1", integer(lambda n: "" if n in (0, 1) else "1 for a statement that may match nothing, else 0")
    ),
    Attribute("gaps=1", integer(lambda n: "" if n in (0, 1) else "1 for a star whose numbers may have gaps, else 0")),
)

_ATTRIBUTES: Final = {each.word: each for verb in VERBS for each in verb.attributes}
_ATTRIBUTES.update({each.word: each for each in _SWITCHES})

_VERB_OF: Final = {word: verb for verb in VERBS for word in verb.leading}

WORDS: Final = frozenset(_ATTRIBUTES)
"""All attributes. On the right of a statement, a tensor that is called so is written in quotes."""

_FLAGS: Final = tuple(word for word, each in _ATTRIBUTES.items() if each.read is None)

_PARAMETER = re.compile(r"\{([^{}]*)\}")

TextParameters: TypeAlias = Mapping[str, int | str]


def hint_of(word: str) -> str:
    """Return a question, to be appended, about a word that looks like an attribute without a value; else nothing."""
    near = difflib.get_close_matches(word.lower(), _FLAGS, n=1, cutoff=0.75)
    return f" (is {word} meant to be {near[0]}?)" if near else ""


def operations_of(
    written: Sequence[Argument], names: StatementNames, place: TextPlace, parameters: TextParameters, faults: Faults
) -> tuple[tuple[Operation, ...], bool, bool]:
    """Return the operations of a statement in their order, whether it is optional, and whether it allows gaps."""
    given = [each for argument in written if (each := _read(argument, parameters, faults)) is not None]
    arguments = StatementArguments(given, names, faults)
    # All checks run, whatever was found before: a user gets every fault of a statement at once.
    _find_repeated(arguments)
    making = _making(arguments, place)
    operations: list[Operation] = []
    for each in given:
        verb = _VERB_OF.get(each.word)
        # In the order of their words: `permute=..., axis=0` permutes each tensor, `axis=0, permute=...` the one that
        # they become.
        if verb is not None and (each is making or not verb.makes):
            made = verb.read(each, arguments)
            operations += [] if made is None else [made]
    optional, gaps = [arguments.integer(each.word) == 1 for each in _SWITCHES]
    if gaps and not names.stars:
        shown = arguments.once["gaps"].shown
        arguments.find(arguments.once["gaps"], f"{shown} is about the numbers of a star, and there is none")
    # Who wrote `a -> _, dtype='float16'` did not mean a drop.
    of_tensors = [each for each in given if each.attribute not in _SWITCHES]
    if of_tensors and not (names.left and names.right):
        what = "dropped: '_' takes nothing" if names.left else "added: it keeps the value that it has"
        shown = of_tensors[0].shown
        arguments.find(of_tensors[0], f"{shown} does nothing to a tensor that is {what}; leave it out")
    return tuple(operations), optional, gaps


def _read(argument: Argument, parameters: TextParameters, faults: Faults) -> ReadArgument | None:
    """What an argument says; None where there is no such argument."""
    word, place = argument.word, argument.place
    # Quotes say that a word is a name. `"axis"=0` is neither a name nor an attribute.
    if word[0] in "\"'":
        faults.append((place, f"{word} is a name, as it is in quotes, and takes no value; attributes have no quotes"))
        return None
    attribute = _ATTRIBUTES.get(word)
    if attribute is None:
        near = difflib.get_close_matches(word.lower(), _ATTRIBUTES, n=1)
        hint = f"the nearest is {near[0]}" if near else f"there are {', '.join(_ATTRIBUTES)}"
        faults.append((place, f"there is no attribute {word}; {hint}"))
        return None
    # A list may have newlines in it, and a message is one line.
    shown = " ".join(f"{word}={argument.text}".split()) if argument.text else word
    if attribute.read is None and argument.text:
        faults.append((place, f"{word} takes no value; leave out '={argument.text}'"))
        return ReadArgument(attribute, 1, shown, place)
    if attribute.read is not None and not argument.text:
        fault = f'{word} has no value; write it as {attribute.example} (a tensor that is called so is written "{word}")'
        faults.append((place, fault))
        return ReadArgument(attribute, None, shown, place)
    filled = _filled(argument.text, place, parameters, faults)
    if filled is None:
        return ReadArgument(attribute, None, shown, place)
    shown += f" (that is, {filled})" if filled != argument.text else ""
    try:
        return ReadArgument(attribute, attribute.value_of(filled), shown, place)
    except ValueError as error:
        faults.append((place, f"{shown}: {error}"))
        return ReadArgument(attribute, None, shown, place)


def _filled(text: str, place: TextPlace, parameters: TextParameters, faults: Faults) -> str | None:
    """The text of a value in which parameters have their values; None where one has none."""
    known = len(faults)
    for name in _PARAMETER.findall(text):
        value = parameters.get(name.strip())
        if not name.strip():
            faults.append((place, "{} names no parameter; a parameter is written {num_heads}"))
        elif value is None:
            given = f"given are {', '.join(sorted(parameters))}" if parameters else "none is given"
            faults.append((place, f"the parameter {{{name}}} has no value; give one for {name.strip()!r} ({given})"))
        elif isinstance(value, bool) or not isinstance(value, int | str):
            kind = type(value).__name__
            faults.append((place, f"the parameter {{{name}}} is {value!r} ({kind}); parameters are integers or text"))
    if len(faults) > known:
        return None
    return _PARAMETER.sub(lambda found: str(parameters[found[1].strip()]), text)


def _find_repeated(arguments: StatementArguments) -> None:
    before: dict[str, ReadArgument] = {}
    operation = ""
    for each in arguments.given:
        first = before.get(each.word)
        # A cast may come again once another operation was carried out.
        again = each.attribute.repeatable and not each.word == operation == "dtype"
        if first is not None and not again:
            arguments.find(each, f"{each.word} is given twice, as {first.shown} and as {each.shown}; give it once")
        before[each.word] = each
        if each.word in _VERB_OF:
            operation = each.word


# Joining several tensors to one, and splitting one into several


def _making(arguments: StatementArguments, place: TextPlace) -> ReadArgument | None:
    """The argument that says how a statement joins or splits tensors; None where there is none, or it is no use."""
    asked = [each for word, each in arguments.once.items() if word in _VERB_OF and _VERB_OF[word].makes]
    # Then `axis` says where these work, and is no operation of its own.
    at_axis = [each for each in asked if _VERB_OF[each.word].at_axis]
    if at_axis:
        asked = [each for each in asked if each.word != "axis"]
    if len(asked) > 1:
        first, second = sorted(asked, key=lambda each: (each.place.line, each.place.column))[:2]
        what = "which a statement does once; write two statements, with a temporary name between"
        arguments.find(second, f"{first.shown} and {second.shown} each join or split tensors, {what}")
        return None
    _find_strays(arguments, asked)
    if not (arguments.names.left and arguments.names.right):
        return None
    fits = at_axis or _one_side_has_one(arguments, asked, place)
    return asked[0] if fits and asked else None


def _find_strays(arguments: StatementArguments, asked: Sequence[ReadArgument]) -> None:
    """Find arguments that say something about an operation that is not there; `asked`: of those that join or split."""
    hint = _hint(arguments.names)
    for each in arguments.once.values():
        owners = each.attribute.owners
        if owners and arguments.once.keys().isdisjoint(owners) and not hint:
            arguments.find(each, f"{each.shown} {each.attribute.stray}")
    word = asked[0].word if asked else None
    sizes = arguments.once.get("sizes")
    if sizes is not None and word not in ("axis", *_ATTRIBUTES["num_heads"].owners):
        why = f"{word} has none" if word else "give the dim as axis=..."
        arguments.find(sizes, f"{sizes.shown} says where a dim is cut or joined; {why}")


def _one_side_has_one(arguments: StatementArguments, asked: Sequence[ReadArgument], place: TextPlace) -> bool:
    names, hint = arguments.names, _hint(arguments.names)
    # Many to many has no single meaning: by pairs, or all joined and parted again?
    if names.joins and names.parts:
        each = "use a placeholder such as $EXPERT_ID, not a star," if names.stars else "write a statement for each"
        each += " for one each; what names begin with is changed by module.** -> **" if names.stars else ""
        arguments.faults.append((place, f"{names.amount}, but one side has exactly one; {each}{hint}"))
        return False
    if (names.joins or names.parts) and not asked and "sizes" not in arguments.once:
        left, right = names.counts
        what = f"{left} tensors become one" if names.joins else f"one tensor becomes {right}"
        ways = "axis=..., stack=... or one of the fused attributes"
        if names.stars:
            what = "all that match the star become one" if names.joins else "one tensor becomes all that match the star"
            ways = "axis=... or stack=..."
        arguments.faults.append((place, f"{what}, but how is not said; add {ways}{hint}"))
        return False
    return True


def _hint(names: StatementNames) -> str:
    """What to say in addition where several names are too many."""
    return hint_of(names.last) if len(names.right) > 1 else ""
