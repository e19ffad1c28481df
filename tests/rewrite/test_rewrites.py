"""Rewrites: random ones equal the brute-force interpreter, there, back and joined; misuse is refused in words."""

import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import rshift
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.errors import RewriteError
from shardwise.rewrite import Checked, Rewrite, TensorLike, find_rewrite, shipped
from shardwise.space import Box
from tests.refusals import Refusals
from tests.rewrite.filling import assert_same, pushed, resolved
from tests.rewrite.oracle import Tensor, interpret, metas
from tests.rewrite.strategies import Case, cases, partitions, proven

any_case = cases() | cases(lossy=True) | cases(with_state=True) | cases(lossy=True, with_state=True)


def _partitions(data: st.DataObject, tensors: Mapping[str, Tensor]) -> dict[str, Sequence[Box]]:
    return {name: data.draw(partitions(tensor.shape), label=name) for name, tensor in tensors.items()}


@proven
@given(any_case, st.data())
def test_any_boxes_of_the_outputs_are_resolved_to_what_the_oracle_makes(case: Case, data: st.DataObject) -> None:
    expected = interpret(case.text, case.sources)
    checked = Rewrite(case.text).check(metas(case.sources))
    assert_same(resolved(checked, case.sources, _partitions(data, expected)), expected)


@proven
@given(any_case, st.data())
def test_any_boxes_of_the_sources_are_pushed_to_what_the_oracle_makes(case: Case, data: st.DataObject) -> None:
    expected = interpret(case.text, case.sources)
    checked = Rewrite(case.text).check(metas(case.sources))
    assert_same(pushed(checked, case.sources, _partitions(data, case.sources)), expected)


@proven
@given(cases() | cases(with_state=True))
def test_the_inverse_of_a_lossless_rewrite_gives_the_sources_back_to_the_bit(case: Case) -> None:
    checked = Rewrite(case.text).check(metas(case.sources))
    outputs = resolved(checked, case.sources, {})
    assert checked.invertible, checked.losses
    assert checked.losses == ()
    inverse = checked.inverse()
    assert_same(resolved(inverse.check(metas(outputs)), outputs, {}), case.sources)
    again = Rewrite(str(inverse))
    assert again == inverse
    assert_same(resolved(again.check(metas(outputs)), outputs, {}), case.sources)


@proven
@given(cases() | cases(with_state=True))
def test_the_inverse_of_the_text_alone_takes_the_rest_from_the_target(case: Case) -> None:
    outputs = interpret(case.text, case.sources)
    inverse = Rewrite(case.text).inverse()
    assert_same(resolved(inverse.check(metas(outputs), metas(case.sources)), outputs, {}), case.sources)
    forward = inverse.inverse().check(metas(case.sources))
    assert_same(resolved(forward, case.sources, {}), outputs)
    exact = Rewrite(case.text).inverse(metas(case.sources))
    assert_same(resolved(exact.check(metas(outputs)), outputs, {}), case.sources)


@proven
@given(cases(lossy=True) | cases(lossy=True, with_state=True))
def test_what_is_lost_is_named_and_all_else_comes_back(case: Case) -> None:
    assume(not case.lossless)
    checked = Rewrite(case.text).check(metas(case.sources))
    outputs = interpret(case.text, case.sources)
    if checked.invertible:  # of a copy that was dropped the other is left; what was widened may be narrowed again
        back = checked.inverse().check(metas(outputs))
        assert_same(resolved(back, outputs, {}), case.sources)
        return
    assert checked.losses
    with pytest.raises(RewriteError) as refused:
        checked.inverse()
    assert refused.value.problems
    inverse = checked.inverse(lossy="allow").check(metas(outputs), metas(case.sources))
    restored = resolved(inverse, outputs, {})
    for name, tensor in restored.items():
        assert tensor.shape == case.sources[name].shape
        assert tensor.dtype == case.sources[name].dtype
    assert restored.keys() | inverse.added == case.sources.keys()
    changes = any(word in case.text for word in ("float16", "crop"))
    kept = {name: tensor for name, tensor in restored.items() if not changes}
    assert_same(kept, {name: case.sources[name] for name in kept})


@proven
@given(any_case)
def test_rewrites_in_one_equal_one_after_the_other(case: Case) -> None:
    sections = [Rewrite(text) for text in case.sections]
    checked = reduce(rshift, sections).check(metas(case.sources))
    expected = reduce(lambda tensors, text: interpret(text, tensors), case.sections, case.sources)
    assert_same(resolved(checked, case.sources, {}), expected)
    assert_same(pushed(checked, case.sources, {}), expected)
    assert reduce(Rewrite.then, sections) == reduce(rshift, sections)
    if case.lossless:
        assert checked.invertible
        assert_same(resolved(checked.inverse().check(metas(expected)), expected, {}), case.sources)


