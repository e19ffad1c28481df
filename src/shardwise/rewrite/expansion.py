"""Expansion: the instances of a statement for the names that there are, and the record of those carried out.

A placeholder stands for the same digits in all left names. The matches of the left names are joined on common
placeholders, and a match without partners is a finding. So ragged combinations (experts that only some layers have) are
taken as they are. What only right names have (a placeholder, a star) is taken from the target's names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shardwise.rewrite.compiled_ops import CompiledOps
from shardwise.rewrite.environment import Environment, Variable
from shardwise.rewrite.patterns import NameIndex, NamePattern
from shardwise.rewrite.statements import REST, SHOWN, Name, Statement, StatementFinding
from shardwise.rewrite.verbs.operation import Operation
from shardwise.rewrite.verbs.permute import inverted
from shardwise.rewrite.verbs.stack import Stack


class Expanded(NamedTuple):
    """One instance of a statement: the names on both sides."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    transposed: tuple[bool, ...] | None = None
    """Of each left name, whether all its dims are reversed first; None: of none."""

    def __str__(self) -> str:
        return f"{', '.join(self.left) or '_'} -> {', '.join(self.right) or '_'}"


_Combination = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""Digits of the placeholders that are bound; then, for each side name that is done, what it stands for."""

_Matches = list[tuple[tuple[str, ...], tuple[str, ...]]]
"""Digits of the placeholders that a name binds, and the names that it stands for then."""

_NamesByDigits = dict[tuple[str, ...], tuple[str, ...]]
"""Digits of a pattern's variables -> the names it stands for, several for a star."""


def expand(
    statement: Statement, names: Environment, wanted: NameIndex | None, notes: list[str] | None = None
) -> tuple[list[Expanded], list[StatementFinding]]:
    """Return the instances of a statement, in the order of the names, and what is wrong.

    `wanted` are the target's names, None where no target is known. To `notes` is added what may be wrong.
    """
    # A statement without patterns is its own instance. An inverse that is spelled out has nothing else.
    if all(name.plain is not None for name in (*statement.left, *statement.right)):
        return _expand_plain(statement, names)
    expansion = _Expansion(statement, names, wanted, [] if notes is None else notes)
    return expansion.instances(), expansion.findings


def _expand_plain(statement: Statement, names: Environment) -> tuple[list[Expanded], list[StatementFinding]]:
    left = tuple([name.text for name in statement.left])
    right = tuple([name.text for name in statement.right])
    absent = [name for name in statement.left if not names.exists(name.text)]
    if not absent:
        transposed = tuple([name.transposed for name in statement.left])
        return [Expanded(left, right, transposed if any(transposed) else None)], []
    # `optional=1` says that all may be absent. A statement that is there in part is wrong all the same.
    if statement.optional and len(absent) == len(left):
        return [], []
    return [], [StatementFinding.of(statement, names.absence(name.text), at=name.place) for name in absent]


