"""Every error in a text is a finding of its own, with its place and with what to do."""

import pytest

from shardwise.errors import RewriteError
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite.statements import StatementFinding, TextPlace, raise_all
from shardwise.rewrite.syntax import parse

PARAMETERS: dict[str, int | str] = {"heads": 8, "text": "eight", "real": 1.5, "flag": True}  # type: ignore[dict-item]
FORM = "a statement is written 'a -> b': sources on the left, outputs on the right"
ARROW = f"the arrow is written '->', and points to the right; {FORM}"
DTYPES = ", ".join(ITEMSIZE_BYTES)
ATTRIBUTES = (
    "axis, sizes, stack, fused_qkv, fused_qkv_old, fused_ffn, num_heads, num_key_value_groups, src_tp, dst_tp, "
    "permute, reshape, pad, crop, fill, dtype, src_dtype, dst_dtype, dequantise, quantise, element_dtype, "
    "scale_dtype, scale_dims, optional, gaps"
)
VALUES = "values are integers, words, and lists such as '[2,0,1]', after one equals sign"
ARRAY = "an array of names is written w[0:3], which is w_0, w_1, w_2"
SIDE_BY_SIDE = "and the digits of the first have no clear end; put text between them"
UNDONE = "a cast that can be undone has both, any other is written dtype=..."
QKV = "fused_qkv is for 'q, k, v -> qkv' or 'qkv -> q, k, v'"
OLD = "fused_qkv_old is for 'q, k, v -> qkv', 'qkv -> q, k, v' or 'qkv -> qkv'"
FFN_FORMS = "'gate, up -> fused', 'fused -> gate, up' or 'fused -> fused'"
TWICE = "each join or split tensors, which a statement does once; write two statements, with a temporary name between"
ONE_SIDE = "but one side has exactly one; write a statement for each"
HOW = "but how is not said; add axis=..., stack=... or one of the fused attributes"

