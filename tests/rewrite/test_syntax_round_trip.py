"""Statements that are written and read again are the same; no text whatever breaks the parser."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.errors import RewriteError
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite.spelling import text_of
from shardwise.rewrite.statement_arguments import WORDS
from shardwise.rewrite.statements import (
    Cast,
    Concat,
    Crop,
    Dequantise,
    Ffn,
    Name,
    NamePart,
    Pad,
    Permute,
    Placeholder,
    Qkv,
    QkvPerRank,
    Quantise,
    Reshape,
    SplitStatement,
    Stack,
    Star,
    Statement,
    StatementOperation,
    TextPlace,
    Unstack,
)
from shardwise.rewrite.syntax import needed_parameters, parse
from tests.properties import tried

proven = tried(80)
NOWHERE = TextPlace(1, 1, 1)

dims = st.integers(-3, 3)
counts = st.integers(1, 9)
dtypes = st.sampled_from(sorted(ITEMSIZE_BYTES))
texts = (
    st.text(st.sampled_from("ab.0_-+/$*\"'\\\n\r\t TA1^[]:#;,=>{}"), min_size=1, max_size=6)
    | st.text(min_size=1, max_size=4)
    | st.sampled_from(sorted(WORDS))
)
numbers = st.builds(
    Placeholder, st.sampled_from(["L", "LAYER_ID", "LAYER_ID_OFFSET", "E_1"]), st.sampled_from([0, 0, 0, -1, 1, -12])
)


@st.composite
def names(draw: st.DrawFn, *, star: bool = False, right: bool = False) -> Name:
    """Texts, with a symbol between each two; now and then a symbol at an end."""
    symbols: list[NamePart] = draw(st.lists(numbers, max_size=3))
    if star:
        symbols.insert(draw(st.integers(0, len(symbols))), Star())
    parts: list[NamePart] = []
    for symbol in symbols:
        parts += [draw(texts), symbol]
    if not parts or draw(st.booleans()):
        parts.append(draw(texts))
    if len(parts) > 1 and draw(st.booleans()):
        parts = parts[1:]
    return Name(tuple(parts), not right and draw(st.booleans()), NOWHERE)


def sizes(count: int | None) -> st.SearchStrategy[tuple[int, ...]]:
    low, high = (1, 3) if count is None else (count, count)
    return st.lists(st.integers(0, 9), min_size=low, max_size=high).map(tuple)


@st.composite
def joints(draw: st.DrawFn) -> tuple[StatementOperation | None, int | None, int | None]:
    """What joins or parts, and how many names stand on the left and on the right; None: one with a star."""
    axis, some_axis = draw(dims), draw(st.none() | dims)
    groups = draw(counts)
    heads = groups * draw(counts)
    degrees = draw(st.tuples(st.none() | counts, st.none() | counts))
    many = draw(st.sampled_from([None, 2, 3]))
    join = draw(st.sampled_from(["none", "concat", "split", "stack", "unstack", "qkv", "rank", "ffn", "scales"]))
    match join:
        case "concat":
            return Concat(axis, draw(st.none() | sizes(many))), many, 1
        case "split":
            recorded = draw(st.booleans())
            return SplitStatement(axis, None if recorded else draw(st.none() | sizes(many)), recorded), 1, many
        case "stack":
            return Stack(axis), many, 1
        case "unstack":
            return Unstack(axis), 1, many
        case "scales":
            block = draw(st.lists(st.sampled_from([-1, 1, 128]), max_size=3).map(tuple))
            if draw(st.booleans()):
                return Dequantise(block), 2, 1
            return Quantise(block, draw(st.none() | dtypes), draw(st.none() | dtypes)), 1, 2
        case "qkv":
            joins = draw(st.booleans())
            return Qkv(heads, groups, some_axis, joins), 3 if joins else 1, 1 if joins else 3
        case "rank" | "ffn":
            full = 3 if join == "rank" else 2
            left, right = draw(st.sampled_from([(1, 1), (full, 1), (1, full)]))
            source = degrees[0] if left == 1 else None
            target = degrees[1] if right == 1 else None
            if join == "ffn":
                return Ffn(some_axis, left, right, source, target), left, right
            return QkvPerRank(heads, groups, some_axis, left, right, source, target), left, right
        case _:
            return None, 1, 1


steps = st.lists(
    st.none().map(Permute)
    | st.integers(1, 4).flatmap(lambda rank: st.permutations(range(rank))).map(lambda dims: Permute(tuple(dims)))
    | st.builds(Reshape, st.none() | sizes(None) | st.just((2, -1)) | st.just(()))
    | st.builds(Cast, st.none() | dtypes, st.none() | dtypes),
    max_size=4,
)


def apart(operations: list[StatementOperation]) -> list[StatementOperation]:
    """Without those that are like the one before, which nobody can write."""
    kept: list[StatementOperation] = []
    for each in operations:
        chained = any(isinstance(cast, Cast) and cast.source is not None for cast in (each, *kept[-1:]))
        if not kept or type(kept[-1]) is not type(each) or chained:
            kept.append(each)
    return kept


@st.composite
def statements(draw: st.DrawFn) -> Statement:
    optional = draw(st.booleans())
    one_sided = draw(st.sampled_from([None, None, None, "drop", "add"]))
    if one_sided == "drop":
        return Statement((draw(names()),), (), (), optional, NOWHERE, "")
    if one_sided == "add":
        return Statement((), (draw(names(right=True)),), (), optional, NOWHERE, "")
    joint, left, right = draw(joints())
    operations: list[StatementOperation] = list(draw(steps))
    if joint is not None:
        operations.insert(draw(st.integers(0, len(operations))), joint)
    fill = draw(st.none() | st.sampled_from(["0", "7", "-3", "0.5", "inf", "-inf", "nan", "1e-05"]))
    resized = st.none() | st.lists(st.integers(-1, 9), max_size=3).map(tuple)
    for kind in draw(st.lists(st.sampled_from(["pad", "crop"]), unique=True)):
        resize = Crop(draw(resized), fill) if kind == "crop" else Pad(draw(resized), fill or "0")
        operations.insert(draw(st.integers(0, len(operations))), resize)
    sources = [draw(names(star=left is None)) for _ in range(left or 1)]
    targets = [draw(names(star=right is None, right=True)) for _ in range(right or 1)]
    return Statement(tuple(sources), tuple(targets), tuple(apart(operations)), optional, NOWHERE, "")


def without_places(statement: Statement) -> Statement:
    left, right = (tuple(replace(name, place=NOWHERE) for name in side) for side in (statement.left, statement.right))
    return replace(statement, left=left, right=right, place=NOWHERE, text="")


@proven
@given(st.lists(statements(), max_size=3), st.sampled_from(["\n", ";", "\r\n", " ", ",\n"]))
def test_statements_that_are_written_are_read_as_they_were(given_statements: list[Statement], between: str) -> None:
    text = between.join(text_of(each) for each in given_statements)
    again = parse(text, {})
    assert [without_places(each) for each in again] == given_statements
    assert [each.text for each in again] == [text_of(each) for each in again]


@proven
@given(st.lists(statements(), min_size=1, max_size=3))
def test_names_stand_where_their_places_say(given_statements: list[Statement]) -> None:
    text = "\n".join(text_of(each) for each in given_statements)
    lines = text.split("\n")

    def at(place: TextPlace) -> str:
        rest = "\n".join(lines[place.line - 1 :])  # a name may hold a newline itself
        return rest[place.column - 1 :][: place.width]

    for statement in parse(text, {}):
        for name in statement.left:
            assert parse(f"{at(name.place)} -> _", {})[0].left == (
                replace(name, place=TextPlace(1, 1, name.place.width)),
            )
        for name in statement.right:
            assert parse(f"_ -> {at(name.place)}", {})[0].right == (
                replace(name, place=TextPlace(1, 6, name.place.width)),
            )


VOCABULARY = r"""
    a b.w -> -> -> , , , ; axis = =0 ='[1,0]' permute fused_ffn ' " $L * ^T [0:2] _ {x} sizes dtype =float16 \ # - <-
    3 num_heads fused_qkv stack optional =1 src_dtype =recorded
"""
words = st.sampled_from([*VOCABULARY.split(), "\n", " ", " ", "\u00e9"])


@tried(200)
@given(st.lists(words, max_size=14).map("".join) | st.text(max_size=30))
@example("a -> b, axis=0 -> ")
@example(",")
@example("a,\n->")
def test_any_text_is_read_or_is_a_finding(text: str) -> None:
    needed_parameters(text)
    try:
        statements = parse(text, {"x": 1})
    except RewriteError as error:
        problems = error.problems
    else:
        again = parse("\n".join(map(text_of, statements)), {})
        assert list(map(without_places, again)) == list(map(without_places, statements))
        return
    assert all(problem.startswith("line ") and "\n    " in problem for problem in problems)
