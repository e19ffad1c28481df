"""Arguments: what follows the names of a statement, checked and made into its operations."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite.findings import Faults
from shardwise.rewrite.joints import FLAGS, Given, Names, joint_of
from shardwise.rewrite.statements import Cast, Operation, Permute, Place, Reshape

__all__ = ["RECORDED", "WORDS", "Argument", "Parameters", "operations_of"]

RECORDED: Final = "recorded"
"""The value of what an inverse takes from the tensors that the forward rewrite was applied to."""

_EXAMPLES: Final[Mapping[str, str]] = {
    "axis": "axis=0",
    "sizes": "sizes='[3,5]'",
    "stack": "stack=0",
    "fused_qkv": "fused_qkv",
    "fused_qkv_old": "fused_qkv_old",
    "fused_ffn": "fused_ffn",
    "num_heads": "num_heads=32",
    "num_key_value_groups": "num_key_value_groups=8",
    "src_tp": "src_tp=2",
    "dst_tp": "dst_tp=2",
    "permute": "permute='[1,0]'",
    "reshape": "reshape='[4,-1]'",
    "dtype": "dtype='float16'",
    "src_dtype": "src_dtype='float16'",
    "dst_dtype": "dst_dtype='float32'",
    "optional": "optional=1",
    "gaps": "gaps=1",
}

WORDS: Final = frozenset(_EXAMPLES)
"""All attributes. On the right of a statement, a tensor that is called so is written in quotes."""

_INTEGERS = ("axis", "stack")
_COUNTS = ("num_heads", "num_key_value_groups", "src_tp", "dst_tp")
_LISTS = ("sizes", "permute", "reshape")
_RECORDABLE = ("sizes", "reshape", "dtype", "dst_dtype")
_PAIRED = ("src_dtype", "dst_dtype")
_REPEATABLE = ("permute", "reshape")
"""Operations that may come as often as one likes; a cast again once another operation has been carried out."""

_DETAILS = ("sizes", "num_heads", "num_key_value_groups", "src_tp", "dst_tp", "optional", "gaps")
"""What is said about a statement or about its joint."""

_SWITCHES = {"optional": "a statement that may match nothing", "gaps": "a star whose numbers may have gaps"}

_DTYPES = ", ".join(ITEMSIZE_BYTES)
_LIST = re.compile(r"\[\s*(?:-?[0-9]{1,18}\s*(?:,\s*-?[0-9]{1,18}\s*)*,?\s*)?\]")
_PARAMETER = re.compile(r"\{([^{}]*)\}")

Parameters: TypeAlias = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument as it was written."""

    word: str
    text: str
    """Of the value, without the equals sign; empty where there is none."""
    place: Place


def operations_of(
    arguments: Sequence[Argument], names: Names, place: Place, parameters: Parameters, faults: Faults
) -> tuple[tuple[Operation, ...], bool, bool]:
    """Return the operations of a statement in their order, whether it is optional, and whether it allows gaps."""
    given = [each for argument in arguments if (each := _given(argument, parameters, faults)) is not None]
    _find_repeated(given, faults)
    joint_word, joint = joint_of(given, names, place, faults)
    operations: list[Operation] = []
    cast: Given | None = None
    for each in given:
        match each.word:
            case "permute" if isinstance(each.value, tuple):
                operations.append(Permute(each.value or None))
            case "reshape" if isinstance(each.value, tuple):
                operations.append(Reshape(each.value))
            case "reshape" if each.value == RECORDED:
                operations.append(Reshape(None))
            case "dtype" if each.value is not None:
                operations.append(Cast(None if each.value == RECORDED else str(each.value)))
            case "src_dtype" | "dst_dtype":
                cast = _paired(cast, each, operations, faults)
            case word if word == joint_word and joint is not None:
                operations.append(joint)
    if cast is not None:
        faults.append((cast.place, _unpaired(cast)))
    flags = {each.word: each for each in given if each.word in _SWITCHES}
    optional, gaps = [word in flags and flags[word].value == 1 for word in _SWITCHES]
    if gaps and not names.stars:
        faults.append((flags["gaps"].place, f"{flags['gaps'].shown} is about the numbers of a star, and there is none"))
    of_tensors = [each for each in given if each.word not in _SWITCHES]
    if of_tensors and not (names.left and names.right):
        what = "dropped: '_' takes nothing" if names.left else "added: it keeps the value that it has"
        faults.append(
            (of_tensors[0].place, f"{of_tensors[0].shown} does nothing to a tensor that is {what}; leave it out")
        )
    return tuple(operations), optional, gaps


