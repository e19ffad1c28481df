"""Arguments: what follows the names of a statement, checked and made into its operations."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite.metas import KEPT_FILL, number_text
from shardwise.rewrite.statements import (
    Cast,
    Concat,
    Crop,
    Dequantise,
    Faults,
    Ffn,
    JoinOrSplit,
    Name,
    Pad,
    Permute,
    Qkv,
    QkvPerRank,
    Quantise,
    Reshape,
    SplitStatement,
    Stack,
    Star,
    StatementOperation,
    TextPlace,
    Unstack,
)

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
    "pad": "pad='[50304,-1]'",
    "crop": "crop='[50257,-1]'",
    "fill": "fill=0",
    "dtype": "dtype='float16'",
    "src_dtype": "src_dtype='float16'",
    "dst_dtype": "dst_dtype='float32'",
    "dequantise": "dequantise='[128,128]'",
    "quantise": "quantise='[128,128]'",
    "element_dtype": "element_dtype='float8_e4m3fn'",
    "scale_dtype": "scale_dtype='float32'",
    "scale_dims": "scale_dims=1",
    "optional": "optional=1",
    "gaps": "gaps=1",
}

WORDS: Final = frozenset(_EXAMPLES)
"""All attributes. On the right of a statement, a tensor that is called so is written in quotes."""

_INTEGERS = ("axis", "stack", "scale_dims")
_COUNTS = ("num_heads", "num_key_value_groups", "src_tp", "dst_tp")
_LISTS = ("sizes", "permute", "reshape", "pad", "crop", "dequantise", "quantise")
_RECORDABLE = ("sizes", "reshape", "pad", "crop", "dtype", "dst_dtype", "element_dtype", "scale_dtype")
_PAIRED = ("src_dtype", "dst_dtype")
_REPEATABLE = ("permute", "reshape")
"""Operations that may come as often as one likes; a cast again once another operation has been carried out."""

_DETAILS = (
    "sizes",
    "num_heads",
    "num_key_value_groups",
    "src_tp",
    "dst_tp",
    "fill",
    "element_dtype",
    "scale_dtype",
    "scale_dims",
    "optional",
    "gaps",
)
"""What is said about a statement, or about how it joins or splits."""

_QUANTISED_TO = {"element_dtype": "float8_e4m3fn", "scale_dtype": "float32"}
"""What is made where nothing else is said."""

_SWITCHES = {"optional": "a statement that may match nothing", "gaps": "a star whose numbers may have gaps"}

_DTYPES = ", ".join(ITEMSIZE_BYTES)
# Eighteen digits fit in 64 bits, and int() refuses texts of thousands of digits with an error of its own.
_LIST = re.compile(r"\[\s*(?:-?[0-9]{1,18}\s*(?:,\s*-?[0-9]{1,18}\s*)*,?\s*)?\]")
_PARAMETER = re.compile(r"\{([^{}]*)\}")

TextParameters: TypeAlias = Mapping[str, int | str]


_FORMS: Final[Mapping[str, Mapping[tuple[int, int], str]]] = {
    "fused_qkv": {(3, 1): "'q, k, v -> qkv'", (1, 3): "'qkv -> q, k, v'"},
    "fused_qkv_old": {(3, 1): "'q, k, v -> qkv'", (1, 3): "'qkv -> q, k, v'", (1, 1): "'qkv -> qkv'"},
    "fused_ffn": {(2, 1): "'gate, up -> fused'", (1, 2): "'fused -> gate, up'", (1, 1): "'fused -> fused'"},
}
"""By how many names stand on the left and on the right."""

_FLAGS: Final = tuple(_FORMS)
"""Attributes without a value."""

_BELONGS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_heads": ("fused_qkv", "fused_qkv_old"),
    "num_key_value_groups": ("fused_qkv", "fused_qkv_old"),
    "src_tp": ("fused_qkv_old", "fused_ffn"),
    "dst_tp": ("fused_qkv_old", "fused_ffn"),
    "element_dtype": ("quantise",),
    "scale_dtype": ("quantise",),
    "scale_dims": ("quantise",),
}

_SCALING_FORMS: Final[Mapping[str, tuple[tuple[int, int], str]]] = {
    "dequantise": ((2, 1), "'elements, scales -> a'"),
    "quantise": ((1, 2), "'a -> elements, scales'"),
}

_HEADS: Final[Mapping[str, str]] = {
    "num_heads": "the number of query heads",
    "num_key_value_groups": "the number of key-value heads",
}


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

    word: str
    value: int | str | tuple[int, ...] | None
    """None: what was written is no value of it, which has been reported; "recorded": left to the record."""
    shown: str
    """As it was written."""
    place: TextPlace


@dataclass(frozen=True, slots=True)
class StatementNames:
    """The names of a statement, arrays expanded."""

    left: tuple[Name, ...]
    right: tuple[Name, ...]
    joins: bool
    """Whether the left stands for several tensors (or may, with a star)."""
    parts: bool
    """Whether the right does."""
    stars: bool
    last: str
    """The last word of the right, where it may be a misspelled attribute; else empty."""

    @classmethod
    def of(cls, left: tuple[Name, ...], right: tuple[Name, ...], last: str = "") -> "StatementNames":
        """Return the names with what is asked of them."""
        starred_left, starred_right = _starred(left), _starred(right)
        joins, parts = len(left) > 1 or starred_left, len(right) > 1 or starred_right
        return cls(left, right, joins, parts, starred_left or starred_right, last)

    @property
    def hint(self) -> str:
        """What to say in addition where several names are too many."""
        return hint_of(self.last) if len(self.right) > 1 else ""

    @property
    def counts(self) -> tuple[int, int]:
        """How many names stand on the left and on the right."""
        return len(self.left), len(self.right)


def _starred(names: Sequence[Name]) -> bool:
    return any(isinstance(part, Star) for name in names for part in name.parts)


def operations_of(
    arguments: Sequence[Argument], names: StatementNames, place: TextPlace, parameters: TextParameters, faults: Faults
) -> tuple[tuple[StatementOperation, ...], bool, bool]:
    """Return the operations of a statement in their order, whether it is optional, and whether it allows gaps."""
    given = [each for argument in arguments if (each := _given(argument, parameters, faults)) is not None]
    # All checks run, whatever was found before: a user gets every fault of a statement at once.
    _find_repeated(given, faults)
    its_word, join_or_split = _join_or_split_of(given, names, place, faults)
    fill = _fill(given, faults)
    operations: list[StatementOperation] = []
    cast: ReadArgument | None = None
    for each in given:
        match each.word:
            case "permute" if isinstance(each.value, tuple):
                operations.append(Permute(each.value or None))
            case "reshape" if isinstance(each.value, tuple):
                operations.append(Reshape(each.value))
            case "reshape" if each.value == RECORDED:
                operations.append(Reshape(None))
            case "pad" | "crop" if each.value is not None:
                sizes = each.value if isinstance(each.value, tuple) else None
                operations.append(Pad(sizes, fill or "0") if each.word == "pad" else Crop(sizes, fill))
            case "dtype" if each.value is not None:
                operations.append(Cast(None if each.value == RECORDED else str(each.value)))
            case "src_dtype" | "dst_dtype":
                cast = _paired(cast, each, operations, faults)
            # Here and not at the end: `permute=..., axis=0` permutes each tensor, `axis=0, permute=...` the one that
            # they become.
            case word if word == its_word and join_or_split is not None:
                operations.append(join_or_split)
    if cast is not None:
        faults.append((cast.place, _unpaired(cast)))
    flags = {each.word: each for each in given if each.word in _SWITCHES}
    optional, gaps = [word in flags and flags[word].value == 1 for word in _SWITCHES]
    if gaps and not names.stars:
        faults.append((flags["gaps"].place, f"{flags['gaps'].shown} is about the numbers of a star, and there is none"))
    # Who wrote `a -> _, dtype='float16'` did not mean a drop.
    of_tensors = [each for each in given if each.word not in _SWITCHES]
    if of_tensors and not (names.left and names.right):
        what = "dropped: '_' takes nothing" if names.left else "added: it keeps the value that it has"
        faults.append(
            (of_tensors[0].place, f"{of_tensors[0].shown} does nothing to a tensor that is {what}; leave it out")
        )
    return tuple(operations), optional, gaps


def _fill(given: Sequence[ReadArgument], faults: Faults) -> str | None:
    """The value that a statement fills with, or takes what it crops to have."""
    filling = next((each for each in given if each.word == "fill"), None)
    if filling is None:
        return None
    if not any(each.word in ("pad", "crop") for each in given):
        faults.append(
            (
                filling.place,
                f"{filling.shown} is the value of elements that pad= adds or crop= takes away; neither is given",
            )
        )
    return None if filling.value is None else str(filling.value)


def _find_repeated(given: Sequence[ReadArgument], faults: Faults) -> None:
    before: dict[str, ReadArgument] = {}
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


def _paired(
    first: ReadArgument | None, second: ReadArgument, operations: list[StatementOperation], faults: Faults
) -> ReadArgument | None:
    """Add the cast that `src_dtype` and `dst_dtype` make; where the other is still to come, return what there is."""
    if first is None:
        return second
    # `src_dtype=..., src_dtype=...`: the second may still find its partner, so the first is the one that is wrong.
    if first.word == second.word:
        faults.append((first.place, _unpaired(first)))
        return second
    source, target = (first, second) if first.word == "src_dtype" else (second, first)
    if source.value is not None and target.value is not None:
        operations.append(Cast(None if target.value == RECORDED else str(target.value), str(source.value)))
    return None


def _unpaired(cast: ReadArgument) -> str:
    other = "dst_dtype" if cast.word == "src_dtype" else "src_dtype"
    return f"{cast.shown} is given without {other}; a cast that can be undone has both, any other is written dtype=..."


def _given(argument: Argument, parameters: TextParameters, faults: Faults) -> ReadArgument | None:
    """What an argument says; None where there is no such argument."""
    word, place = argument.word, argument.place
    # Quotes say that a word is a name. `"axis"=0` is neither a name nor an attribute.
    if word[0] in "\"'":
        faults.append((place, f"{word} is a name, as it is in quotes, and takes no value; attributes have no quotes"))
        return None
    if word not in _EXAMPLES:
        near = difflib.get_close_matches(word.lower(), _EXAMPLES, n=1)
        hint = f"the nearest is {near[0]}" if near else f"there are {', '.join(_EXAMPLES)}"
        faults.append((place, f"there is no attribute {word}; {hint}"))
        return None
    # A list may have newlines in it, and a message is one line.
    shown = " ".join(f"{word}={argument.text}".split()) if argument.text else word
    fault: str | None = None
    value: int | str | tuple[int, ...] | None = None
    if word in _FLAGS:
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
    return ReadArgument(word, value, shown, place)


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
    if word == "fill":
        number_read = text if text == KEPT_FILL else number_text(text)
        wanted = "a number, such as 0, 0.5, '-inf' or '1e-5', or 'kept' for the values of the target"
        return number_read, None if number_read else f"{word} wants {wanted}"
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
        return "only one size can be -1, the rest"
    return "sizes are not negative, but for one -1" if min(shape, default=0) < -1 else None


def _sizes_fault(sizes: tuple[int, ...]) -> str | None:
    return "sizes are not negative" if min(sizes, default=0) < 0 else None


def _block_fault(block: tuple[int, ...]) -> str | None:
    return (
        "a block has at least one element along each dim; -1 is all"
        if 0 in block or min(block, default=1) < -1
        else None
    )


def _resize_fault(sizes: tuple[int, ...]) -> str | None:
    return "sizes are not negative, but for -1, which keeps a size" if min(sizes, default=0) < -1 else None


_LIST_FAULTS: Final = {
    "permute": _permute_fault,
    "reshape": _reshape_fault,
    "sizes": _sizes_fault,
    "pad": _resize_fault,
    "crop": _resize_fault,
    "dequantise": _block_fault,
    "quantise": _block_fault,
}


# Joining several tensors to one, and splitting one into several


def hint_of(word: str) -> str:
    """Return a question, to be appended, about a word that looks like an attribute without a value; else nothing."""
    near = difflib.get_close_matches(word.lower(), _FLAGS, n=1, cutoff=0.75)
    return f" (is {word} meant to be {near[0]}?)" if near else ""


def _join_or_split_of(
    given: Sequence[ReadArgument], names: StatementNames, place: TextPlace, faults: Faults
) -> tuple[str | None, JoinOrSplit | None]:
    """Return the argument that says how a statement joins or splits tensors, and the operation."""
    once = {each.word: each for each in given}
    # `axis` says where a fused attribute works, and is an operation of its own only where there is none.
    fused = [each for each in once.values() if each.word in _FORMS]
    asked = [*fused, *(once[word] for word in ("stack", *_SCALING_FORMS) if word in once)]
    if "axis" in once and not fused:
        asked.append(once["axis"])
    if len(asked) > 1:
        first, second = sorted(asked, key=lambda each: (each.place.line, each.place.column))[:2]
        faults.append(
            (
                second.place,
                f"{first.shown} and {second.shown} each join or split tensors, which a statement does once; write two "
                "statements, with a temporary name between",
            )
        )
        return None, None
    _find_strays(once, asked, names, faults)
    if not names.left or not names.right:
        return None, None
    if fused:
        return fused[0].word, _fused(fused[0], once, names, faults)
    if not _one_side_has_one(names, once, place, faults) or not asked:
        return None, None
    if asked[0].word == "stack":
        return "stack", _stack(asked[0], names, faults)
    if asked[0].word in _SCALING_FORMS:
        return asked[0].word, _scaling(asked[0], once, names, faults)
    return "axis", _axis(asked[0], once.get("sizes"), names, faults)


def _find_strays(
    once: Mapping[str, ReadArgument], asked: Sequence[ReadArgument], names: StatementNames, faults: Faults
) -> None:
    """Report arguments that say something about an operation that is not there."""
    word = asked[0].word if asked else None
    for each, owners in _BELONGS.items():
        if each in once and word not in owners and not names.hint:
            faults.append(
                (once[each].place, f"{once[each].shown} says something about {' or '.join(owners)}, which is not given")
            )
    if "sizes" in once and word not in ("axis", *_BELONGS["num_heads"]):
        why = f"{word} has none" if word else "give the dim as axis=..."
        faults.append((once["sizes"].place, f"{once['sizes'].shown} says where a dim is cut or joined; {why}"))


def _one_side_has_one(
    names: StatementNames, once: Mapping[str, ReadArgument], place: TextPlace, faults: Faults
) -> bool:
    left, right = names.counts
    # Many to many has no single meaning: by pairs, or all joined and parted again?
    if names.joins and names.parts:
        each = "use a placeholder such as $EXPERT_ID, not a star," if names.stars else "write a statement for each"
        each += " for one each; what names begin with is changed by module.** -> **" if names.stars else ""
        what = f"{_amount(names)}, but one side has exactly one"
        faults.append((place, f"{what}; {each}{names.hint}"))
        return False
    if (names.joins or names.parts) and not once.keys() & {"axis", "stack", "sizes", *_SCALING_FORMS}:
        what = f"{left} tensors become one" if names.joins else f"one tensor becomes {right}"
        ways = "axis=..., stack=... or one of the fused attributes"
        if names.stars:
            what = "all that match the star become one" if names.joins else "one tensor becomes all that match the star"
            ways = "axis=... or stack=..."
        faults.append((place, f"{what}, but how is not said; add {ways}{names.hint}"))
        return False
    return True


def _amount(names: StatementNames) -> str:
    """How many names stand on either side."""
    sides = zip(names.counts, (names.left, names.right), strict=True)
    left, right = ("a star" if _starred(side) else f"{count} name{'s' * (count > 1)}" for count, side in sides)
    return f"{left} on the left and {right} on the right"


def _stack(stack: ReadArgument, names: StatementNames, faults: Faults) -> JoinOrSplit | None:
    if not names.joins and not names.parts:
        faults.append(
            (stack.place, f"{stack.shown} joins several tensors or parts one into several; for one tensor use reshape")
        )
    if not isinstance(stack.value, int):
        return None
    return Stack(stack.value) if names.joins else Unstack(stack.value)


def _scaling(
    word: ReadArgument, once: Mapping[str, ReadArgument], names: StatementNames, faults: Faults
) -> JoinOrSplit | None:
    counts, form = _SCALING_FORMS[word.word]
    if names.stars or names.counts != counts:
        faults.append((word.place, f"{word.word} is for {form}; here are {_amount(names)}"))
        return None
    if not isinstance(word.value, tuple):
        return None
    if word.word == "dequantise":
        return Dequantise(word.value)
    given = {key: once[key].value if key in once else each for key, each in _QUANTISED_TO.items()}
    elements, scales = (None if each == RECORDED else str(each) for each in given.values())
    dims = once["scale_dims"].value if "scale_dims" in once else None
    return Quantise(word.value, elements, scales, dims if isinstance(dims, int) else None)


def _axis(axis: ReadArgument, sizes: ReadArgument | None, names: StatementNames, faults: Faults) -> JoinOrSplit | None:
    count = max(names.counts)
    wanted = sizes.value if sizes is not None else None
    if sizes is not None and not names.joins and not names.parts:
        faults.append((sizes.place, f"{sizes.shown} is for several tensors on one side; here one becomes one"))
    elif sizes is not None and isinstance(wanted, tuple) and not names.stars and len(wanted) != count:
        faults.append((sizes.place, f"{sizes.shown} has {len(wanted)} sizes for {count} tensors; give one for each"))
    if not isinstance(axis.value, int) or not (names.joins or names.parts):
        return None  # with one tensor on either side AOA's axis says nothing
    exact = wanted if isinstance(wanted, tuple) else None
    if names.joins:
        if wanted == "recorded" and sizes is not None:
            faults.append((sizes.place, f"{sizes.shown}: only a split needs recorded sizes; leave them out"))
        return Concat(axis.value, exact)
    return SplitStatement(axis.value, exact, recorded=wanted == "recorded")


def _fused(
    flag: ReadArgument, once: Mapping[str, ReadArgument], names: StatementNames, faults: Faults
) -> JoinOrSplit | None:
    left, right = names.counts
    # The counts of names decide the direction: there is no word for parting.
    forms = _FORMS[flag.word]
    # A star does not say how many names it stands for, and a fused operation takes three or two.
    if names.stars:
        faults.append(
            (
                flag.place,
                f"{flag.word} needs its tensors one by one, as in {_listed(forms)}; a star stands for any number",
            )
        )
        return None
    if (left, right) not in forms:
        faults.append(
            (
                flag.place,
                f"{flag.word} is for {_listed(forms)}; here are {_amount(names)}",
            )
        )
        return None
    axis = once["axis"].value if "axis" in once else None
    axis = axis if isinstance(axis, int) else None
    source, target = _degree("src_tp", left, once, faults), _degree("dst_tp", right, once, faults)
    if flag.word == "fused_ffn":
        return Ffn(axis, left, right, source, target)
    heads = _heads(flag, once, faults)
    if heads is None:
        return None
    sizes = _sizes_of_three(once, faults)
    if flag.word == "fused_qkv":
        return Qkv(*heads, axis, joins=left == 3, sizes=sizes)
    return QkvPerRank(*heads, axis, left, right, source, target, sizes)


def _sizes_of_three(once: Mapping[str, ReadArgument], faults: Faults) -> tuple[int, ...] | None:
    """The sizes of query, key and value, where they are said."""
    given = once.get("sizes")
    if given is None or given.value is None:
        return None
    if not isinstance(given.value, tuple) or len(given.value) != 3:
        faults.append((given.place, f"{given.shown} is not three sizes; give those of query, key and value"))
        return None
    return given.value


def _listed(forms: Mapping[tuple[int, int], str]) -> str:
    *most, last = forms.values()
    return f"{', '.join(most)} or {last}"


def _degree(word: str, count: int, once: Mapping[str, ReadArgument], faults: Faults) -> int | None:
    """The degree of the fused tensor of one side, which is fused where it is one."""
    if word not in once:
        return None
    if count > 1:
        side = "left" if word == "src_tp" else "right"
        what = f"the degree of a fused tensor on the {side}, where {count} tensors stand that are not fused"
        faults.append((once[word].place, f"{once[word].shown} is {what}; leave it out"))
    value = once[word].value
    return value if isinstance(value, int) else None


def _heads(flag: ReadArgument, once: Mapping[str, ReadArgument], faults: Faults) -> tuple[int, int] | None:
    missing = [word for word in _HEADS if word not in once]
    for word in missing:
        faults.append((flag.place, f"{flag.word} needs {word}=..., {_HEADS[word]}"))
    if missing:
        return None
    heads, groups = once["num_heads"].value, once["num_key_value_groups"].value
    if not isinstance(heads, int) or not isinstance(groups, int):
        return None
    # Each key-value head serves equally many query heads: that is what a group is.
    if heads % groups:
        faults.append(
            (
                once["num_heads"].place,
                f"{heads} query heads cannot be shared evenly among {groups} key-value heads; "
                "num_heads is a multiple of num_key_value_groups",
            )
        )
        return None
    return heads, groups