FUSE = "q, k -> qk, axis=0"


def test_text_sequences_configurations_and_files_say_the_same(tmp_path: Path) -> None:
    text = Rewrite(f"{FUSE}\nqk^T -> z")
    assert Rewrite([FUSE, "qk^T -> z"]) == text
    for flag, expected in ((False, text), (True, text.inverse())):
        configuration = {"aoa_statements": [FUSE, "qk^T -> z"], "aoa_config_reverse": flag}
        assert Rewrite(configuration) == expected
        (tmp_path / "a.json").write_text(json.dumps(configuration), encoding="utf-8-sig")
        assert Rewrite.file(tmp_path / "a.json") == expected
    (tmp_path / "a.rewrite").write_text(f"# fuses\n{FUSE}\nqk^T -> z", encoding="utf-8-sig")
    assert Rewrite.file(tmp_path / "a.rewrite") == find_rewrite(str(tmp_path / "a.rewrite")) == text


def test_an_inverse_that_lacks_parameters_is_shown_as_one() -> None:
    forward = Rewrite("a -> b, c, axis={n}") >> Rewrite("b -> d")
    inverse = forward.inverse()
    assert str(forward) == "a -> b, c, axis={n}\n---\nb -> d"
    assert str(inverse) == "# inverse of:\nb -> d\n---\n# inverse of:\na -> b, c, axis={n}"
    assert str(inverse.inverse()) == str(forward)
    assert inverse.inverse() == forward != inverse


def test_a_rewrite_waits_for_its_parameters() -> None:
    text = "q,k,v -> x, fused_qkv, num_heads={heads}, num_key_value_groups={ groups }"
    rewrite = Rewrite(text, parameters={"heads": 4})
    assert rewrite.parameters_needed == {"heads", "groups"}
    assert rewrite.parameters == {"heads": 4}
    whole = rewrite.with_parameters({"groups": "2"})
    assert whole.check({"q": (8,), "k": (4,), "v": (4,)}).outputs["x"].shape == (16,)
    assert whole == Rewrite(text.format(heads=4, **{" groups ": 2}))
    assert (rewrite >> Rewrite("x -> y")).with_parameters({"groups": 2}) == whole >> Rewrite("x -> y")
    shaped = Rewrite("a -> b, c, axis={axis}, sizes='[{first}, {second}]', permute={dims}, dtype='{kind}'")
    given: dict[str, int | str] = {"axis": -1, "first": 3, "second": 5, "dims": "[1,0]", "kind": "float16"}
    assert str(shaped.with_parameters(given)) == ("a -> b, c, axis=-1, sizes='[3,5]', permute='[1,0]', dtype='float16'")


def test_rewrites_are_equal_when_they_say_the_same() -> None:
    assert Rewrite("a->b ;c -> d") == Rewrite(["a -> b", "c -> d  # and so on"])
    assert hash(Rewrite("a->b")) == hash(Rewrite("a -> b"))
    assert Rewrite("a -> b") != Rewrite("a -> c")
    assert Rewrite("a -> b; b -> c") != Rewrite("a -> b") >> Rewrite("b -> c")
    assert Rewrite("a -> b") != "a -> b"


def test_rewrites_travel_between_processes() -> None:
    for rewrite in (
        Rewrite(FUSE),
        Rewrite(FUSE).inverse(),
        Rewrite(FUSE) >> Rewrite("qk -> z"),
        Rewrite("a -> b, axis={x}"),
    ):
        assert pickle.loads(pickle.dumps(rewrite)) == rewrite


def test_losses_of_all_stages_are_named() -> None:
    both = Rewrite("a -> b, dtype='float16'; x -> _") >> Rewrite("b -> c; y -> _")
    checked = both.check({"a": (2,), "x": (1,), "y": (3,)})
    assert len(checked.losses) == 3
    assert checked.dropped == {"x", "y"}
    assert both.inverse(lossy="allow").check(checked.outputs, {"a": (2,), "x": (1,), "y": (3,)}).added == {"x", "y"}


def test_the_text_of_stages_has_a_line_between_them_and_is_read_again() -> None:
    one, other = Rewrite("a -> b"), Rewrite("b^T -> c\nx -> b")
    both = one >> other
    assert str(both) == "a -> b\n---\nb^T -> c\nx -> b"
    assert Rewrite(str(both)) == both
    assert Rewrite(str(both.inverse())) == both.inverse()
    assert Rewrite(str(both)).inverse().inverse() == both
    sources = {"a": (2, 3), "x": (4,)}
    outputs = both.check(sources).outputs
    assert {name: meta.shape for name, meta in outputs.items()} == {"c": (3, 2), "b": (4,)}
    back = Rewrite(str(both.check(sources).inverse())).check(outputs).outputs
    assert {name: meta.shape for name, meta in back.items()} == sources
    reverse = Rewrite({"aoa_statements": ["a -> b", "---", "b -> c"], "aoa_config_reverse": True})
    assert str(reverse) == "c -> b\n---\nb -> a"


