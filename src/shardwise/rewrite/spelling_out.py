"""Spelling out: tasks as statements that do the same, one after the other, and can be written as text.

Where all instances of a statement are undone alike, one statement with its placeholders says so; else each instance is
a statement of its own.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from shardwise.rewrite.applied_statements import StatementTask
from shardwise.rewrite.expansion import Expanded
from shardwise.rewrite.patterns import NamePattern
from shardwise.rewrite.statement_text import text_of
from shardwise.rewrite.statements import Name, Statement, StatementOperation, TextPlace
from shardwise.rewrite.text_inverse import other_side

__all__ = ["spelled_out"]

_DIGITS = re.compile("[0-9]+")


def spelled_out(tasks: Sequence[StatementTask], *, patterns: bool) -> tuple[Statement, ...]:
    """Return statements that do what tasks do. `patterns`: with placeholders, where that seems to be the same.

    Whether it is the same depends on what other tensors there are: it has to be tried.
    """
    made: list[Statement] = []
    for task in tasks:
        sides = _pattern(task) if patterns else None
        for left, right, operations in _plain(task) if sides is None else [sides]:
            line = len(made) + 1
            optional = task.statement.optional
            text = text_of(Statement(left, right, operations, optional, TextPlace(line, 1, 1), ""))
            made.append(Statement(left, right, operations, optional, TextPlace(line, 1, len(text)), text))
    return tuple(made)


_SpelledSides: TypeAlias = tuple[tuple[Name, ...], tuple[Name, ...], tuple[StatementOperation, ...]]


def _pattern(task: StatementTask) -> _SpelledSides | None:
    """The statement with placeholders that a task is, where it is one."""
    group = task.groups[0]
    instances = group.instances or ()
    if len(task.groups) > 1 or len(instances) < 2:
        return None
    left, right = other_side(task.statement.left, task.statement.right)
    if not instances[0].right:
        right = ()
    sources, results = ([NamePattern(name) for name in names] for names in (left, right))
    variables = {variable for pattern in sources for variable in pattern.variables}
    for pattern in (*sources, *results):
        if pattern.star is not None or pattern.ambiguous or not variables.issuperset(pattern.variables):
            return None
    return (left, right, group.operations) if all(_matches(sources, results, each) for each in instances) else None


def _matches(left: Sequence[NamePattern], right: Sequence[NamePattern], instance: Expanded) -> bool:
    """Whether an instance is one of the statement with these names."""
    if len(left) != len(instance.left) or len(right) != len(instance.right):
        return False
    bindings: dict[str, str] = {}
    for pattern, name in zip(left, instance.left, strict=True):
        runs = _DIGITS.findall(name)
        if len(runs) != pattern.num_runs:
            return False
        found = pattern.read(runs)
        if found is None:
            return False
        bindings.update(zip(pattern.variables, found[0], strict=True))
    for pattern, name in zip((*left, *right), (*instance.left, *instance.right), strict=True):
        if pattern.fill([bindings[variable] for variable in pattern.variables]) != name:
            return False
    return True


def _plain(task: StatementTask) -> Iterator[_SpelledSides]:
    """The instances of a task as statements in an order in which none overwrites what another is yet to read."""
    waiting = [(group.operations, each) for group in task.groups for each in group.instances or ()]
    readers: dict[str, list[int]] = {}
    for number, (_, each) in enumerate(waiting):
        for name in each.left:
            readers.setdefault(name, []).append(number)
    needs = [
        {other for name in each.right for other in readers.get(name, ())} - {at} for at, (_, each) in enumerate(waiting)
    ]
    frees: dict[int, list[int]] = {}
    for number, others in enumerate(needs):
        for other in others:
            frees.setdefault(other, []).append(number)
    ready = [number for number, others in enumerate(needs) if not others]
    for number in ready:  # which grows on the way
        yield _sides(*waiting[number])
        for freed in frees.get(number, ()):
            needs[freed].discard(number)
            if not needs[freed]:
                ready.append(freed)
    done = set(ready)
    circle = [each for number, each in enumerate(waiting) if number not in done]
    spare = {name: f"new {name}" for _, each in circle for name in each.right}
    for operations, each in circle:
        yield _sides(operations, Expanded(each.left, tuple([spare[name] for name in each.right])))
    for name, new in spare.items():
        yield _sides((), Expanded((new,), (name,)))


def _sides(operations: tuple[StatementOperation, ...], each: Expanded) -> _SpelledSides:
    nowhere = TextPlace(1, 1, 1)
    left, right = (tuple([Name((name,), False, nowhere) for name in names]) for names in (each.left, each.right))
    return left, right, operations
