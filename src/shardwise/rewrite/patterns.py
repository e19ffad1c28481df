"""Patterns of names, and the index that finds what they stand for without trying every pattern on every name.

Placeholders and stars stand for digits only. So a name belongs to its skeleton, the name with every run of digits
replaced by a mark. A pattern can only match names with its skeleton; their runs of digits distinguish them.
"""

import re
from collections.abc import Iterable, Sequence
from decimal import MAX_EMAX, Context, Decimal
from difflib import get_close_matches

from shardwise.plan.names import is_beside_name, is_state_name
from shardwise.rewrite.statements import REST, Name, NamePart, Placeholder, Rest, Star

# Figure 1. A pattern and a name meet in their skeleton (with _ for the mark). Then only runs of digits are compared::
#
#     pattern    layers.$L.experts.$E.w1        name    layers.10.experts.3.w1
#     skeleton   layers._.experts._.w_          skeleton  layers._.experts._.w_
#     runs       $L, $E, constant 1             runs    10, 3, 1                 L=10, E=3
#
# Trying each of 200 patterns on each of 100,000 names would take 20 million matches.
_DIGITS = re.compile("[0-9]+")
_MARK = "\0"
"""In skeletons in place of digits: no name holds it."""

_CLOSE = 0.8
"""How much of two names that are alike but for their numbers has to agree for one to be meant by the other."""

_COMPARED = 4000
"""Kinds of names among which one that was perhaps meant is looked for."""

_SHORT = 18
"""Runs of more digits are shifted as decimals: Python reads no integers of more than a few thousand digits."""


def shifted(digits: str, shift: int) -> str | None:
    """Return the digits of the number plus `shift`, leading zeros kept; None where that is negative.

    >>> shifted("007", 1), shifted("10", -1), shifted("0", -1)
    ('008', '9', None)
    """
    if not shift:
        return digits
    # Decimals have no limit of digits, but are slower.
    if len(digits) <= _SHORT:
        number: int | Decimal = int(digits) + shift
        moved = str(number)
    else:
        exact = Context(prec=len(digits) + len(str(shift)), Emax=MAX_EMAX)
        number = exact.add(Decimal(digits), Decimal(shift))
        moved = f"{number:f}"
    # `w.007` and `w.7` are two names, so the width of a number with leading zeros is part of it.
    return None if number < 0 else moved.zfill(len(digits) if digits.startswith("0") else 1)