class _Expansion:
    """The expansion of one statement with patterns."""

    def __init__(self, statement: Statement, names: Environment, wanted: NameIndex | None, notes: list[str]) -> None:
        self.statement = statement
        self.names = names
        self.notes = notes
        self.wanted = wanted
        self.findings: list[StatementFinding] = []
        self.left = [NamePattern(name) for name in statement.left]
        self.right = [NamePattern(name) for name in statement.right]
        self.bound: tuple[str, ...] = ()

    def instances(self) -> list[Expanded]:
        for name, pattern in zip((*self.statement.left, *self.statement.right), (*self.left, *self.right), strict=True):
            # Before anything is matched: a pattern that can be read in two ways would silently take one of them.
            if pattern.ambiguous:
                self._find(
                    name, f"nothing but digits stands between two placeholders of {pattern.text}: put text there"
                )
        rows = [] if self.findings else self._left_rows()
        if not rows:
            return []
        lefts = [self._joined(groups) for _, groups in rows]
        columns: list[list[tuple[str, ...]]] = []
        for name, pattern in zip(self.statement.right, self.right, strict=True):
            if pattern.star is None and all(variable in self.bound for variable in pattern.variables):
                columns.append(self._filled(name, pattern, rows))
                continue
            # The target's names may turn one row into several (a star on the right) or into none. The columns that are
            # done have to follow.
            rows, origins = self._from_target(name, pattern, rows)
            # r0 becomes two rows, r1 none, r2 one:    origins 0, 0, 2    lefts l0, l0, l2
            lefts = [lefts[origin] for origin in origins]
            columns = [[column[origin] for origin in origins] for column in columns]
            columns.append([groups[-1] for _, groups in rows])
        if self.findings:
            return []
        if len(columns) == 1:
            return [Expanded(left, right, mask) for (left, mask), right in zip(lefts, columns[0], strict=True)]
        rights = zip(*columns, strict=True) if columns else [()] * len(lefts)
        return [
            Expanded(left, tuple([name for group in groups for name in group]), mask)
            for (left, mask), groups in zip(lefts, rights, strict=True)
        ]

    def _joined(self, groups: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], tuple[bool, ...] | None]:
        """All left names of a row, and of each whether it is transposed."""
        names = groups[0] if len(groups) == 1 else tuple([name for group in groups for name in group])
        mask = [name.transposed for name, group in zip(self.statement.left, groups, strict=True) for _ in group]
        return names, tuple(mask) if any(mask) else None

    def _find(self, name: Name, message: str, *chain: str) -> None:
        self.findings.append(StatementFinding.of(self.statement, message, at=name.place, expansion=chain))

    def _find_all(self, name: Name, messages: Sequence[str]) -> None:
        """One finding for what may be as many as there are combinations."""
        more = f" (and {len(messages) - SHOWN} more like it)" if len(messages) > SHOWN else ""
        if messages:
            self._find(name, "; ".join(messages[:SHOWN]) + more)

    def _left_rows(self) -> list[_Combination]:
        """The combinations of digits that all left names have, each with the names."""
        if not self.left:
            return [((), ())]
        # Figure 1. `$L.$E.w, $L.router -> ...` for layers of 2 and 1 experts: a join on what is shared.
        #
        #     $L.$E.w      (0, 0) (0, 1) (1, 0)          rows   L=0 E=0:  0.0.w, 0.router
        #     $L.router    (0) (1)                              L=0 E=1:  0.1.w, 0.router
        #                                                       L=1 E=0:  1.0.w, 1.router
        #
        # The product of all L and all E would have a fourth row, for an expert that is not there.
        groups = [self._groups(name, pattern) for name, pattern in zip(self.statement.left, self.left, strict=True)]
        empty = [
            (name, pattern)
            for name, pattern, found in zip(self.statement.left, self.left, groups, strict=True)
            if not found
        ]
        if empty:
            # Again: a part that is there needs the rest.
            if not self.statement.optional or len(empty) < len(groups):
                self._find_empty(empty)
            else:
                self._note_near(empty)
            return []
        # The name with the most placeholders first: it binds them, and others are looked up by what they share with it.
        order = sorted(range(len(self.left)), key=lambda place: -len(self.left[place].variables))
        first = self.left[order[0]]
        self.bound = first.variables
        rows: list[_Combination] = [(bindings, (found,)) for bindings, found in groups[order[0]].items()]
        for place in order[1:]:
            rows = self._join(rows, self.statement.left[place], self.left[place], groups[place], first)
        if order != sorted(order):
            # Names were joined in the order of their placeholders. Operations want them in the order in which they are
            # written.
            rows = [(bindings, tuple([found[place] for place in inverted(order)])) for bindings, found in rows]
        return rows

    def _find_empty(self, empty: Iterable[tuple[Name, NamePattern]]) -> None:
        for name, pattern in empty:
            if name.plain is not None:
                self._find(name, self.names.absence(name.plain))
            else:
                near = self.names.nearest(pattern) or (
                    "" if self.statement.optional else "write optional=1 if that may be"
                )
                self._find(name, f"no tensor has a name like {pattern.text}" + (f"; {near}" if near else ""))

    def _note_near(self, empty: Iterable[tuple[Name, NamePattern]]) -> None:
        """Note that a statement that may match nothing does so, and yet there are names like those that it asks for."""
        for name, pattern in empty:
            if name.plain is None and (near := self.names.nearest(pattern)):
                line = self.statement.place.line
                self.notes.append(f"line {line}: {pattern.text} stands for nothing, which optional=1 allows; {near}")

    def _groups(self, name: Name, pattern: NamePattern) -> _NamesByDigits:
        """What a left name stands for."""
        # A name without placeholders is the partner of every row.
        if name.plain is not None:
            return {(): (name.plain,)} if self.names.exists(name.plain) else {}
        groups = self._grouped(name, pattern, self.names.find(pattern))
        if pattern.star is not None and groups:
            self._look_at_star(name, pattern, groups)
        return groups

    def _look_at_star(self, name: Name, pattern: NamePattern, groups: _NamesByDigits) -> None:
        """Note how many names a star stands for; what its numbers lack is a finding where it stacks."""
        gaps = [gap for bindings, found in sorted(groups.items()) if (gap := self._gap_in(pattern, bindings, found))]
        stacks = any(isinstance(each, Stack) for each in self.statement.operations)
        # A stack numbers its experts anew. With expert 3 missing, expert 4 would become number 3, and no shape would
        # show it.
        if stacks and not self.statement.gaps:
            self._find_all(name, [f"{gap}; write gaps=1 if numbers may be missing" for gap in gaps])
        line = self.statement.place.line
        self.notes.append(
            f"line {line}: {_counts_in_words(pattern, groups)}" + "".join(f"; {gap}" for gap in gaps[:SHOWN])
        )

    def _gap_in(self, pattern: NamePattern, bindings: Sequence[str], names: Sequence[str]) -> str:
        """Say which name is lacking among those for which a star stands, or behind the last; empty where none is."""
        if gap := _gap_of(pattern, bindings, names):
            return gap
        # Behind the last it shows only where something else of that number is there.
        beside = self.names.beside(pattern, names[-1], len(names))
        return f"{pattern.fill(bindings, str(len(names)))} is not there, and {beside} is" if beside else ""

    def _grouped(
        self, name: Name, pattern: NamePattern, found: list[tuple[str, tuple[str, ...], str]]
    ) -> _NamesByDigits:
        """Matches by the digits of the placeholders; those of a star in numeric order."""
        if pattern.star is None:
            return {bindings: (match,) for match, bindings, _ in found}
        many: dict[tuple[str, ...], list[tuple[int, str, str]]] = {}
        for match, bindings, star in found:
            digits = star.lstrip("0")  # with its length it orders as the number does, which may be too long for an int
            many.setdefault(bindings, []).append((len(digits), digits, match))
        groups: _NamesByDigits = {}
        for bindings, numbered in many.items():
            numbered.sort()
            groups[bindings] = tuple([match for *_, match in numbered])
            for (_, digits, match), (_, after, other) in pairwise(numbered):
                if digits == after:
                    number = digits or "0"
                    self._find(name, f"the star of {pattern.text} stands for {number} in both {match} and {other}")
        return groups

    def _join(
        self, rows: list[_Combination], name: Name, pattern: NamePattern, groups: _NamesByDigits, first: NamePattern
    ) -> list[_Combination]:
        """Rows with what one more left name stands for; what has no partner is a finding."""
        fresh = [place for place, variable in enumerate(pattern.variables) if variable not in self.bound]
        partners, key_of = self._partners(pattern, groups, fresh)
        joined: list[_Combination] = []
        lonely = []
        used = set()
        for bindings, done in rows:
            key = key_of(bindings)
            matches = partners.get(key)
            if matches is None:
                known = dict(zip(self.bound, bindings, strict=True))
                # Dropping the row instead would leave a q without its k out of the fused tensor, and nobody would know.
                lonely.append(f"{_shown(pattern, known)} is not there, and {done[0][0]} needs it")
                # It stays among the rows for the names that follow: each of them is asked for too.
                joined += [] if fresh else [(bindings, (*done, ()))]
                continue
            used.add(key)
            joined.extend([((*bindings, *extra), (*done, found)) for extra, found in matches])
        # The other direction: something is there that no row asks for.
        for key, matches in partners.items():
            if key not in used:
                known = dict(
                    zip([variable for variable in pattern.variables if variable in self.bound], key, strict=True)
                )
                lonely.append(f"{_shown(first, known)} is not there, and {matches[0][1][0]} needs it")
        self._find_all(name, lonely)
        self.bound = (*self.bound, *[pattern.variables[place] for place in fresh])
        return joined

    def _partners(
        self, pattern: NamePattern, groups: _NamesByDigits, fresh: list[int]
    ) -> tuple[
        dict[tuple[str, ...], list[tuple[tuple[str, ...], tuple[str, ...]]]],
        Callable[[tuple[str, ...]], tuple[str, ...]],
    ]:
        """What a name stands for, by the digits that it shares with the rows; and how a row's are had."""
        shared = [place for place in range(len(pattern.variables)) if place not in fresh]
        partners: dict[tuple[str, ...], list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
        for bindings, found in groups.items():
            key = tuple([bindings[place] for place in shared]) if fresh else bindings
            partners.setdefault(key, []).append((tuple([bindings[place] for place in fresh]), found))
        # Most names share all placeholders in the same order. Then a row's digits are the key as they are.
        places = [self.bound.index(pattern.variables[place]) for place in shared]
        if places == list(range(len(self.bound))):
            return partners, lambda bindings: bindings
        return partners, lambda bindings: tuple([bindings[place] for place in places])

    def _filled(self, name: Name, pattern: NamePattern, rows: list[_Combination]) -> list[tuple[str, ...]]:
        """What a right name stands for in each row, where the left names say it all."""
        if name.plain is not None:
            return [(name.plain,)] * len(rows)
        # As above: mostly the digits of a row are what the pattern wants.
        places = [self.bound.index(variable) for variable in pattern.variables]
        same = places == list(range(len(self.bound)))
        column: list[tuple[str, ...]] = []
        negative = []
        for bindings, found in rows:
            filled = pattern.fill(bindings if same else [bindings[place] for place in places])
            if filled is None:
                negative.append(f"{pattern.text} would hold a negative number for {found[0][0] if found else name}")
                filled = ""
            column.append((filled,))
        self._find_all(name, negative)
        return column

    def _from_target(
        self, name: Name, pattern: NamePattern, rows: list[_Combination]
    ) -> tuple[list[_Combination], list[int]]:
        """Rows with what a right name stands for in the target; and which row each comes of."""
        unbound = [_written(variable) for variable in pattern.variables if variable not in self.bound]
        what = " and ".join([*unbound, *(["*"] if pattern.star is not None else [])])
        if self.wanted is None and not any(self._counted(pattern, bindings, done) for bindings, done in rows):
            self._find(name, f"{what} has no value on the left, and no target is known whose names give it one")
            return [], []
        groups = {} if self.wanted is None else self._grouped(name, pattern, self.wanted.find(pattern))
        fresh = [place for place, variable in enumerate(pattern.variables) if variable not in self.bound]
        partners, key_of = self._partners(pattern, groups, fresh)
        joined: list[_Combination] = []
        origins = []
        lonely: list[str] = []
        for origin, (bindings, done) in enumerate(rows):
            # The target knows best. A star that parts a tensor of known shape can be counted where no target is given.
            matches = partners.get(key_of(bindings), []) or self._counted(pattern, bindings, done)
            if matches and (lacking := self._uncounted(pattern, bindings, done, matches)):
                lonely.append(lacking)
            if not matches and not (self.statement.optional and not self.statement.left):
                near = self.wanted.nearest(pattern) if self.wanted is not None and not (groups or lonely) else ""
                like = _shown(pattern, dict(zip(self.bound, bindings, strict=True)))
                lonely.append(f"the target has no name like {like}" + (f"; {near}" if near else ""))
            joined.extend([((*bindings, *extra), (*done, found)) for extra, found in matches])
            origins.extend([origin] * len(matches))
        self._find_all(name, lonely)
        self.bound = (*self.bound, *[pattern.variables[place] for place in fresh])
        return joined, origins

    def _uncounted(
        self, pattern: NamePattern, bindings: Sequence[str], done: Sequence[tuple[str, ...]], matches: _Matches
    ) -> str:
        """Say which numbers the target lacks where a star parts a tensor into more than it has names; empty if none."""
        if pattern.star is None or self.statement.gaps or not self.statement.left:
            return ""
        found = matches[0][1]
        count = self.names.count(done[0][0], self.statement)
        digits = [bindings[self.bound.index(each)] for each in pattern.variables if each in self.bound]
        if count in (None, len(found)) or len(digits) < len(pattern.variables):
            return ""
        many = f"{done[0][0]} is split into {count}, and the target has {len(found)} names like {pattern.text}"
        gap = _gap_of(pattern, digits, found)
        return f"{many}: {gap}" if gap else f"{many}, the last one {found[-1]}"

    def _counted(self, pattern: NamePattern, bindings: Sequence[str], done: Sequence[tuple[str, ...]]) -> _Matches:
        """What the star of a right name stands for in a row where no target says it: the indices of a dim that goes."""
        # With `gaps=1` the numbers need not be 0, 1, 2, so counting would invent names.
        if pattern.star is None or self.statement.gaps or not self.statement.left:
            return []
        if not all(variable in self.bound for variable in pattern.variables):
            return []
        digits = [bindings[self.bound.index(variable)] for variable in pattern.variables]
        names = [pattern.fill(digits, str(at)) for at in range(self.names.count(done[0][0], self.statement) or 0)]
        return [((), tuple([each for each in names if each is not None]))] if names else []


def _shown(pattern: NamePattern, known: dict[str, str]) -> str:
    """A pattern with the digits that are known filled in."""
    bindings = [known.get(variable) for variable in pattern.variables]
    if pattern.star is None and None not in bindings:
        return pattern.fill([digits for digits in bindings if digits is not None]) or pattern.text
    text = pattern.text
    for variable, digits in known.items():
        text = text.replace(_written(variable), digits)
    return text


def _written(variable: str) -> str:
    return variable if variable == REST else f"${variable}"


def _gap_of(pattern: NamePattern, bindings: Sequence[str], names: Sequence[str]) -> str:
    """Say which names are lacking among those for which a star stands. Empty where their numbers are 0, 1, 2 and so on.

    names: in the order of their numbers, which differ. Names that are lacking behind the last cannot be seen.
    """
    # Numbers that differ, of which the largest is n - 1, are 0 to n - 1.
    last = _number(pattern, names[-1])
    if last == str(len(names) - 1):
        return ""
    numbers = {_number(pattern, name) for name in names}
    if len(numbers) < len(names):  # which is a finding of its own
        return ""
    # Of numbers far from each other only the first that are lacking are looked for.
    stop = int(last) if len(last) < len(str(len(names))) + 2 else len(names) + _SHOWN_NUMBERS
    lacking = [number for number in range(min(stop, len(names) + _SHOWN_NUMBERS)) if str(number) not in numbers]
    return f"{_lacking(pattern, bindings, lacking)} not there, and {names[-1]} is"


_SHOWN_NUMBERS = 8
"""Of those that are lacking."""


def _lacking(pattern: NamePattern, bindings: Sequence[str], numbers: Sequence[int]) -> str:
    """The name with the first of numbers, and the other numbers; with its verb."""
    first, *others = numbers
    name = pattern.fill(bindings, str(first))
    if not others:
        return f"{name} is"
    more = ", ".join(map(str, others[: _SHOWN_NUMBERS - 1]))
    return f"{name} and those with {more}{' ...' if len(others) >= _SHOWN_NUMBERS else ''} in its place are"


def _counts_in_words(pattern: NamePattern, groups: Mapping[tuple[str, ...], Sequence[str]]) -> str:
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


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances to which the same operations apply."""

    operations: tuple[Operation, ...]
    instances: tuple[Expanded, ...] | None = None
    """None: what the statement is expanded to."""


@dataclass(frozen=True, slots=True)
class StatementTask:
    """Instances that are carried out at once: those of one statement, or of what undoes one."""

    statement: Statement
    """What findings show."""
    groups: tuple[InstanceGroup, ...]

    @classmethod
    def of(cls, statement: Statement) -> "StatementTask":
        """Return the task that a statement is."""
        return cls(statement, (InstanceGroup(statement.operations),))


class AppliedInstance:
    """An instance that was carried out."""

    __slots__ = ("along", "left", "ops", "right")

    def __init__(
        self, left: tuple[Variable, ...], right: tuple[Variable, ...], ops: CompiledOps | None, along: bool
    ) -> None:
        self.left = left
        self.right = right
        self.ops = ops
        """None: nothing but names changed; or one value without dims stands for all."""
        self.along = along
        """Whether this is optimizer state that went along with its parameter."""
