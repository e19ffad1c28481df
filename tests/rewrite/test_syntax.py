"""The text of rewrites: which statements and names it has, that it can be written and read again, and its errors."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite
from tests.properties import tried
from tests.refusals import Refusals

NAMES = {
    "a": "a",
    "model.layers.0.w_1": "model.layers.0.w_1",
    "0w": "0w",
    "__": "__",
    "axis": "axis",
    "$L": "7",
    "m.$L-1.w": "m.7.w",
    "m.$L+12": "m.14",
    "m.$LAYER_ID_OFFSET-1": "m.7",
    "m.$L.e.$EXPERT_ID": "m.10.e.2",
    '"a-b/c d"': "a-b/c d",
    "'a-b'": "a-b",
    '"3"': "3",
    '"_"': "_",
    '"#;->,="': "#;->,=",
    '"my optimizer/m.$L.w"': "my optimizer/m.3.w",
    r'"\$L\*\"\\"': '$L*"\\',
    r"'it\'s'": "it's",
    r'"$L\0"': "50",
}
"""As they are written: a name that each stands for."""


@pytest.mark.parametrize("text", NAMES)
def test_a_name_stands_for_what_is_written(text: str) -> None:
    rewrite = Rewrite(f"{text}^T->out")
    assert rewrite.check({NAMES[text]: (2, 3)}).outputs["out"].shape == (3, 2)
    assert Rewrite(str(rewrite)) == rewrite
    if text != "axis" and "$L" not in text.replace(r"\$", "") and "$E" not in text:  # on the right it is an attribute
        assert Rewrite(f"in -> {text}").check({"in": (1,)}).outputs.keys() == {NAMES[text]}


TEXTS: list[tuple[str, list[str]]] = [
    ("a -> b\nc -> d", ["a -> b", "c -> d"]),
    ("a -> b\r\nc -> d\r\n", ["a -> b", "c -> d"]),
    ("a -> b\rc -> d", ["a -> b", "c -> d"]),
    ("a -> b; c -> d;;", ["a -> b", "c -> d"]),
    ("\n\n  a\t->\u00a0b  \n", ["a -> b"]),
    ("", []),
    ("# nothing\n \t\n", []),
    ("a->b#c->d\n#e->f\ng->h", ["a -> b", "g -> h"]),
    # a comma or an arrow at the end of a line, or at the beginning of the next, carries it on; so does a backslash
    ("q,\n\n # keys\nk, # k\nv\n-> x\n, axis =\t0\na ->\nb", ["q, k, v -> x, axis=0", "a -> b"]),
    ("q,\r\nk -> x,\r\naxis=0", ["q, k -> x, axis=0"]),
    ("a \\\n -> b \\  \r\n, dtype=float16", ["a -> b, dtype='float16'"]),
    ("a -> b, permute=[1,\n  0]", ["a -> b, permute='[1,0]'"]),
    # a comma that is left over does not
    ("a -> b,\nc -> d", ["a -> b", "c -> d"]),
    ("a, -> b,", ["a -> b"]),
    ("a -> b, c, axis=1,\nd -> e,\nf, g -> h, axis=0,", ["a -> b, c, axis=1", "d -> e", "f, g -> h, axis=0"]),
    # statements that strings without a newline between them were glued to
    ("a, b -> c, axis=1d.w -> e, dtype = 'float32'", ["a, b -> c, axis=1", "d.w -> e, dtype='float32'"]),
    ("a -> b, permute='[]'c -> d", ["a -> b, permute='[]'", "c -> d"]),
    ("a -> b c, d -> e, axis=0", ["a -> b", "c, d -> e, axis=0"]),
    ("g, u -> x, fused_ffn y -> z", ["g, u -> x, fused_ffn", "y -> z"]),
    # spelling
    ("\"plain.name\" -> 'b'", ["plain.name -> b"]),
    ('"axis", \'3\', "_", "a b" -> c, axis=0', ['"axis", "3", "_", "a b" -> c, axis=0']),
    ("'say \"no\"' -> b", [r'"say \"no\"" -> b']),
    ("m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET", ["m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET"]),
    (r'"$L\_w" -> "$L\-1"', [r'"$L\_w" -> "$L\-1"']),
    ("w[0:2] -> c, axis=0, optional=1", ["w_0, w_1 -> c, axis=0, optional=1"]),
    ("w[0:2]^T -> 'x-y'[ 9 : 10 ], axis=0", ['w_0^T, w_1^T -> "x-y_9", axis=0']),
    ("a -> b, axis=0", ["a -> b"]),
    (
        "q,k,v -> x, num_heads=8, num_key_value_groups=2, axis=0, fused_qkv",
        ["q, k, v -> x, fused_qkv, num_heads=8, num_key_value_groups=2, axis=0"],
    ),
    ("a -> b, dst_dtype='float32', src_dtype='float16'", ["a -> b, src_dtype='float16', dst_dtype='float32'"]),
    ("a -> b, c, sizes=[3, 5,], axis=-1", ["a -> b, c, axis=-1, sizes='[3,5]'"]),
    ("a -> b, permute=[ 1 , 0 ], reshape=[]", ["a -> b, permute='[1,0]', reshape='[]'"]),
]


@pytest.mark.parametrize(("text", "statements"), TEXTS)
def test_statements_end_where_a_reader_thinks_they_do_and_have_one_spelling(text: str, statements: list[str]) -> None:
    rewrite = Rewrite(text)
    assert str(rewrite).splitlines() == statements
    assert Rewrite(str(rewrite)) == rewrite


VOCABULARY = r"""
    a b.w -> -> -> , , , ; axis = =0 ='[1,0]' permute fused_ffn ' " $L * ^T [0:2] _ sizes dtype =float16 \ # - <-
    3 num_heads fused_qkv stack optional =1 src_dtype =recorded pad='[2]' crop='[-1]' fill='0.5' quantise='[1,2]'
    dequantise='[2]' scale_dtype=float32 unary 'a"b' "a\"b" num_key_value_groups=2 fused_qkv_old dst_tp =2 gaps
