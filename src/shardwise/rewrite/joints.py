"""Joints: what makes other tensors of those that are there, checked against the names of its statement."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.rewrite.findings import Faults
from shardwise.rewrite.statements import Concat, Ffn, Joint, Name, Place, Qkv, QkvPerRank, Split, Stack, Star, Unstack

__all__ = ["FLAGS", "Given", "Names", "hint_of", "joint_of"]


@dataclass(frozen=True, slots=True)
class Given:
    """An argument whose value was read."""

    word: str
    value: int | str | tuple[int, ...] | None
    """None: what was written is no value of it, which has been reported; "recorded": left to the record."""
    shown: str
    """As it was written."""
    place: Place


@dataclass(frozen=True, slots=True)
class Names:
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
    def of(cls, left: tuple[Name, ...], right: tuple[Name, ...], last: str = "") -> "Names":
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


_FORMS: Final[Mapping[str, Mapping[tuple[int, int], str]]] = {
    "fused_qkv": {(3, 1): "'q, k, v -> qkv'", (1, 3): "'qkv -> q, k, v'"},
    "fused_qkv_old": {(3, 1): "'q, k, v -> qkv'", (1, 3): "'qkv -> q, k, v'", (1, 1): "'qkv -> qkv'"},
    "fused_ffn": {(2, 1): "'gate, up -> fused'", (1, 2): "'fused -> gate, up'", (1, 1): "'fused -> fused'"},
}
"""By how many names stand on the left and on the right."""

FLAGS: Final = tuple(_FORMS)
"""Attributes without a value."""

_BELONGS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_heads": ("fused_qkv", "fused_qkv_old"),
    "num_key_value_groups": ("fused_qkv", "fused_qkv_old"),
    "src_tp": ("fused_qkv_old", "fused_ffn"),
    "dst_tp": ("fused_qkv_old", "fused_ffn"),
}

_HEADS: Final[Mapping[str, str]] = {
    "num_heads": "the number of query heads",
    "num_key_value_groups": "the number of key-value heads",
}


def hint_of(word: str) -> str:
    """Return a question, to be appended, about a word that looks like an attribute without a value; else nothing."""
    near = difflib.get_close_matches(word.lower(), FLAGS, n=1, cutoff=0.75)
    return f" (is {word} meant to be {near[0]}?)" if near else ""


def joint_of(given: Sequence[Given], names: Names, place: Place, faults: Faults) -> tuple[str | None, Joint | None]:
    """Return the argument at which a statement's joint stands, and the joint."""
    once = {each.word: each for each in given}
    fused = [each for each in once.values() if each.word in _FORMS]
    asked = [*fused, *(once[word] for word in ("stack",) if word in once)]
    if "axis" in once and not fused:
        asked.append(once["axis"])
    if len(asked) > 1:
        first, second = sorted(asked, key=lambda each: (each.place.line, each.place.column))[:2]
        faults.append(
            (
                second.place,
                f"{first.shown} and {second.shown} each join tensors or part them, which a statement can do once; "
                "write two statements, with a temporary name between them",
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
    return "axis", _axis(asked[0], once.get("sizes"), names, faults)


def _find_strays(once: Mapping[str, Given], asked: Sequence[Given], names: Names, faults: Faults) -> None:
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


def _one_side_has_one(names: Names, once: Mapping[str, Given], place: Place, faults: Faults) -> bool:
    left, right = names.counts
    if names.joins and names.parts:
        each = "use a placeholder such as $EXPERT_ID, not a star," if names.stars else "write a statement for each"
        each += " for one each" if names.stars else ""
        what = f"{_amount(names)}, but one side has exactly one"
        faults.append((place, f"{what}; {each}{names.hint}"))
        return False
    if (names.joins or names.parts) and not once.keys() & {"axis", "stack", "sizes"}:
        what = f"{left} tensors become one" if names.joins else f"one tensor becomes {right}"
        ways = "axis=..., stack=... or one of the fused attributes"
        if names.stars:
            what = "all that match the star become one" if names.joins else "one tensor becomes all that match the star"
            ways = "axis=... or stack=..."
        faults.append((place, f"{what}, but how is not said; add {ways}{names.hint}"))
        return False
    return True


def _amount(names: Names) -> str:
    """How many names stand on either side."""
    sides = zip(names.counts, (names.left, names.right), strict=True)
    left, right = ("a star" if _starred(side) else f"{count} name{'s' * (count > 1)}" for count, side in sides)
    return f"{left} on the left and {right} on the right"


def _stack(stack: Given, names: Names, faults: Faults) -> Joint | None:
    if not names.joins and not names.parts:
        faults.append(
            (stack.place, f"{stack.shown} joins several tensors or parts one into several; for one tensor use reshape")
        )
    if not isinstance(stack.value, int):
        return None
    return Stack(stack.value) if names.joins else Unstack(stack.value)


def _axis(axis: Given, sizes: Given | None, names: Names, faults: Faults) -> Joint | None:
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
            faults.append(
                (sizes.place, f"{sizes.shown}: only what parts a tensor needs recorded sizes; leave them out")
            )
        return Concat(axis.value, exact)
    return Split(axis.value, exact, recorded=wanted == "recorded")


def _fused(flag: Given, once: Mapping[str, Given], names: Names, faults: Faults) -> Joint | None:
    left, right = names.counts
    forms = _FORMS[flag.word]
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


def _sizes_of_three(once: Mapping[str, Given], faults: Faults) -> tuple[int, ...] | None:
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


def _degree(word: str, count: int, once: Mapping[str, Given], faults: Faults) -> int | None:
    """The degree of the fused tensor of one side, which is fused where it is one."""
    if word not in once:
        return None
    if count > 1:
        side = "left" if word == "src_tp" else "right"
        what = f"the degree of a fused tensor on the {side}, where {count} tensors stand that are not fused"
        faults.append((once[word].place, f"{once[word].shown} is {what}; leave it out"))
    value = once[word].value
    return value if isinstance(value, int) else None


def _heads(flag: Given, once: Mapping[str, Given], faults: Faults) -> tuple[int, int] | None:
    missing = [word for word in _HEADS if word not in once]
    for word in missing:
        faults.append((flag.place, f"{flag.word} needs {word}=..., {_HEADS[word]}"))
    if missing:
        return None
    heads, groups = once["num_heads"].value, once["num_key_value_groups"].value
    if not isinstance(heads, int) or not isinstance(groups, int):
        return None
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