# Bars stand around what has the carets.
ERRORS = [
    # arrows and commas
    ("|a|", f"an arrow is missing in this statement; {FORM}"),
    ("|a = b|", f"an arrow is missing in this statement; {FORM}"),
    ("|axis=1|", "an arrow is missing in this statement; if axis belongs to the one before, end that with a comma"),
    ("a |<-| b", ARROW),
    ("a |=>| b", ARROW),
    ("a |-->| b", ARROW),
    ("a |\u2192| b", ARROW),
    ("a -> b |->| c", "a second arrow; a newline or ';' stands between two statements"),
    ("a -> b, c |->| d", "a second arrow; a newline or ';' stands between two statements"),
    ("a |->|", f"a name is missing after the arrow; {FORM}, and 'a -> _' drops a"),
    ("|->| b", f"a name is missing before the arrow; {FORM}, and '_ -> b' adds b"),
    ("a,|,|b -> c, axis=0", "a name is missing between two commas"),
    ("|,|a -> b", "a name is missing before the comma"),
    ("a -> |,| b", "a name is missing before the comma"),
    ("a |b| -> c", "a comma is missing before b"),
    ("a -> b |c|", "a comma is missing before c"),
    ("a -> b, axis=0 |fused_qkv_old|, num_heads=2", "a comma is missing before fused_qkv_old"),
    ("a -> b, axis=0 |2|", "a comma is missing before 2"),
    # attributes where none can be
    ("axis|=1|, a -> b", "axis=1 stands on the left; attributes come last, after the names on the right"),
    ("|=1| -> b", "an attribute is missing before '=1', such as axis in axis=0"),
    ("a -> b, |=1|", "an attribute is missing before '=1', such as axis in axis=0"),
    ("a -> b, axis=1|=2|", "a second value, '=2'; an attribute has one, and a list is written '[2,0,1]'"),
    ("a -> b, axis|=|", f"axis has no value; {VALUES}"),
    ("a -> b, axis|=|=1", f"axis has no value; {VALUES}"),
    ("a -> b |=|", f"b has no value; {VALUES}"),
    ("a -> b, permute|=|[1,0", "the value after this equals sign is not closed"),
    ("a -> b, dtype|=|'float16", "the value after this equals sign is not closed"),
    ("a -> b, axis=0, |c|", "c stands after axis; names come first, then attributes"),
    (
        "a -> b, axis=0, |fused_fnn|",
        "fused_fnn stands after axis; names come first, then attributes (is fused_fnn meant to be fused_ffn?)",
    ),
    (
        'a -> b, |"axis"=1|',
        '"axis" is a name, as it is in quotes, and takes no value; attributes have no quotes',
    ),
    # names
    ("|a-b| -> c", "'-' has its place only in names in quotes; if all of it is a name, write \"a-b\""),
    ("a -> |m.$L/w|", "'/' has its place only in names in quotes; if all of it is a name, write \"m.$L/w\""),
    ("|a/b^T| -> c", "'/' has its place only in names in quotes; if all of it is a name, write \"a/b\"^T"),
    ("a -> |(b)|", "'(' has its place only in names in quotes; if all of it is a name, write \"(b)\""),
    ('a -> |"|b', 'this quote is not closed; a name in quotes ends on its line, and has \\" for a quote inside'),
    ("a -> |'|b", "this quote is not closed; a name in quotes ends on its line, and has \\' for a quote inside"),
    ("a|^|S -> b", "the only suffix of a name is ^T, which reverses all dims"),
    (
        "|$|layer.w -> b",
        'a placeholder is a dollar sign and capital letters, such as $LAYER_ID; in a name itself it is written "\\$"',
    ),
    (
        "|{|n} -> b",
        "a parameter stands for the value of an attribute, such as num_heads={num_heads}, and nowhere else",
    ),
    ("|a[0:x]| -> b", f'{ARRAY}; if all of it is a name, write "a[0:x]"'),
    ("|a[0]| -> b", f'{ARRAY}; if all of it is a name, write "a[0]"'),
    ("|w[3:3]| -> b, axis=0", "w[3:3] stands for no name; it counts from 3 and ends before 3"),
    ("|w[7:1000008]| -> b, axis=0", "w[7:1000008] stands for more names than any state has"),
    ("|w[0:1000000000000000]| -> b, axis=0", "w[0:1000000000000000] stands for more names than any state has"),
    ("|m.$L-123456789| -> b", "'-123456789' in m.$L-123456789 is more than any number in a name"),
    ('|""| -> b', '"" is empty; a name has at least one character'),
    ("|3| -> b", '3 alone is a number; a tensor that is called so is written "3"'),
    (
        "|a.*.*.w| -> b, axis=0",
        "a.*.*.w has several stars; a name has at most one; use placeholders, such as $EXPERT_ID, for the others",
    ),
    ("|a.$A$B| -> b", f"$A and $B stand side by side in a.$A$B, {SIDE_BY_SIDE}"),
    ("|a.$A-1*| -> b, axis=0", f"$A-1 and * stand side by side in a.$A-1*, {SIDE_BY_SIDE}"),
    ('|"a$b"| -> b', "'$' begins nothing in \"a$b\"; the character itself is written '\\$'"),
    (
        "a -> |b^T|",
        "b^T is a view of b, not a tensor to assign. Transpose on the left, 'a^T -> b', or assign first, "
        "'a -> b', and then 'b^T -> b'",
    ),
    ("a -> |axis=0|", 'a name is missing on the right: axis is an attribute, and a tensor called so is written "axis"'),
    (
        "a -> |fused_ffn|, axis=0",
        'a name is missing on the right: fused_ffn is an attribute, and a tensor called so is written "fused_ffn"',
    ),
    # dropped and added
    ("|_ -> _|", "'_ -> _' says nothing; 'a -> _' drops a, '_ -> b' adds b"),
    ("a, |_| -> b, axis=0", "'_' stands among names; to add a tensor write '_ -> b', as a separate statement"),
    ("a -> b, |_|, axis=0", "'_' stands among names; to drop a tensor write 'a -> _', as a separate statement"),
    ("|_^T| -> b", "'_' in _^T is no tensor; one that is called so is written \"_\""),
    (
        "a -> _, optional=1, |dtype='float16'|",
        "dtype='float16' does nothing to a tensor that is dropped: '_' takes nothing; leave it out",
    ),
    ("_ -> a, |axis=0|", "axis=0 does nothing to a tensor that is added: it keeps the value that it has; leave it out"),
    # values
    ("a -> b, |axs=1|", "there is no attribute axs; the nearest is axis"),
    ("a -> b, |Permute='[]'|", "there is no attribute Permute; the nearest is permute"),
    ("a -> b, |frobnicate=1|", f"there is no attribute frobnicate; there are {ATTRIBUTES}"),
    ("a -> b, |gaps=1|", "gaps=1 is about the numbers of a star, and there is none"),
    ("e.* -> b, stack=0, |gaps=2|", "gaps=2: gaps is 1 for a star whose numbers may have gaps, else 0"),
    (
        "q, k, v -> x, fused_qkv, num_heads=4, num_key_value_groups=2, |sizes='[8,4]'|",
        "sizes='[8,4]' is not three sizes; give those of query, key and value",
    ),
    ("a -> b, c, axis=0, |axis=1|", "axis is given twice, as axis=0 and as axis=1; give it once"),
    (
        "a -> b, dtype='float16', optional=1, |dtype='float32'|",
        "dtype is given twice, as dtype='float16' and as dtype='float32'; give it once",
    ),
    ("a -> b, |axis=one|", "axis=one: axis wants an integer, such as axis=0"),
    ("a, b -> c, |stack=1.5|", "stack=1.5: stack wants an integer, such as stack=0"),
    ("a, b -> c, |axis='[1]'|", "axis='[1]': axis wants an integer, such as axis=0"),
    (f"a -> b, |axis={10**18}|", f"axis={10**18}: axis wants an integer, such as axis=0"),
    (
        "a, s -> b, |dequantise='[0,4]'|",
        "dequantise='[0,4]': a block has at least one element along each dim; -1 is all",
    ),
    (
        "a -> b, |dequantise='[4]'|",
        "dequantise is for 'elements, scales -> a'; here are 1 name on the left and 1 name on the right",
    ),
    ("a -> b, s, |quantise=4|", "quantise=4: quantise wants a list of integers, such as quantise='[128,128]'"),
    (
        "a, s -> b, dequantise='[4]', |scale_dtype='uint8'|",
        "scale_dtype='uint8' says something about quantise, which is not given",
    ),
    ("a -> b, |pad='[-2]'|", "pad='[-2]': sizes are not negative, but for -1, which keeps a size"),
    (
        "a -> b, crop='[2]', |fill=many|",
        "fill=many: fill wants a number, such as 0, 0.5, '-inf' or '1e-5', or 'kept' for the values of the target",
    ),
    ("a -> b, |fill=0|", "fill=0 is the value of elements that pad= adds or crop= takes away; neither is given"),
    ("a -> b, pad='[2]', |pad='[3]'|", "pad is given twice, as pad='[2]' and as pad='[3]'; give it once"),
    ("a -> b, |permute=1|", "permute=1: permute wants a list of integers, such as permute='[1,0]'"),
    ("a -> b, |reshape='2,3'|", "reshape='2,3': reshape wants a list of integers, such as reshape='[4,-1]'"),
    ("a -> b, |permute=recorded|", "permute=recorded: permute wants a list of integers, such as permute='[1,0]'"),
    (
        "a -> b, |permute='[0,0]'|",
        "permute='[0,0]': no permutation; 2 dims are 0, 1, each once, and '[]' reverses all",
    ),
    (
        "a -> b, |permute=[1, 2, 3]|",
        "permute=[1, 2, 3]: no permutation; 3 dims are 0, 1, 2, each once, and '[]' reverses all",
    ),
    (
        "a -> b, |reshape='[-1,2,-1]'|",
        "reshape='[-1,2,-1]': only one size can be -1, the rest",
    ),
    ("a -> b, |reshape='[-2]'|", "reshape='[-2]': sizes are not negative, but for one -1"),
    ("a -> b, c, axis=0, |sizes='[1,-1]'|", "sizes='[1,-1]': sizes are not negative"),
    ("a -> b, |dtype='float61'|", "dtype='float61': there is no such dtype; the nearest is float64"),
    ("a -> b, |dtype=3|", f"dtype=3: there is no such dtype; there are {DTYPES}"),
    ("a -> b, |src_dtype='float16'|", f"src_dtype='float16' is given without dst_dtype; {UNDONE}"),
    (
        "a -> b, |dst_dtype='float16'|, dst_dtype=float32, src_dtype=float16",
        f"dst_dtype='float16' is given without src_dtype; {UNDONE}",
    ),
    ("a -> b, |optional=2|", "optional=2: optional is 1 for a statement that may match nothing, else 0"),
    (
        "a -> b, |optional|",
        'optional has no value; write it as optional=1 (a tensor that is called so is written "optional")',
    ),
    ("a -> b, |axis|", 'axis has no value; write it as axis=0 (a tensor that is called so is written "axis")'),
    ("g, u -> x, |fused_ffn=1|", "fused_ffn takes no value; leave out '=1'"),
    # parameters
    (
        "a -> b, |axis={no}|",
        "the parameter {no} has no value; give one for 'no' (given are flag, heads, real, text)",
    ),
    ("a -> b, |axis={}|", "{} names no parameter; a parameter is written {num_heads}"),
    ("a -> b, |axis={real}|", "the parameter {real} is 1.5 (float); parameters are integers or text"),
    ("a -> b, |axis={flag}|", "the parameter {flag} is True (bool); parameters are integers or text"),
    ("a -> b, |axis={text}|", "axis={text} (that is, eight): axis wants an integer, such as axis=0"),
    ("a -> b, |dtype={text}|", f"dtype={{text}} (that is, eight): there is no such dtype; there are {DTYPES}"),
    (
        "a -> b, |permute='[{heads}]'|",
        "permute='[{heads}]' (that is, '[8]'): no permutation; 1 dims are 0, each once, and '[]' reverses all",
    ),
    # joining and parting
    (
        "|a, b -> c, d, axis=0|",
        f"2 names on the left and 2 names on the right, {ONE_SIDE}",
    ),
    (
        "|e.*.w -> f.*.w|",
        "a star on the left and a star on the right, but one side has exactly one; use a placeholder such as "
        "$EXPERT_ID, not a star, for one each; what names begin with is changed by module.** -> **",
    ),
    ("|g, u -> x|", f"2 tensors become one, {HOW}"),
    ("|a -> b, c, d|", f"one tensor becomes 3, {HOW}"),
    (
        "|g, u -> x, fused_ff|",
        f"2 names on the left and 2 names on the right, {ONE_SIDE} (is fused_ff meant to be fused_ffn?)",
    ),
    (
        "|q, k, v -> x, fused_qvk, num_heads=8, num_key_value_groups=4|",
        f"3 names on the left and 2 names on the right, {ONE_SIDE} (is fused_qvk meant to be fused_qkv?)",
    ),
    ("|e.*.w -> x|", "all that match the star become one, but how is not said; add axis=... or stack=..."),
    (
        "|x -> e.*.w|",
        "one tensor becomes all that match the star, but how is not said; add axis=... or stack=...",
    ),
    ("g, u -> x, stack=0, |axis=1|", f"stack=0 and axis=1 {TWICE}"),
    ("g, u -> x, fused_ffn, |stack=0|, axis=1", f"fused_ffn and stack=0 {TWICE}"),
    ("g, u -> x, fused_ffn, |fused_qkv|", f"fused_ffn and fused_qkv {TWICE}"),
    ("a -> b, |stack=0|", "stack=0 joins several tensors or parts one into several; for one tensor use reshape"),
    ("a -> b, c, axis=0, |sizes='[1,2,3]'|", "sizes='[1,2,3]' has 3 sizes for 2 tensors; give one for each"),
    (
        "a -> b, c, |sizes='[1,2]'|",
        "sizes='[1,2]' says where a dim is cut or joined; give the dim as axis=...",
    ),
    ("a, b -> c, stack=0, |sizes='[1,2]'|", "sizes='[1,2]' says where a dim is cut or joined; stack has none"),
    ("a -> b, axis=0, |sizes='[1]'|", "sizes='[1]' is for several tensors on one side; here one becomes one"),
    (
        "a, b -> c, axis=0, |sizes=recorded|",
        "sizes=recorded: only a split needs recorded sizes; leave them out",
    ),
    # fusing
    ("a, b -> c, |fused_qkv|", f"{QKV}; here are 2 names on the left and 1 name on the right"),
    ("a -> c, |fused_qkv|", f"{QKV}; here are 1 name on the left and 1 name on the right"),
    ("a, b -> c, |fused_qkv_old|", f"{OLD}; here are 2 names on the left and 1 name on the right"),
    (
        "a, b, c -> d, |fused_ffn|",
        f"fused_ffn is for {FFN_FORMS}; here are 3 names on the left and 1 name on the right",
    ),
    (
        "a -> e.*, |fused_ffn|",
        f"fused_ffn needs its tensors one by one, as in {FFN_FORMS}; a star stands for any number",
    ),
    (
        "q, k, v -> x, |fused_qkv|, num_key_value_groups=4",
        "fused_qkv needs num_heads=..., the number of query heads",
    ),
    (
        "x -> x, |fused_qkv_old|, num_heads={heads}",
        "fused_qkv_old needs num_key_value_groups=..., the number of key-value heads",
    ),
    (
        "q, k, v -> x, fused_qkv, |num_heads=10|, num_key_value_groups=4",
        "10 query heads cannot be shared evenly among 4 key-value heads; num_heads is a multiple of "
        "num_key_value_groups",
    ),
    (
        "q, k, v -> x, fused_qkv, |num_heads=0|, num_key_value_groups=4",
        "num_heads=0: num_heads is at least 1",
    ),
    (
        "q, k, v -> x, fused_qkv, num_heads=8, |num_key_value_groups=-2|",
        "num_key_value_groups=-2: num_key_value_groups is at least 1",
    ),
    ("a -> b, |num_heads=3|", "num_heads=3 says something about fused_qkv or fused_qkv_old, which is not given"),
    (
        "g, u -> x, fused_ffn, |num_heads=3|",
        "num_heads=3 says something about fused_qkv or fused_qkv_old, which is not given",
    ),
    ("a -> b, |dst_tp=2|", "dst_tp=2 says something about fused_qkv_old or fused_ffn, which is not given"),
    (
        "g, u -> x, fused_ffn, |src_tp=2|",
        "src_tp=2 is the degree of a fused tensor on the left, where 2 tensors stand that are not fused; leave it out",
    ),
    (
        "x -> q, k, v, fused_qkv_old, num_heads=4, num_key_value_groups=2, |dst_tp=2|",
        "dst_tp=2 is the degree of a fused tensor on the right, where 3 tensors stand that are not fused; leave it out",
    ),
]


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(RewriteError) as caught:
        parse(text, PARAMETERS)
    return caught.value.problems


