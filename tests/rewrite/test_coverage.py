"""What does not fit is found before anything moves, wherever it is, and all of it at once."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite
from tests.rewrite.filling import assert_same, resolved
from tests.rewrite.oracle import interpret, metas, split_line
from tests.rewrite.strategies import Case, cases, proven

Shape = tuple[int, ...]
Metas = dict[str, tuple[Shape, str]]


def problems_of(text: str, sources: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    with pytest.raises(RewriteError) as refused:
        Rewrite(text).check(sources, target)
    # Notes say what may be wrong, beside what is.
    return tuple(each for each in refused.value.problems if not each.startswith("note: "))


def _outputs(case: Case) -> Metas:
    outputs: Metas = metas(interpret(case.text, case.sources))
    return outputs


@proven
@given(cases(), st.data())
def test_elements_that_are_overwritten_unread_are_found_wherever_they_are(case: Case, data: st.DataObject) -> None:
    full = {name: shape for name, (shape, _) in _outputs(case).items() if 0 not in shape}
    assume(full)
    name = data.draw(st.sampled_from(sorted(full)))
    text = f'{case.text}\n"extra" -> "{name}"'
    (problem,) = problems_of(text, {**metas(case.sources), "extra": (5,)})
    assert name in problem
    assert f"line {len(text.splitlines())}," in problem
    count = 1
    for size in full[name]:
        count *= size
    assert re.search(rf"\b{count}\b", problem), problem


@proven
@given(cases(), st.data())
def test_parts_that_do_not_add_up_are_found_wherever_they_are(case: Case, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    at = data.draw(st.integers(0, len(sizes) - 1))
    wrong = [size + (position == at) * data.draw(st.sampled_from([1, 2])) for position, size in enumerate(sizes)]
    lines = case.text.splitlines()
    where = data.draw(st.integers(0, len(lines)))
    names = ", ".join(f"part_{number}" for number in range(len(sizes)))
    lines.insert(where, f"extra -> {names}, axis=1, sizes='{wrong}'")
    (problem,) = problems_of("\n".join(lines), {**metas(case.sources), "extra": (2, sum(sizes))})
    assert f"line {where + 1}," in problem
    assert str(sum(sizes)) in problem


@proven
@given(cases(), st.data())
def test_a_source_that_is_not_there_is_found_wherever_it_is_read(case: Case, data: st.DataObject) -> None:
    first_reads: dict[str, int] = {}
    for number, line in enumerate(case.text.splitlines(), start=1):
        for name in split_line(line).left:
            first_reads.setdefault(name.removesuffix("^T"), number)
    named = first_reads.keys() & case.sources.keys()
    read = sorted(name for name in named if not re.match(r"f\d+\.\d", name))  # what only patterns find may be missing
    assume(read)
    name = data.draw(st.sampled_from(read))
    known = {other: meta for other, meta in metas(case.sources).items() if other != name}
    problems = problems_of(case.text, known)
    assert any(name in problem and f"line {first_reads[name]}," in problem for problem in problems), problems


@proven
@given(cases(), st.data())
def test_a_target_of_other_names_shapes_or_dtypes_is_refused_wherever_it_differs(
    case: Case, data: st.DataObject
) -> None:
    target = _outputs(case)
    assume(target)
    rewrite = Rewrite(case.text)
    expected = interpret(case.text, case.sources)
    assert_same(resolved(rewrite.check(metas(case.sources), target), case.sources, {}), expected)
    name = data.draw(st.sampled_from(sorted(target)))
    shape, dtype = target[name]
    sizes = list(shape)
    for dim in range(len(sizes)):
        for change in (1, -1) if sizes[dim] else (1,):
            other = (*sizes[:dim], sizes[dim] + change, *sizes[dim + 1 :])
            (problem,) = problems_of(case.text, metas(case.sources), {**target, name: (other, dtype)})
            assert name in problem
    for other in ((*shape, 1), (2, *shape)):
        assert name in problems_of(case.text, metas(case.sources), {**target, name: (other, dtype)})[0]
    assert name in problems_of(case.text, metas(case.sources), {**target, name: (shape, "int64")})[0]
    assert any("more" in p for p in problems_of(case.text, metas(case.sources), {**target, "more": (shape, dtype)}))
    less = {key: meta for key, meta in target.items() if key != name}
    assert any(name in problem for problem in problems_of(case.text, metas(case.sources), less))


@proven
@given(cases(lossy=True))
def test_the_order_in_which_the_sources_are_listed_does_not_matter(case: Case) -> None:
    names = sorted(case.sources)
    known = metas(case.sources)
    one = Rewrite(case.text).check(known)
    other = Rewrite(case.text).check({name: known[name] for name in reversed(names)})
    assert dict(one.outputs) == dict(other.outputs)
    assert (one.dropped, one.invertible, sorted(one.losses)) == (other.dropped, other.invertible, sorted(other.losses))
    missing = {name: known[name] for name in names[1:]}
    verdicts = []
    for order in (list(missing), list(reversed(missing))):
        try:
            Rewrite(case.text).check({name: missing[name] for name in order})
            verdicts.append("fits")
        except RewriteError as refused:
            verdicts.append(str(refused))
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("bad", range(6))
def test_an_expert_that_is_missing_is_found_whichever_it_is(bad: int) -> None:
    known: dict[str, Shape] = {f"l.{at // 3}.e.{at % 3}.{which}": (2, 2) for at in range(6) for which in "ab"}
    gone = f"l.{bad // 3}.e.{bad % 3}.b"
    del known[gone]
    (problem,) = problems_of("l.$L.e.$E.a, l.$L.e.$E.b -> l.$L.e.$E.ab, axis=0", known)
    assert gone in problem


@pytest.mark.parametrize("bad", range(6))
def test_an_expert_of_another_shape_is_found_whichever_it_is(bad: int) -> None:
    known: dict[str, Shape] = {f"l.{at // 3}.e.{at % 3}.w": (2, 3) for at in range(6)}
    name = f"l.{bad // 3}.e.{bad % 3}.w"
    known[name] = (2, 4)
    problems = problems_of("l.$L.e.*.w -> l.$L.w, axis=0", known)
    assert len(problems) == 1
    assert f"l.{bad // 3}.e.0.w" in problems[0]  # the expansion shows which instance it is


def test_many_instances_of_one_name_are_found() -> None:
    known: dict[str, Shape] = {f"e.{at}.w": (2,) for at in range(4)}
    problems = problems_of("e.$E.w -> b", known)
    assert any("b" in problem and "line 1" in problem for problem in problems)


def test_all_findings_come_at_once_each_at_its_place() -> None:
    text = (
        "nothing.$L.w -> x.$L.w\na, b -> c, axis=1\nd -> e, f, axis=0\nd2 -> g, permute='[0]'\nunknown -> h\nb2 -> a2"
    )
    known: dict[str, Shape] = {"a": (2, 3), "b": (3, 3), "d": (5,), "d2": (2, 2), "b2": (1,), "a2": (7,)}
    problems = problems_of(text, known)
    assert [re.search(r"line (\d+), column \d+", problem)[1] for problem in problems] == list("123456")  # type: ignore[index]
    assert all(line in problem for line, problem in zip(text.splitlines(), problems, strict=True))
    assert all("^" in problem for problem in problems)


def test_what_follows_from_a_finding_is_no_finding() -> None:
    (problem,) = problems_of("a, b -> c, axis=1\nc^T -> d\nd -> e, f, axis=0", {"a": (2, 3), "b": (3, 3)})
    assert "line 1" in problem


@pytest.mark.parametrize(
    ("text", "shapes", "told"),
    [
        ("a, b -> c, axis=2", {"a": (2, 2), "b": (2, 2)}, "2"),
        ("a, b -> c, axis=-3", {"a": (2, 2), "b": (2, 2)}, "-3"),
        ("a, b -> c, stack=3", {"a": (2, 2), "b": (2, 2)}, "3"),
        ("a, b -> c, stack=0", {"a": (2, 2), "b": (2, 3)}, "3"),
        ("a -> b, c, axis=0", {"a": (5, 2)}, "5"),
        ("a -> b, c, stack=0", {"a": (3, 2)}, "3"),
        ("a -> b, reshape='[3,2]'", {"a": (2, 2)}, "4"),
        ("a -> b, reshape='[3,-1]'", {"a": (2, 2)}, "4"),
        ("a -> b, permute='[0,1,2]'", {"a": (2, 2)}, "2"),
        ("a, b -> c, axis=0, sizes='[2,3]'", {"a": (2, 2), "b": (2, 2)}, "3"),
        ("a -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2", {"a": (2, 9)}, "9"),
        ("q, k, v -> a, fused_qkv, num_heads=4, num_key_value_groups=2", {"q": (1, 8), "k": (1, 4), "v": (1, 3)}, "3"),
        ("q, k, v -> a, fused_qkv, num_heads=4, num_key_value_groups=2", {"q": (1, 8), "k": (1, 2), "v": (1, 2)}, "2"),
        ("q, k, v -> a, fused_qkv, num_heads=3, num_key_value_groups=1", {"q": (1, 8), "k": (1, 4), "v": (1, 4)}, "8"),
        ("g, u -> x, fused_ffn, dst_tp=4", {"g": (1, 6), "u": (1, 6)}, "4"),
        ("g, u -> x, fused_ffn", {"g": (1, 6), "u": (1, 4)}, "4"),
        ("x -> g, u, fused_ffn, src_tp=2", {"x": (1, 6)}, "6"),
        ("x -> x, fused_qkv_old, num_heads=4, num_key_value_groups=2, src_tp=4", {"x": (1, 16)}, "4"),
        ("x -> y, fused_ffn, axis=1", {"x": (16,)}, "1"),
        ("x, y -> z, axis=0", {"x": (), "y": ()}, ""),
    ],
)
def test_shapes_that_an_operation_cannot_have_are_found(text: str, shapes: dict[str, Shape], told: str) -> None:
    (problem,) = problems_of(text, shapes)
    assert told in problem
    assert "line 1" in problem


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("a, b -> c, axis=0", {"a": ((1,), "float32"), "b": ((1,), "float16")}),
        ("a, b -> c, stack=0", {"a": ((1,), "float32"), "b": ((1,), "bfloat16")}),
        ("a, b -> c, fused_ffn", {"a": ((1,), "float32"), "b": ((1,), "bfloat16")}),
        ("a -> c, src_dtype='bfloat16', dst_dtype='float16'", {"a": ((1,), "float32")}),
    ],
)
def test_dtypes_that_do_not_fit_are_named(text: str, known: Metas) -> None:
    (problem,) = problems_of(text, known)
    assert "float32" in problem
    assert "float16" in problem


def test_a_variable_may_be_assigned_again_once_it_was_read_or_dropped() -> None:
    (problem,) = problems_of("a -> b\nc -> b", {"a": (2,), "c": (2,)})
    assert "b" in problem
    Rewrite("a -> b\nb -> d\nc -> b").check({"a": (2,), "c": (2,)})
    Rewrite("a -> b\nb -> _\nc -> b").check({"a": (2,), "c": (2,)})


def test_what_is_dropped_cannot_be_read() -> None:
    (problem,) = problems_of("a -> _\na -> b", {"a": (2,)})
    assert "line 2" in problem


def test_what_is_unknown_is_shown_with_what_is_near() -> None:
    (problem,) = problems_of("model.weihgt -> w", {"model.weight": (2,), "other": (1,)})
    assert "model.weight" in problem


def test_explanation_names_targets_sources_boxes_and_operations() -> None:
    text = "a^T, b -> c, axis=1\nd -> e, dtype='bfloat16'"
    known: dict[str, Shape] = {"a": (4, 2), "b": (2, 3), "d": (5,)}
    told = Rewrite(text).explain(known)
    for word in ("c", "e", "a", "b", "d", "[0:2, 0:4]", "[0:2, 4:7]", "bfloat16"):
        assert word in told
    assert told == Rewrite(text).check(known).explain()


def test_a_mapping_with_the_flag_reads_the_statements_backwards() -> None:
    statements = ["a, b -> c, axis=0\n", "d^T -> e"]
    target: dict[str, Shape] = {"a": (1, 2), "b": (3, 2), "d": (4, 5)}
    forward = Rewrite({"aoa_statements": statements})
    backward = Rewrite({"aoa_statements": statements, "aoa_config_reverse": True})
    checked = backward.check({"c": (4, 2), "e": (5, 4)}, target)
    assert {name: meta.shape for name, meta in checked.outputs.items()} == target
    assert forward.check(target).outputs.keys() == {"c", "e"}