def test_a_drop_that_may_match_nothing_does_not_keep_a_rewrite_from_being_undone() -> None:
    rewrite = Rewrite("a -> b\nx -> _, optional=1")
    assert str(rewrite.inverse()) == "b -> a"
    assert rewrite.inverse().check({"b": (2,)}, {"a": (2,)}).outputs.keys() == {"a"}
    with pytest.raises(RewriteError, match="drops x"):
        rewrite.check({"a": (2,), "x": (3,)}).inverse()
    with pytest.raises(RewriteError, match="drops x"):
        rewrite.inverse().check({"b": (2,)}, {"a": (2,), "x": (3,)})


@pytest.mark.parametrize(("first", "second"), [(0, None), (None, 0), (0, 1)])
def test_each_side_of_a_composition_keeps_its_own_parameters(first: int | None, second: int | None) -> None:
    given = [{} if each is None else {"n": each} for each in (first, second)]
    both = Rewrite("a -> b, c, axis={n}", parameters=given[0]) >> Rewrite("b, c -> d, axis={n}", parameters=given[1])
    axes = [1 if each is None else each for each in (first, second)]
    whole = both.with_parameters({"n": 1})
    assert whole == Rewrite(f"a -> b, c, axis={axes[0]}\n---\nb, c -> d, axis={axes[1]}")
    assert whole.check({"a": (2, 2)}).outputs["d"].shape == Rewrite(str(whole)).check({"a": (2, 2)}).outputs["d"].shape
    assert (both.parameters, whole.parameters) == ({} if None in (first, second) else {"n": 1}, {"n": axes[1]})


def test_a_dtype_may_be_one_of_torch() -> None:
    sources: dict[str, TensorLike] = {"a": ((2,), torch.float16), "b": torch.zeros(3, dtype=torch.bfloat16)}
    assert [meta.dtype for meta in Rewrite("a -> c").check(sources).outputs.values()] == ["bfloat16", "float16"]


def test_a_pipe_is_read_once() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"a -> b\n")
        os.close(writing)
        assert find_rewrite(f"/dev/fd/{reading}") == Rewrite("a -> b")
    finally:
        os.close(reading)


QKV = "q, k, v -> x, fused_qkv, num_heads={num_heads}, num_key_value_groups={groups}"
A: dict[str, Any] = {"a": (2,)}
ANY: Any = Rewrite
"""What is given wrongly is not what its type says."""


def file_of(text: str, name: str = "x.rewrite", find: Any = Rewrite.file) -> Callable[[Path], object]:
    def call(folder: Path) -> object:
        (folder / name).write_text(text)
        return find(str(folder / name))

    return call


def two_sides() -> Any:
    return ANY("a -> b, c, axis={n}", parameters={"n": 0}) >> ANY("b, c -> d, axis={n}", parameters={"n": 1})


def parameters(text: str, given: Any) -> dict[str, Callable[..., object]]:
    """The same words, whichever way they are given."""
    return {
        f"{text!r} with {given}": lambda: ANY(text, parameters=given),
        f"{text!r} with {given} later": lambda: ANY(text).with_parameters(given),
        f"a file of {text!r} with {given}": file_of(text, find=lambda path: find_rewrite(path, parameters=given)),
    }