def shown(text: str, first: int, stop: int, message: str) -> str:
    return f"line 1, column {first + 1}: {message}\n    {text}\n    {' ' * first}{'^' * (stop - first)}"


@pytest.mark.parametrize(("marked", "message"), ERRORS)
def test_an_error_shows_what_is_wrong_and_where(marked: str, message: str) -> None:
    before, wrong, after = marked.split("|")
    text = before + wrong + after
    assert problems_of(text) == (shown(text, len(before), len(before + wrong), message),)


def test_all_findings_of_all_statements_come_at_once_in_their_order() -> None:
    text = "a -> b, axis=one, dtype=three\nc => d\ne -> f; g, h -> i, \nj -> k\n q,k,v -> qkv, fused_qkv\n"
    assert [problem.split(": ")[0] for problem in problems_of(text)] == [
        "line 1, column 9",
        "line 1, column 19",
        "line 2, column 3",
        "line 3, column 9",
        "line 5, column 16",
        "line 5, column 16",
    ]


def test_a_statement_that_is_no_statement_hides_nothing_behind_it() -> None:
    (first, second, third) = problems_of("a -> 'b\nc -> d, axs=1\n-> ]\n")
    assert first.startswith("line 1, column 6: this quote")
    assert second.startswith("line 2, column 9: there is no attribute axs")
    assert third.startswith("line 3, column 1: a name is missing")