class NamePattern:
    """A name with placeholders or a star, in the form in which it is matched and filled in."""

    __slots__ = (
        "_places",
        "_text",
        "ambiguous",
        "constants",
        "mixed",
        "num_runs",
        "numbers",
        "prefix",
        "skeleton",
        "star",
        "takes_all",
        "text",
        "variables",
    )

    def __init__(self, name: Name) -> None:
        runs = _runs_of(name)
        self.text = name.text
        self.num_runs = len(runs)
        # A placeholder becomes a digit before the mark is put in, so that text digits at its side fall into the same
        # run.
        sample = "".join(part if isinstance(part, str) else "0" for part in name.parts)
        self.skeleton = _DIGITS.sub(_MARK, sample)
        self.variables = tuple(dict.fromkeys(part.name for part in name.parts if isinstance(part, Placeholder)))
        self.prefix: str | None = None
        """What names begin with whose rest is the one variable."""
        if isinstance(name.parts[-1], Rest):
            self.prefix = "".join(part for part in name.parts if isinstance(part, str))
            self.variables = (REST,)
            self.skeleton = f"{self.prefix}{REST}"
        self.constants: list[tuple[int, str]] = []
        """Runs of digits that are text: which, and what they are."""
        self.numbers: list[tuple[int, str, int]] = []
        """Runs that are a placeholder: which, its name, its shift."""
        self.star: int | None = None
        self.mixed: list[tuple[int, re.Pattern[str]]] = []
        """Runs with text next to a placeholder or star: the group of the expression has the digits."""
        self.ambiguous = False
        """Whether digits could be split in several ways: only digits stand between two placeholders."""
        for place, run in enumerate(runs):
            # $A, the text 1, $B on 1111: is $A 1 or 11? Both read all of it.
            self.ambiguous |= sum(not isinstance(part, str) for part in run) > 1
            for part in run:
                if isinstance(part, Placeholder):
                    self.numbers.append((place, part.name, part.shift))
                elif isinstance(part, Star):
                    self.star = place
            if len(run) > 1:
                # `w1$L` stands for `w10` but not for `w20`: the constant digit is part of the run.
                expression = "".join(part if isinstance(part, str) else "([0-9]+)" for part in run)
                self.mixed.append((place, re.compile(expression)))
            elif isinstance(run[0], str):
                self.constants.append((place, run[0]))
        # The common case: each run is a variable of its own, and the runs of a name are the answer as they are.
        distinct = len(self.variables) == len(self.numbers) == len(runs)
        self.takes_all = distinct and not any(shift for _, _, shift in self.numbers)
        """Whether the runs of a name are what its variables are."""
        self._text: list[str] = [part if isinstance(part, str) else "" for part in name.parts]
        """The parts, with those that are filled in left empty."""
        self._places: list[tuple[int, int, int]] = []
        """Which part is filled in, with which variable (-1: the star), and the shift."""
        # Filling in is done per instance. Which part is which variable is found once here.
        for place, part in enumerate(name.parts):
            if isinstance(part, Placeholder):
                self._places.append((place, self.variables.index(part.name), part.shift))
            elif isinstance(part, Star | Rest):
                self._places.append((place, -1 if isinstance(part, Star) else 0, 0))

    def fill(self, bindings: Sequence[str], star: str = "") -> str | None:
        """Return the name for the digits of `variables` and of the star; None where a number would be negative."""
        # No format string: names may hold braces and percent signs.
        parts = self._text.copy()
        for place, variable, shift in self._places:
            digits = star if variable < 0 else bindings[variable]
            if shift:
                moved = shifted(digits, shift)
                if moved is None:
                    return None
                digits = moved
            parts[place] = digits
        return "".join(parts)

    def bind(self, name: str) -> tuple[tuple[str, ...], str] | None:
        """Return what `variables` and the star are in a name; None where it does not stand for the name."""
        if self.prefix is None:
            runs = _DIGITS.findall(name)
            return self.read(runs) if len(runs) == self.num_runs else None
        rest = name.removeprefix(self.prefix) if name.startswith(self.prefix) else ""
        # State goes along with its parameter. By itself it is found only where its own names are asked for.
        return ((rest,), "") if rest and (_is_beside(self.prefix) or not _is_beside(name)) else None

    def read(self, runs: Sequence[str]) -> tuple[tuple[str, ...], str] | None:
        """Return what `variables` and the star ("" without one) are in a name with these runs of digits.

        The runs that are constant are taken to agree. None where a placeholder would be two numbers, or a negative one.
        """
        if self.mixed:
            runs = list(runs)
            for place, expression in self.mixed:
                match = expression.fullmatch(runs[place])
                if match is None:
                    return None
                runs[place] = match[1]
        star = "" if self.star is None else runs[self.star]
        if self.takes_all:
            return (runs, star) if type(runs) is tuple else (tuple(runs), star)
        if len(self.numbers) == 1:
            place, _, shift = self.numbers[0]
            digits = runs[place] if not shift else shifted(runs[place], -shift)
            return None if digits is None else ((digits,), star)
        found: dict[str, str] = {}
        for place, variable, shift in self.numbers:
            digits = shifted(runs[place], -shift)
            if digits is None or found.setdefault(variable, digits) != digits:
                return None
        return tuple(found.values()), star

    def star_in(self, name: str) -> str:
        """The digits of the star in a name that this stands for."""
        found = self.read(_DIGITS.findall(name))
        assert found is not None
        return found[1]


def _is_beside(name: str) -> bool:
    return is_state_name(name) or is_beside_name(name)


def _runs_of(name: Name) -> list[list[NamePart]]:
    """The runs of digits of a name: text and placeholders that stand side by side are one run."""
    runs: list[list[NamePart]] = []
    touching = False
    for part in name.parts:
        if isinstance(part, Rest):
            break
        if not isinstance(part, str):
            if touching:
                runs[-1].append(part)
            else:
                runs.append([part])
            touching = True
            continue
        for match in _DIGITS.finditer(part):
            if touching and match.start() == 0:
                runs[-1].append(match[0])
            else:
                runs.append([match[0]])
        touching = part[-1] in "0123456789"
    return runs


