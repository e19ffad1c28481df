"""Text inverse: the inverse of a rewrite as its text says it, where the tensors that it was made for are not known.

Statements are reversed and their sides swapped. Facts that the text lacks (the dtype before a cast, the sizes of parts)
are left open in the swapped statement. They are findings when they are needed.

`spelled_out` writes an exact inverse, which is instances, as statements that do the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from shardwise.rewrite.expansion import Expanded, StatementTask
from shardwise.rewrite.patterns import NamePattern
from shardwise.rewrite.spelling import text_of
from shardwise.rewrite.statements import Name, NamePart, Placeholder, Star, Statement, TextPlace
from shardwise.rewrite.verbs.operation import Operation
from shardwise.rewrite.verbs.permute import Permute


def inverse_of_text(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return the statements that undo others, as far as these say how. Of copies the first counts.

    A drop that may match nothing is taken not to have matched: where it is known that it has, this is not asked.
    """
    made: list[Statement] = []
    spare = _spare_marks(statements)
    for statement, copies in reversed(list(zip(statements, _copies(statements), strict=True))):
        if not statement.right and statement.optional:
            continue
        # Everything that it read comes back from elsewhere, so its results are only dropped.
        if copies and all(copies):
            made.append(_made(statement, statement.right, (), ()))
        elif not _keeps(statement):
            made.extend(_swap(statement, copies, spare))
    return tuple(made)


def textual_losses(statements: Sequence[Statement]) -> tuple[str, ...]:
    """Return what the statements alone tell to be lost: drops, casts that do not hold all values, copies."""
    losses = []
    read: set[tuple[NamePart, ...]] = set()
    for statement, copies in zip(statements, _copies(statements), strict=True):
        shown = f"line {statement.place.line}, `{' '.join(statement.text.split())}`,"
        if not statement.right and not statement.optional:
            losses += [f"{shown} drops {name.text}" for name in statement.left if name.parts not in read]
        losses += [f"{shown} {each.loss}" for each in statement.operations if each.loss]
        for name, copied in zip(statement.left, copies, strict=False):  # none where nothing is read
            if copied:
                losses.append(
                    f"{shown} copies {name.text}, which other statements read or keep: copies may differ later"
                )
            read.add(name.parts)
        read -= {name.parts for name in statement.right}
    return tuple(losses)