def test_a_semicolon_ends_a_statement_whatever_stands_before_it() -> None:
    assert [problem.split("; ")[0] for problem in problems_of("a ->; b,\n; c")] == [
        "line 1, column 3: a name is missing after the arrow",
        "line 1, column 7: an arrow is missing in this statement",
        "line 2, column 3: an arrow is missing in this statement",
    ]


def test_the_message_has_all_problems_one_below_the_other() -> None:
    with pytest.raises(RewriteError) as caught:
        parse("a -> b c; d -> e, axis=x", {})
    assert str(caught.value) == (
        "2 problems:\n"
        "  - line 1, column 8: a comma is missing before c\n"
        "    a -> b c\n"
        "           ^\n"
        "  - line 1, column 19: axis=x: axis wants an integer, such as axis=0\n"
        "    d -> e, axis=x\n"
        "            ^^^^^^"
    )


def test_of_a_statement_with_several_lines_the_one_in_question_is_shown() -> None:
    (problem,) = problems_of("\n  q,\n\tk,   # keys\n  v -> qkv,\n\t fused_qkv, num_heads=8,\n  num_key_value_groups=3")
    assert problem == (
        "line 5, column 14: 8 query heads cannot be shared evenly among 3 key-value heads; num_heads is a multiple of "
        "num_key_value_groups\n"
        "    fused_qkv, num_heads=8,\n"
        "               ^^^^^^^^^^^"
    )