"""
words = st.sampled_from([*VOCABULARY.split(), "\n", " ", " ", "\u00e9"])


@tried(300)
@given(st.lists(words, max_size=14).map("".join) | st.text(max_size=30))
@example("a -> b, axis=0 -> ")
@example(",")
@example("a,\n->")
def test_any_text_is_read_or_is_a_finding_at_a_place(text: str) -> None:
    problems: tuple[str, ...] = ()
    try:
        rewrite = Rewrite(text)
    except RewriteError as error:
        problems = error.problems
    else:
        assert Rewrite(str(rewrite)) == rewrite
    assert all(problem.startswith("line ") and "\n    " in problem for problem in problems)


ERRORS = r"""
a
axis=1
a => b
a -> b, c -> d
a ->
-> b
a,,b -> c, axis=0
a -> , b
a b -> c
a -> b c
a -> b, axis=0 fused_qkv_old, num_heads=2
a -> b, axis=0 2
axis=1, a -> b
a -> b, =1
a -> b, axis=1=2
a -> b, axis=
a -> b =
a -> b, dtype='float16
a -> b, axis=0, c
a -> b, axis=0, fused_fnn
a -> b, "axis"=1
a-b -> c
a/b^T -> c
a -> "b
a^S -> b
$layer.w -> b
{n} -> b
a[0] -> b
w[3:3] -> b, axis=0
w[7:1000008] -> b, axis=0
m.$L-123456789 -> b
"" -> b
3 -> b
a.*.*.w -> b, axis=0
a.$A$B -> b
a.$A-1* -> b, axis=0
"a$b" -> b
a -> b^T
a -> axis=0
a -> fused_ffn, axis=0
_ -> _
a, _ -> b, axis=0
a -> b, _, axis=0
_^T -> b
a -> _, optional=1, dtype='float16'
_ -> a, axis=0
a -> b, axs=1
a -> b, Permute='[]'
a -> b, frobnicate=1
a -> b, gaps=1
e.* -> b, stack=0, gaps=2
q, k, v -> x, fused_qkv, num_heads=4, num_key_value_groups=2, sizes='[8,4]'
a -> b, c, axis=0, axis=1
a -> b, dtype='float16', optional=1, dtype='float32'
a -> b, axis=one
a, b -> c, stack=1.5
a -> b, axis=1000000000000000000
a, s -> b, dequantise='[0,4]'
a -> b, dequantise='[4]'
a -> b, s, quantise=4
a, s -> b, dequantise='[4]', scale_dtype='uint8'
a -> b, pad='[-2]'
a -> b, crop='[2]', fill=many
a -> b, fill=0
a -> b, pad='[2]', pad='[3]'
a -> b, permute=1
a -> b, reshape='2,3'
a -> b, permute=recorded
a -> b, permute='[0,0]'
a -> b, permute=[1, 2, 3]
a -> b, reshape='[-1,2,-1]'
a -> b, reshape='[-2]'
a -> b, c, axis=0, sizes='[1,-1]'
a -> b, dtype='float61'
a -> b, dtype=3
a -> b, src_dtype='float16'
a -> b, dst_dtype='float16', dst_dtype=float32, src_dtype=float16
a -> b, optional
g, u -> x, fused_ffn=1
a, b -> c, d, axis=0
e.*.w -> f.*.w
g, u -> x
a -> b, c, d
g, u -> x, fused_ff
q, k, v -> x, fused_qvk, num_heads=8, num_key_value_groups=4
e.*.w -> x
g, u -> x, stack=0, axis=1
a -> b, stack=0
a -> b, c, axis=0, sizes='[1,2,3]'
a, b -> c, stack=0, sizes='[1,2]'
a -> b, axis=0, sizes='[1]'
a, b -> c, axis=0, sizes=recorded
a, b -> c, fused_qkv
a -> e.*, fused_ffn
q, k, v -> x, fused_qkv, num_key_value_groups=4
q, k, v -> x, fused_qkv, num_heads=0, num_key_value_groups=4
g, u -> x, fused_ffn, num_heads=3
a -> b, dst_tp=2
g, u -> x, fused_ffn, src_tp=2
x -> q, k, v, fused_qkv_old, num_heads=4, num_key_value_groups=2, dst_tp=2
a.**.b -> c
a.$N.** -> b.**
a.*** -> b.**
a.** -> b.**[0:2]
""".strip().splitlines()
"""Each alone; those of several lines show that all findings come at once, in their order, with what is in question."""
LONG = ", ".join(f"model.layers.{number}.w" for number in range(20))
ERRORS += [
    "a -> b, axis=one, dtype=three\nc => d\ne -> f; g, h -> i, \nj -> k\n q,k,v -> qkv, fused_qkv\n",
    "a -> 'b\nc -> d, axs=1\n-> ]\n",
    "a ->; b,\n; c",
    "\n  q,\n\tk,   # keys\n  v -> qkv,\n\t fused_qkv, num_heads=8,\n  num_key_value_groups=3",
    f"{LONG}, model.layers.20/w, {LONG} -> w, axis=0",
    "a ->\n---\n\nb -> c, axs=1\n",
    "a \u2192 b",
]


def reading(text: str) -> Callable[[], Rewrite]:
    return lambda: Rewrite(text)


REFUSED = Refusals("rewrite.syntax", {text: reading(text) for text in ERRORS}, kind=RewriteError)


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_shows_what_is_wrong_and_where(text: str) -> None:
    REFUSED.check(text)