def _copies(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """Of each left name of each statement, whether something else has what it reads: an earlier one, or the tensor."""
    # A name that is assigned again is another tensor. Only reads of one version of it are copies.
    version: dict[tuple[NamePart, ...], int] = {}
    kept = set()
    reads = []
    for statement in statements:
        versions = [(name.parts, version.get(name.parts, 0)) for name in statement.left]
        if _keeps(statement):
            kept.update(versions)
        reads.append(versions if statement.right and not _keeps(statement) else [])
        if not _keeps(statement):
            version.update((name.parts, version.get(name.parts, 0) + 1) for name in statement.right)
    seen = set(kept)
    copies = []
    for versions in reads:
        mask = []
        for each in versions:
            mask.append(each in seen)
            seen.add(each)
        copies.append(tuple(mask))
    return copies


def _keeps(statement: Statement) -> bool:
    """Whether this says no more than that a tensor comes out although it is read."""
    same = [name.parts for name in statement.left] == [name.parts for name in statement.right]
    return same and not statement.operations and not any(name.transposed for name in statement.left)


def _spare_marks(statements: Sequence[Statement]) -> tuple[str, str]:
    """What stands before names of what is transposed on the way back, and of copies: no name has it already."""
    texts = [
        part
        for statement in statements
        for name in (*statement.left, *statement.right)
        for part in name.parts
        if isinstance(part, str)
    ]

    def unused(mark: str) -> str:
        while any(f"{mark}." in text for text in texts):
            mark += "_"
        return f"{mark}."

    return unused("transposed"), unused("copy")


def _swap(statement: Statement, copies: Sequence[bool], spare_marks: tuple[str, str]) -> Iterator[Statement]:
    """The statements that undo one; more than one where left names are treated differently."""
    left, others = other_side(statement.right, statement.left)
    right = list(others)
    operations = [each.undone() for each in reversed(statement.operations)]
    transposed = [name.transposed for name in statement.left]
    after: list[Statement] = []
    # `^T` may stand only on the left, so on the way back it is a permute of the result.
    if transposed and all(transposed):
        operations.append(Permute(None))
        transposed = [False] * len(right)
    for place, name in enumerate(right):
        # Only some names were transposed. Those go through a temporary that is transposed in a statement of its own.
        if transposed[place]:
            spare = right[place] = _called(spare_marks[0], name)
            after.append(_made(statement, (Name(spare.parts, True, name.place),), (name,), ()))
        elif any(copies) and copies[place]:
            spare = right[place] = _called(spare_marks[1], name)
            after.append(_made(statement, (spare,), (), ()))
    yield _made(statement, left, tuple(right), tuple(operations))
    yield from after


def _called(prefix: str, name: Name) -> Name:
    """A name with something before it."""
    first, *rest = name.parts
    parts = (prefix + first, *rest) if isinstance(first, str) else (prefix, *name.parts)
    return Name(parts, False, name.place)


def _made(
    statement: Statement, left: tuple[Name, ...], right: tuple[Name, ...], operations: tuple[Operation, ...]
) -> Statement:
    """A statement at the place of the one that it undoes; of its names no more is known than that."""
    gaps = statement.gaps and any(isinstance(part, Star) for name in (*left, *right) for part in name.parts)
    text = text_of(Statement(left, right, operations, statement.optional, statement.place, "", gaps))
    place = TextPlace(statement.place.line, statement.place.column, len(text))
    left, right = (tuple([replace(name, place=place) for name in names]) for names in (left, right))
    return Statement(left, right, operations, statement.optional, place, text, gaps)


def other_side(*sides: Sequence[Name]) -> list[tuple[Name, ...]]:
    """Return names of one statement for the other side.

    AOA's $LAYER_ID_OFFSET, which is another number on each side, becomes $LAYER_ID where that is free.
    """
    used = {part.name for names in sides for name in names for part in name.parts if isinstance(part, Placeholder)}
    old = "LAYER_ID_OFFSET"
    # The shift is a part of the placeholder by now. Under the old name it would be shifted once more when it is read.
    new = old if "LAYER_ID" in used else "LAYER_ID"

    def turned(name: Name) -> Name:
        parts = [
            Placeholder(new, each.shift) if isinstance(each, Placeholder) and each.name == old else each
            for each in name.parts
        ]
        return Name(tuple(parts), False, name.place)

    return [tuple(map(turned, names)) for names in sides]


def spelled_out(tasks: Sequence[StatementTask], *, patterns: bool) -> tuple[Statement, ...]:
    """Return statements that do what tasks do. `patterns`: with placeholders, where that seems to be the same.

    Whether it is the same depends on what other tensors there are: it has to be tried.
    """
    made: list[Statement] = []
    for task in tasks:
        # 32 layers are one line again, as in the text that the user wrote.
        sides = _pattern(task) if patterns else None
        for left, right, operations in _plain(task) if sides is None else [sides]:
            line = len(made) + 1
            optional = task.statement.optional
            text = text_of(Statement(left, right, operations, optional, TextPlace(line, 1, 1), ""))
            made.append(Statement(left, right, operations, optional, TextPlace(line, 1, len(text)), text))
    return tuple(made)


_SpelledSides: TypeAlias = tuple[tuple[Name, ...], tuple[Name, ...], tuple[Operation, ...]]


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
        # A name that an earlier statement made up may have other runs than the pattern.
        found = pattern.bind(name)
        if found is None:
            return False
        bindings.update(zip(pattern.variables, found[0], strict=True))
    for pattern, name in zip((*left, *right), (*instance.left, *instance.right), strict=True):
        if pattern.fill([bindings[variable] for variable in pattern.variables]) != name:
            return False
    return True


def _plain(task: StatementTask) -> Iterator[_SpelledSides]:
    """The instances of a task as statements in an order in which none overwrites what another is yet to read."""
    # Figure 1. Instances act at once, statements one after the other. So readers go before the writer of their name:
    #
    #     at once    w_0 -> w_1, w_1 -> w_2          in order    w_1 -> w_2; w_0 -> w_1
    #     a circle   a -> b, b -> a                  in order    a -> new b; b -> new a; new b -> b; new a -> a
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
    # What waits for itself needs temporaries.
    circle = [each for number, each in enumerate(waiting) if number not in done]
    spare = {name: f"new {name}" for _, each in circle for name in each.right}
    for operations, each in circle:
        yield _sides(operations, Expanded(each.left, tuple([spare[name] for name in each.right])))
    for name, new in spare.items():
        yield _sides((), Expanded((new,), (name,)))


def _sides(operations: tuple[Operation, ...], each: Expanded) -> _SpelledSides:
    nowhere = TextPlace(1, 1, 1)
    left, right = (tuple([Name((name,), False, nowhere) for name in names]) for names in (each.left, each.right))
    return left, right, operations
