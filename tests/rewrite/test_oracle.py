"""Random rewrites equal the brute-force interpreter: forward from both sides, back, and one after the other."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import rshift

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite, TensorMeta
from shardwise.space import Box
from tests.rewrite.filling import assert_same, pushed, resolved
from tests.rewrite.oracle import Tensor, interpret, metas
from tests.rewrite.strategies import Case, cases, numbered, partitions, proven

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
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 1]), st.booleans(), st.booleans(), st.booleans())
def test_degrees_of_layouts_are_those_that_could_be_written(
    source: int, target: int, axis: int, flip: bool, turn: bool, ffn: bool
) -> None:
    size = source * target * (2 if ffn else 4)
    shape = (size, 2) if axis == 0 else (2, size)
    heads = f"num_heads={source * target * 2}, num_key_value_groups={source * target}"
    attributes = f"axis={axis}, {'fused_ffn' if ffn else f'fused_qkv_old, {heads}'}"
    x = {"x": Tensor(numbered(0, shape[::-1] if flip else shape))}
    cut = (source, 1) if axis == (1 if flip else 0) else (1, source)
    wanted = (target, 1) if axis == (1 if turn else 0) else (1, target)
    text = f"x{'^T' * flip} -> y, {attributes}{{}}{', permute=' + repr('[]') if turn else ''}"
    expected = interpret(text.format(f", src_tp={source}, dst_tp={target}"), x)
    known = {"x": TensorMeta(x["x"].shape, "float32", cut)}
    wished = {"y": TensorMeta(expected["y"].shape, "float32", wanted)}
    assert_same(resolved(Rewrite(text.format("")).check(known, wished), x, {}), expected)
    back = Rewrite(text.format("")).inverse().check(wished, known)
    assert_same(resolved(back, expected, {}), x)


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


@proven
@given(cases())
def test_a_name_of_the_first_rewrite_that_is_no_output_is_unknown_to_the_second(one: Case) -> None:
    outputs = interpret(one.text, one.sources)
    gone = sorted(set(one.sources) - set(outputs))
    assume(gone)
    both = Rewrite(one.text) >> Rewrite(f'"{gone[0]}" -> "again"')
    with pytest.raises(RewriteError) as refused:
        both.check(metas(one.sources))
    assert any(gone[0] in problem for problem in refused.value.problems)