def test_of_a_long_line_what_stands_around_the_fault_is_shown() -> None:
    names = ", ".join(f"model.layers.{number}.w" for number in range(20))
    (problem,) = problems_of(f"{names}, model.layers.20/w, {names} -> w, axis=0")
    _, line, carets = problem.split("\n")
    assert line.startswith("    ... ")
    assert line.endswith(" ...")
    assert len(line) <= 112
    assert line[carets.index("^") : carets.rindex("^") + 1] == "model.layers.20/w"


def test_a_finding_shows_what_its_statement_was_expanded_to() -> None:
    (statement,) = parse("  a.$L, b.$L -> c.$L, axis=7", {})
    finding = StatementFinding.of(
        statement, "no dim 7", at=statement.left[1].place, expansion=["a.0, b.0 -> c.0", "L is 0"]
    )
    assert str(finding) == (
        "line 1, column 9: no dim 7\n"
        "    a.$L, b.$L -> c.$L, axis=7\n"
        "          ^^^^\n"
        "    in: a.0, b.0 -> c.0\n"
        "    in: L is 0"
    )


def test_a_finding_at_a_place_that_the_statement_does_not_have_shows_the_statement() -> None:
    assert (
        str(StatementFinding(TextPlace(7, 3, 1), "a -> b", "wrong", start=TextPlace(1, 1, 6)))
        == "line 7, column 3: wrong\n    a -> b"
    )


def test_no_findings_raise_nothing() -> None:
    raise_all([])
