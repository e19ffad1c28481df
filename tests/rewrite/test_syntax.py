"""Every form of a statement is read as what it means, however it is laid out."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwise.rewrite.spelling import text_of
from shardwise.rewrite.statements import (
    Cast,
    Concat,
    Ffn,
    Name,
    NamePart,
    Permute,
    Placeholder,
    Qkv,
    QkvPerRank,
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


def only(text: str, **parameters: int | str) -> Statement:
    (statement,) = parse(text, parameters)
    return statement


def parts(names: Sequence[Name]) -> list[tuple[NamePart, ...]]:
    return [name.parts for name in names]


def written(text: str) -> list[str]:
    return [text_of(statement) for statement in parse(text, {})]


OPERATIONS: dict[str, tuple[StatementOperation, ...]] = {
    "a -> b": (),
    "a, b -> c, axis=0": (Concat(0),),
    "a, b -> c, axis = -1": (Concat(-1),),
    "a -> b, c, axis=1": (SplitStatement(1),),
    "a -> b, axis=1": (),  # one to one, AOA's axis says nothing
    "a, b -> c, axis=0, sizes='[3,5]'": (Concat(0, (3, 5)),),
    "a -> b, c, sizes=[3, 5], axis=0": (SplitStatement(0, (3, 5)),),
    "a -> b, c, axis=0, sizes='[3,0,]'": (SplitStatement(0, (3, 0)),),
    "a -> b, c, axis=0, sizes=recorded": (SplitStatement(0, recorded=True),),
    "e.*.w -> b, axis=0": (Concat(0),),
    "b -> e.*.w, axis=0": (SplitStatement(0),),
    "b -> e.*.w, axis=0, sizes='[1,2,3]'": (SplitStatement(0, (1, 2, 3)),),
    "a, b -> c, stack=0": (Stack(0),),
    "a -> b, c, stack=-1": (Unstack(-1),),
    "e.*.w -> b, stack=0": (Stack(0),),
    "a -> b, permute='[2,0,1]'": (Permute((2, 0, 1)),),
    'a -> b, permute = "[]"': (Permute(None),),
    "a -> b, permute=[ 1 , 0 ]": (Permute((1, 0)),),
    "a -> b, reshape='[2,-1]'": (Reshape((2, -1)),),
    "a -> b, reshape=[]": (Reshape(()),),
    "a -> b, reshape=recorded": (Reshape(None),),
    "a -> b, dtype='float16'": (Cast("float16"),),
    "a -> b, dtype=bfloat16": (Cast("bfloat16"),),
    "a -> b, dtype=recorded": (Cast(None),),
    "a -> b, src_dtype='float16', dst_dtype='float32'": (Cast("float32", "float16"),),
    "a -> b, dst_dtype='float32', src_dtype='float16'": (Cast("float32", "float16"),),
    "a -> b, src_dtype='float16', dst_dtype=recorded": (Cast(None, "float16"),),
    "q,k,v -> qkv, fused_qkv, num_heads=8, num_key_value_groups=2": (Qkv(8, 2, None, True),),
    "qkv -> q,k,v, num_key_value_groups=2, axis=0, num_heads=8, fused_qkv": (Qkv(8, 2, 0, False),),
    "x -> x, fused_qkv_old, num_heads=4, num_key_value_groups=4": (QkvPerRank(4, 4, None, 1, 1, None, None),),
    "x -> x, fused_qkv_old, num_heads=4, num_key_value_groups=4, src_tp=2, dst_tp=4": (
        QkvPerRank(4, 4, None, 1, 1, 2, 4),
    ),
    "q,k,v -> x, fused_qkv_old, num_heads=4, num_key_value_groups=2, axis=0, dst_tp=2": (
        QkvPerRank(4, 2, 0, 3, 1, None, 2),
    ),
    "x -> q,k,v, fused_qkv_old, num_heads=4, num_key_value_groups=2, src_tp=2": (
        QkvPerRank(4, 2, None, 1, 3, 2, None),
    ),
    "g,u -> x, fused_ffn": (Ffn(None, 2, 1, None, None),),
    "x -> g,u, fused_ffn, axis=0": (Ffn(0, 1, 2, None, None),),
    "x -> x, fused_ffn, src_tp=2, dst_tp=1": (Ffn(None, 1, 1, 2, 1),),
    "a^T -> b, dtype='bfloat16'": (Cast("bfloat16"),),
    "a, b -> c, permute='[1,0]', axis=0, reshape='[4]', dtype=float16": (
        Permute((1, 0)),
        Concat(0),
        Reshape((4,)),
        Cast("float16"),
    ),
    "a -> b, permute='[1,0]', reshape='[2,3]', permute='[1,0]'": (Permute((1, 0)), Reshape((2, 3)), Permute((1, 0))),
    "a -> b, src_dtype=float16, dst_dtype=float32, src_dtype=float32, dst_dtype=float64": (
        Cast("float32", "float16"),
        Cast("float64", "float32"),
    ),
}


@pytest.mark.parametrize("text", OPERATIONS)
def test_attributes_are_the_operations_that_they_mean_in_their_order(text: str) -> None:
    assert only(text).operations == OPERATIONS[text]


NAMES: dict[str, tuple[NamePart, ...]] = {
    "a": ("a",),
    "model.layers.0.w_1": ("model.layers.0.w_1",),
    "0w": ("0w",),
    "__": ("__",),
    "axis": ("axis",),
    "m.$LAYER_ID.w": ("m.", Placeholder("LAYER_ID"), ".w"),
    "$L": (Placeholder("L"),),
    "m.$LAYER_ID.e.$EXPERT_ID.w": ("m.", Placeholder("LAYER_ID"), ".e.", Placeholder("EXPERT_ID"), ".w"),
    "m.$L-1.w": ("m.", Placeholder("L", -1), ".w"),
    "m.$L+12": ("m.", Placeholder("L", 12)),
    "m.$LAYER_ID_OFFSET": ("m.", Placeholder("LAYER_ID_OFFSET")),
    "m.$LAYER_ID_OFFSET-1": ("m.", Placeholder("LAYER_ID_OFFSET", -1)),
    "e.*.w": ("e.", Star(), ".w"),
    "m.$L.e.*": ("m.", Placeholder("L"), ".e.", Star()),
    '"a-b/c d"': ("a-b/c d",),
    "'a-b'": ("a-b",),
    '"3"': ("3",),
    '"_"': ("_",),
    '"#;->,="': ("#;->,=",),
    '"optimizer/m.$L.w/exp_avg"': ("optimizer/m.", Placeholder("L"), ".w/exp_avg"),
    '"e/*/w"': ("e/", Star(), "/w"),
    r'"\$L\*\"\\"': ('$L*"\\',),
    r"'it\'s'": ("it's",),
    r'"$L\0"': (Placeholder("L"), "0"),
}


@pytest.mark.parametrize("text", NAMES)
def test_names_on_the_left_have_the_parts_that_they_are_written_with(text: str) -> None:
    arguments = ", axis=0" if "*" in text else ""
    (name,) = only(f"{text} -> b{arguments}").left
    assert name == Name(NAMES[text], False, TextPlace(1, 1, len(text)))
    (name,) = only(f"{text}^T->b{arguments}").left
    assert name == Name(NAMES[text], True, TextPlace(1, 1, len(text) + 2))


def test_the_offset_of_aoa_takes_one_off_on_the_right_only() -> None:
    statement = only("m.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w, axis=0")
    assert parts(statement.left) == [("m.", Placeholder("LAYER_ID_OFFSET"), ".w")]
    assert parts(statement.right) == [("m.", Placeholder("LAYER_ID_OFFSET", -1), ".w")]
    assert parts(only("a -> m.$LAYER_ID_OFFSET+1").right) == [("m.", Placeholder("LAYER_ID_OFFSET", 0))]


def test_arrays_are_their_names() -> None:
    statement = only("w[0:3]^T -> 'x-y'[ 9 : 10 ], axis=0")
    assert statement.left == tuple(Name((f"w_{number}",), True, TextPlace(1, 1, 8)) for number in range(3))
    assert statement.right == (Name(("x-y_9",), False, TextPlace(1, 13, 15)),)
    assert parts(only("m.$L[2:4] -> b, axis=0").left) == [
        ("m.", Placeholder("L"), "_2"),
        ("m.", Placeholder("L"), "_3"),
    ]


def test_what_is_dropped_has_no_right_and_what_is_added_no_left() -> None:
    assert only("a.$L -> _").right == ()
    assert only("_ -> b.$L").left == ()
    assert only("a -> _, optional=1").optional
    assert not only("a -> b, optional=0").optional


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("a -> b\nc -> d", ["a -> b", "c -> d"]),
        ("a -> b\r\nc -> d\r\n", ["a -> b", "c -> d"]),
        ("a -> b\rc -> d", ["a -> b", "c -> d"]),
        ("a -> b; c -> d;;", ["a -> b", "c -> d"]),
        ("\n\n  a\t->\u00a0b  \n", ["a -> b"]),
        ("", []),
        ("# nothing\n \t\n", []),
        ("a->b#c->d\n#e->f\ng->h", ["a -> b", "g -> h"]),
        ("a,b->c,axis=0", ["a, b -> c, axis=0"]),
        # a comma or an arrow at the end of a line, or at the beginning of the next, carries it on; so does a backslash
        ("q,\n\n # keys\nk, # k\nv\n-> x\n, axis =\t0\na ->\nb", ["q, k, v -> x, axis=0", "a -> b"]),
        ("q,\r\nk -> x,\r\naxis=0", ["q, k -> x, axis=0"]),
        ("a \\\n -> b \\  \r\n, dtype=float16", ["a -> b, dtype='float16'"]),
        ("a -> b,\n  c, axis=0", ["a -> b, c, axis=0"]),
        ("a -> b, permute=[1,\n  0]", ["a -> b, permute='[1,0]'"]),
        # a comma that is left over does not
        ("a -> b,\nc -> d", ["a -> b", "c -> d"]),
        ("a, -> b,", ["a -> b"]),
        ("a -> b, c, axis=1,\nd -> e,\nf, g -> h, axis=0,", ["a -> b, c, axis=1", "d -> e", "f, g -> h, axis=0"]),
        # statements that strings without a newline between them were glued to
        ("a, b -> c, axis=1d.w -> e, dtype = 'float32'", ["a, b -> c, axis=1", "d.w -> e, dtype='float32'"]),
        ("a -> b, permute='[]'c -> d", ["a -> b, permute='[]'", "c -> d"]),
        ("a -> b c -> d e -> f", ["a -> b", "c -> d", "e -> f"]),
        ("a -> b c, d -> e, axis=0", ["a -> b", "c, d -> e, axis=0"]),
        ("g, u -> x, fused_ffn y -> z", ["g, u -> x, fused_ffn", "y -> z"]),
    ],
)
def test_statements_end_where_a_reader_thinks_they_do(text: str, statements: list[str]) -> None:
    assert written(text) == statements


def test_statements_know_their_text_and_where_it_stands() -> None:
    first, second = parse(" a ->\n   b,  # comment\n  axis=0,\nc->d", {})
    assert (first.text, first.place) == ("a ->\n   b,  # comment\n  axis=0", TextPlace(1, 2, 4))
    assert first.right[0].place == TextPlace(2, 4, 1)
    assert (second.text, second.place) == ("c->d", TextPlace(4, 1, 4))


def test_parameters_stand_for_values() -> None:
    text = "q, k, v -> x, fused_qkv, num_heads={ heads }, num_key_value_groups={groups}"
    assert only(text, heads=8, groups="2").operations == (Qkv(8, 2, None, True),)
    text = "a -> b, c, axis={axis}, sizes='[{first}, {second}]', permute={dims}, dtype='{kind}'"
    statement = only(text, axis=-1, first=3, second=5, dims="[1,0]", kind="float16", unused=1)
    assert statement.operations == (SplitStatement(-1, (3, 5)), Permute((1, 0)), Cast("float16"))


def test_needed_parameters_are_those_of_values_also_where_the_text_is_wrong() -> None:
    assert needed_parameters("a -> b, axis={x}; oops ->, sizes='[{y},{ z }, {}]' # num_heads={no}") == {"x", "y", "z"}
    assert needed_parameters("'{no}' -> b") == frozenset()


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("\"plain.name\" -> 'b'", "plain.name -> b"),
        ('"axis", \'3\', "_", "a b" -> c, axis=0', '"axis", "3", "_", "a b" -> c, axis=0'),
        ('a -> "fused_ffn"', 'a -> "fused_ffn"'),
        ("'say \"no\"' -> b", r'"say \"no\"" -> b'),
        ("m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET", "m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET"),
        ("m.$L-1 -> m.$L+2", "m.$L-1 -> m.$L+2"),
        (r'"$L\_w" -> "$L\-1"', r'"$L\_w" -> "$L\-1"'),
        ("w[0:2] -> c, axis=0, optional=1", "w_0, w_1 -> c, axis=0, optional=1"),
        ("a -> b, axis=0", "a -> b"),
        (
            "q,k,v -> x, num_heads=8, num_key_value_groups=2, axis=0, fused_qkv",
            "q, k, v -> x, fused_qkv, num_heads=8, num_key_value_groups=2, axis=0",
        ),
    ],
)
def test_text_of_a_statement_is_short_and_plain(statement: str, text: str) -> None:
    assert text_of(only(statement)) == text


@pytest.mark.parametrize("joint", [Concat(0), Concat(0, (3,)), SplitStatement(0), SplitStatement(0, recorded=True)])
def test_what_joins_or_parts_nothing_is_not_written(joint: StatementOperation) -> None:
    assert text_of(replace(only("a -> b"), operations=(Permute(None), joint))) == "a -> b, permute='[]'"