def _find_repeated(given: Sequence[Given], faults: Faults) -> None:
    before: dict[str, Given] = {}
    operation = ""
    for each in given:
        first = before.get(each.word)
        again = each.word in (*_PAIRED, *_REPEATABLE) or (each.word == "dtype" and operation != "dtype")
        if first is not None and not again:
            faults.append(
                (each.place, f"{each.word} is given twice, as {first.shown} and as {each.shown}; give it once")
            )
        before[each.word] = each
        if each.word not in _DETAILS:
            operation = each.word


def _paired(first: Given | None, second: Given, operations: list[Operation], faults: Faults) -> Given | None:
    """Add the cast that `src_dtype` and `dst_dtype` make; where the other is still to come, return what there is."""
    if first is None:
        return second
    if first.word == second.word:
        faults.append((first.place, _unpaired(first)))
        return second
    source, target = (first, second) if first.word == "src_dtype" else (second, first)
    if source.value is not None and target.value is not None:
        operations.append(Cast(None if target.value == RECORDED else str(target.value), str(source.value)))
    return None


def _unpaired(cast: Given) -> str:
    other = "dst_dtype" if cast.word == "src_dtype" else "src_dtype"
    return f"{cast.shown} is given without {other}; a cast that can be undone has both, any other is written dtype=..."


def _given(argument: Argument, parameters: Parameters, faults: Faults) -> Given | None:
    """What an argument says; None where there is no such argument."""
    word, place = argument.word, argument.place
    if word[0] in "\"'":
        faults.append((place, f"{word} is a name, as it is in quotes, and takes no value; attributes have no quotes"))
        return None
    if word not in _EXAMPLES:
        near = difflib.get_close_matches(word.lower(), _EXAMPLES, n=1)
        hint = f"the nearest is {near[0]}" if near else f"there are {', '.join(_EXAMPLES)}"
        faults.append((place, f"there is no attribute {word}; {hint}"))
        return None
    shown = " ".join(f"{word}={argument.text}".split()) if argument.text else word
    fault: str | None = None
    value: int | str | tuple[int, ...] | None = None
    if word in FLAGS:
        fault = f"{word} takes no value; leave out '={argument.text}'" if argument.text else None
        value = 1
    elif not argument.text:
        fault = f'{word} has no value; write it as {_EXAMPLES[word]} (a tensor that is called so is written "{word}")'
    else:
        filled = _filled(argument.text, place, parameters, faults)
        if filled is not None:
            shown += f" (that is, {filled})" if filled != argument.text else ""
            value, fault = _value(word, filled)
            fault = fault and f"{shown}: {fault}"
    if fault:
        faults.append((place, fault))
    return Given(word, value, shown, place)


def _filled(text: str, place: Place, parameters: Parameters, faults: Faults) -> str | None:
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


def _value(word: str, text: str) -> tuple[int | str | tuple[int, ...] | None, str | None]:
    """The value that a text is for an attribute, and what is wrong with it."""
    if text[:1] in ("'", '"') and text[-1:] == text[:1]:
        text = text[1:-1]
    text = text.strip()
    if text == RECORDED and word in _RECORDABLE:
        return RECORDED, None
    if word in _LISTS:
        if not _LIST.fullmatch(text):
            return None, f"{word} wants a list of integers, such as {_EXAMPLES[word]}"
        numbers = tuple(map(int, re.findall(r"-?[0-9]+", text)))
        fault = _LIST_FAULTS[word](numbers)
        return (None if fault else numbers), fault
    if word.endswith("dtype"):
        if text in ITEMSIZE_BYTES:
            return text, None
        near = difflib.get_close_matches(text, ITEMSIZE_BYTES, n=1)
        return None, f"there is no such dtype; {f'the nearest is {near[0]}' if near else f'there are {_DTYPES}'}"
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        return None, f"{word} wants an integer, such as {_EXAMPLES[word]}"
    number = int(text)
    if word in _COUNTS and number < 1:
        return None, f"{word} is at least 1"
    if word in _SWITCHES and number not in (0, 1):
        return None, f"{word} is 1 for {_SWITCHES[word]}, else 0"
    return number, None


def _permute_fault(dims: tuple[int, ...]) -> str | None:
    if sorted(dims) == list(range(len(dims))):
        return None
    wanted = ", ".join(map(str, range(len(dims))))
    return f"no permutation; {len(dims)} dims are {wanted}, each once, and '[]' reverses all"


def _reshape_fault(shape: tuple[int, ...]) -> str | None:
    if shape.count(-1) > 1:
        return "only one size can be -1, which is what remains for it"
    return "sizes are not negative, but for one -1" if min(shape, default=0) < -1 else None


def _sizes_fault(sizes: tuple[int, ...]) -> str | None:
    return "sizes are not negative" if min(sizes, default=0) < 0 else None


_LIST_FAULTS: Final = {"permute": _permute_fault, "reshape": _reshape_fault, "sizes": _sizes_fault}
