"""Stars: what is to be said of the numbers for which a star stands."""

from collections.abc import Mapping, Sequence

from shardwise.rewrite.patterns import NamePattern

__all__ = ["counted", "gap_of"]


def gap_of(pattern: NamePattern, bindings: Sequence[str], names: Sequence[str]) -> str:
    """Say which name is lacking among those for which a star stands; empty where their numbers are 0, 1, 2 and so on.

    names: in the order of their numbers, which differ. Names that are lacking behind the last cannot be seen.
    """
    if _number(pattern, names[-1]) == str(len(names) - 1):
        return ""
    numbers = {_number(pattern, name) for name in names}
    missing = next(number for number in range(len(names)) if str(number) not in numbers)
    return f"{pattern.fill(bindings, str(missing))} is not there, and {names[-1]} is"


def counted(pattern: NamePattern, groups: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    """Say how many names a star stands for, and where it stands for fewer or more than mostly."""
    examples: dict[int, list[str]] = {}
    for names in groups.values():
        examples.setdefault(len(names), []).append(names[0])
    (most, places), *others = sorted(examples.items(), key=lambda each: (-len(each[1]), each[0]))
    text = f"{pattern.text} stands for {most} name{'s' * (most != 1)}" + ("" if len(groups) == 1 else " in each place")
    if others:
        text = f"{text.removesuffix('each place')}{len(places)} place{'s' * (len(places) != 1)}"
    for count, firsts in others:
        more = f" and {len(firsts) - 1} more places" if len(firsts) > 1 else ""
        text += f", for {count} where {min(firsts)} is{more}"
    return text


def _number(pattern: NamePattern, name: str) -> str:
    """The number for which the star stands in a name, without zeros that lead."""
    return pattern.star_in(name).lstrip("0") or "0"