REFUSED = Refusals(
    "rewrite.rewrites",
    {
        **parameters("a -> b", {"typo": 1}),
        **parameters(QKV, {"num_head": 1, "groups": 2}),
        **parameters(QKV, 5),
        **parameters(QKV, {"groups": None}),
        **parameters(QKV, {"groups": True}),
        **parameters("a -> b, axis={real}", {"real": 1.5}),
        **parameters("a -> b, axis={text}", {"text": "eight"}),
        **parameters("a -> b, permute='[{heads}]'", {"heads": 8}),
        "a name of none": lambda: Rewrite("a -> b, axis={}"),
        "a shipped one": lambda: shipped("llama-qkv", parameters={"num_attention_head": 4}),
        "parameters without a value": lambda: Rewrite(QKV, parameters={"num_heads": 4}).check(A),
        "two values already": lambda: two_sides().with_parameters({"n": 2}),
        "a parameter of neither side": lambda: two_sides().with_parameters({"k": 1}),
        "a list of numbers": lambda: ANY([1]),
        "a path": lambda: ANY(Path("names.rewrite")),
        "another mapping": lambda: ANY({"x": []}),
        "an empty mapping": lambda: ANY({}),
        "statements that are a number": lambda: ANY({"aoa_statements": 5}),
        "a flag that is text": lambda: ANY({"aoa_statements": [], "aoa_config_reverse": "false"}),
        "a file that is None": lambda: ANY.file(None),
        "a shipped name that is a number": lambda: shipped(5),  # type: ignore[arg-type]
        "a shipped name that is near": lambda: shipped("lama-qkv"),
        "neither a file nor a name": lambda: find_rewrite("nothing"),
        "followed by text": lambda: ANY("a -> c") >> "c -> d",
        "lossy in capitals": lambda: ANY("a -> c").inverse(lossy="Allow"),
        "lossy as a flag": lambda: ANY("a -> c").inverse(lossy=True),
        "lossy of what was checked": lambda: ANY("a -> c").check(A).inverse(lossy=None),
        "sources that are a list": lambda: ANY("a -> c").check([1]),
        "no sources": lambda: ANY("a -> c").check(None),
        "a target that is a number": lambda: ANY("a -> c").check(A, 5),
        "a source that is a number": lambda: ANY("a -> c").check({5: (2,)}),
        "a shape that is a number": lambda: ANY("a -> c").check({"a": 5}),
        "a size that is a fraction": lambda: ANY("a -> c").check({"a": (1.5,)}),
        "a negative size": lambda: ANY("a -> c").check({"a": (-1,)}),
        "an unknown dtype": lambda: ANY("a -> c").check({"a": ((2,), "float99")}),
        "aliases that are a number": lambda: ANY("a -> c").check(A, aliases=5),
        "an alias of nothing": lambda: ANY("a -> c").check(A, aliases={"x": "nope"}),
        "a second stage that reads what is gone": lambda: Rewrite("a -> b\n---\na -> c").check(A),
        "an empty file": file_of(""),
        "a file of empty stages": file_of("---\n# nothing\n", find=find_rewrite),
        "a configuration without statements": file_of('{"aoa_statements": [], "aoa_config_reverse": true}', "x.json"),
        "a file that is not JSON": file_of("{", "x.json"),
        "a file with an error": file_of("a -> "),
        "a file that is not there": lambda folder: Rewrite.file(folder / "x.rewrite"),
    },
    kind=RewriteError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_meant_is_refused_in_words(case: str) -> None:
    REFUSED.check(case)


STATEMENTS = """
l.$L.q^T, l.$L.k^T, l.$L.v^T -> m.$L.qkv, fused_qkv, num_heads=4, num_key_value_groups=2
l.$L.e.$E.gate^T, l.$L.e.$E.up^T -> m.$L.e.$E.gate_up, fused_ffn, dst_tp=2
l.$L.e.*.down -> m.$L.down, stack=0
l.$L.fused -> m.$L.one, m.$L.two, axis=0, dtype='float32'
"""


def layers(number: int) -> dict[str, tuple[int, ...]]:
    """35 names a layer."""
    known: dict[str, tuple[int, ...]] = {}
    for layer in range(number):
        known |= {f"l.{layer}.{x}": (8 if x == "q" else 4, 8) for x in "qkv"}
        known |= {f"l.{layer}.fused": (6, 2), f"l.{layer}.untouched": (3,)}
        known |= {f"l.{layer}.e.{at}.{x}": (4, 8) for at in range(10) for x in ("gate", "up", "down")}
    return known


def num_lines(work: Callable[[], Any]) -> int:
    """How many lines of Python the work runs."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_rank_of_two(checked: Checked) -> None:
    """Every output's first half along its last dim."""
    for name, (shape, *_) in checked.outputs.items():
        box = Box((0,) * len(shape), (*shape[:-1], (shape[-1] + 1) // 2))
        assert checked.resolve(name, box)


def single_parts(checked: Checked) -> None:
    """Each row of a join: finding one among many may cost the logarithm."""
    for at in range(checked.outputs["w"].shape[0]):
        checked.resolve("w", Box((at, 0), (1, 2)))


JOIN = "e.*.w -> w, axis=0"
WORK: dict[str, tuple[Callable[[int], Callable[[], Any]], float]] = {
    "check": (lambda scale: lambda: Rewrite(STATEMENTS).check(layers(4 * scale)), 1.3),
    "resolve": (lambda scale: partial(one_rank_of_two, Rewrite(STATEMENTS).check(layers(4 * scale))), 1.3),
    "inverse": (lambda scale: Rewrite(STATEMENTS).check(layers(4 * scale)).inverse, 1.3),
    "join": (
        lambda scale: partial(single_parts, Rewrite(JOIN).check({f"e.{at}.w": (1, 2) for at in range(50 * scale)})),
        2,
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_work_grows_with_the_number_of_names_and_no_faster(name: str) -> None:
    work, factor = WORK[name]
    small, large = num_lines(work(1)), num_lines(work(8))
    assert large <= 8 * factor * small, (small, large)