class _NamesOfSkeleton:
    """The names of one skeleton, with their runs of digits; on demand also by some of those runs."""

    __slots__ = ("by_runs", "names")

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, ...]] = {}
        self.by_runs: dict[tuple[int, ...], dict[tuple[str, ...], dict[str, tuple[str, ...]]]] = {}

    def add(self, name: str, runs: tuple[str, ...]) -> None:
        self.names[name] = runs
        # Statements add names and remove them while others search. The groups that were asked for are kept up to date,
        # since to build them anew for each statement would be quadratic.
        for places, groups in self.by_runs.items():
            groups.setdefault(tuple([runs[place] for place in places]), {})[name] = runs

    def remove(self, name: str) -> None:
        runs = self.names.pop(name)
        for places, groups in self.by_runs.items():
            del groups[tuple([runs[place] for place in places])][name]

    def having(self, constants: list[tuple[int, str]]) -> dict[str, tuple[str, ...]]:
        if not constants:
            return self.names
        # `layers.0.mlp.experts.$E.w` must not walk through the experts of all layers: names are grouped by the runs
        # that the pattern fixes, at the first question that fixes these.
        places = tuple([place for place, _ in constants])
        groups = self.by_runs.get(places)
        if groups is None:
            groups = self.by_runs[places] = {}
            for name, runs in self.names.items():
                groups.setdefault(tuple([runs[place] for place in places]), {})[name] = runs
        return groups.get(tuple([digits for _, digits in constants]), {})


class NameIndex:
    """Names that come and go, found by pattern. The cost of a search is what it finds, not what there is."""

    __slots__ = ("_buckets",)

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._buckets: dict[str, _NamesOfSkeleton] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Let `name` be found; adding it again changes nothing."""
        skeleton = _DIGITS.sub(_MARK, name)
        bucket = self._buckets.get(skeleton)
        if bucket is None:
            bucket = self._buckets[skeleton] = _NamesOfSkeleton()
        if name not in bucket.names:
            bucket.add(name, tuple(_DIGITS.findall(name)))

    def remove(self, name: str) -> None:
        """Let `name`, which is there, not be found any more."""
        self._buckets[_DIGITS.sub(_MARK, name)].remove(name)

    def nearest(self, pattern: NamePattern) -> str:
        """Say which names are spelled nearly as those that a pattern stands for; empty where none are."""
        # Skeletons, not names: a model has a few hundred of them.
        kinds = sorted([each for each, bucket in self._buckets.items() if bucket.names])
        if len(kinds) > _COMPARED:
            tail = pattern.skeleton.rpartition(".")[2]
            kinds = [each for each in kinds if each.endswith(tail)][:_COMPARED]
        close = get_close_matches(pattern.skeleton, kinds, n=1, cutoff=_CLOSE)
        if not close:
            return ""
        names = self._buckets[close[0]].names
        return f"there is {min(names)}" + (f" (and {len(names) - 1} more like it)" if len(names) > 1 else "")

    def beside(self, pattern: NamePattern, name: str, digits: str) -> str:
        """Return a name that is like `name` up to the star of the pattern, has these digits there, and goes on.

        name: one that the pattern stands for. Empty where there is none.
        """
        star = pattern.star
        assert star is not None, "only a star stands for many numbers"
        runs = _DIGITS.findall(name)
        before = _MARK.join(pattern.skeleton.split(_MARK)[: star + 1]) + _MARK
        for skeleton, bucket in self._buckets.items():
            if skeleton.startswith(before):
                for each, found in bucket.having([(star, digits)]).items():
                    if list(found[:star]) == runs[:star]:
                        return each
        return ""

    def find(self, pattern: NamePattern) -> list[tuple[str, tuple[str, ...], str]]:
        """Return (name, digits of the pattern's variables, digits of its star) of every name that it stands for."""
        if pattern.prefix is not None:
            every = (name for each in self._buckets.values() for name in each.names)
            return [(name, *values) for name in every if (values := pattern.bind(name)) is not None]
        bucket = self._buckets.get(pattern.skeleton)
        if bucket is None:
            return []
        found = []
        read = pattern.read
        for name, runs in bucket.having(pattern.constants).items():
            values = read(runs)
            if values is not None:
                found.append((name, *values))
        return found
