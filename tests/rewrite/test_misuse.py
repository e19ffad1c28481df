"""Misuse: what is no rewrite, no parameter, no tensor and no file is refused in words."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite, TensorLike, find_rewrite, shipped

QKV = "q, k, v -> x, fused_qkv, num_heads={num_heads}, num_key_value_groups={groups}"
A: dict[str, Any] = {"a": (2,)}
PATH = Path("names.rewrite")
NOT_A_TENSOR = "give a tensor, a shape such as (2, 3), or a pair (shape, dtype), not "


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RewriteError) as refused:
        call()
    return str(refused.value)


# Parameters


@pytest.mark.parametrize(
    ("text", "parameters", "message"),
    [
        ("a -> b", {"typo": 1}, "the rewrite has no parameter 'typo': it names none"),
        (
            QKV,
            {"num_head": 1, "groups": 2},
            "the rewrite has no parameter 'num_head': it names 'groups', 'num_heads'; the nearest is 'num_heads'",
        ),
        (QKV, {5: 1}, "the rewrite has no parameter 5: it names 'groups', 'num_heads'"),
        (QKV, 5, "parameters are a mapping of names to integers or text, not 5"),
        (QKV, {"groups": None}, "the parameter 'groups' is None; parameters are integers or text"),
        (QKV, {"groups": True}, "the parameter 'groups' is True; parameters are integers or text"),
    ],
)
def test_parameters_that_a_rewrite_does_not_take_are_refused(
    tmp_path: Path, text: str, parameters: Any, message: str
) -> None:
    path = tmp_path / "x.rewrite"
    path.write_text(text)
    assert refusal(lambda: Rewrite(text, parameters=parameters)) == message
    assert refusal(lambda: Rewrite(text).with_parameters(parameters)) == message
    assert refusal(lambda: Rewrite.file(path, parameters=parameters)) == f"{path}: {message}"
    assert refusal(lambda: find_rewrite(str(path), parameters=parameters)) == f"{path}: {message}"


def test_parameters_that_a_shipped_rewrite_does_not_take_are_refused_with_the_nearest() -> None:
    for call in (shipped, find_rewrite):
        message = refusal(lambda call=call: call("llama-qkv", parameters={"num_attention_head": 4}))  # type: ignore[misc]
        assert message.startswith("the rewrite has no parameter 'num_attention_head': it names ")
        assert message.endswith("; the nearest is 'num_attention_heads'")


@pytest.mark.parametrize("given_first", [True, False])
def test_a_side_of_a_composition_takes_no_parameters_of_the_other(given_first: bool) -> None:
    first = Rewrite("a -> b, c, axis={n}", parameters={"n": 0} if given_first else None)
    both = first >> Rewrite("b, c -> d, axis={n}", parameters=None if given_first else {"n": 0})
    assert both.parameters == {}
    assert refusal(lambda: both.statements).startswith("the rewrite has parameters without a value: {n}")
    axes = (0, 1) if given_first else (1, 0)
    whole = both.with_parameters({"n": 1})
    assert whole == Rewrite(f"a -> b, c, axis={axes[0]}\n---\nb, c -> d, axis={axes[1]}")
    assert whole.parameters == {"n": axes[1]}


def test_each_side_of_a_composition_keeps_its_own_parameters() -> None:
    one = Rewrite("a -> b, c, axis={n}", parameters={"n": 0}) >> Rewrite("b, c -> d, axis={n}", parameters={"n": 1})
    assert one.check({"a": (2, 3)}).outputs["d"].shape == (1, 6)
    waiting = Rewrite("a -> b, c, axis={n}", parameters={"n": 0}) >> Rewrite("b, c -> d, axis={m}")
    assert waiting.parameters_needed == {"n", "m"}
    assert waiting.with_parameters({"m": 1}) == one
    assert one.parameters == {"n": 1}
    assert refusal(lambda: one.with_parameters({"n": 2})) == (
        "the parameter 'n' is 0 and 1 already, and is not changed to 2; make the rewrite anew, from its text"
    )
    assert one.with_parameters({"n": 0}) == one
    assert refusal(lambda: one.with_parameters({"k": 1})).startswith("the rewrite has no parameter 'k': it names 'n'")


# What is no rewrite


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Rewrite(PATH), f"AOA configuration, not {PATH!r}; read a file by Rewrite.file(path)"),  # type: ignore[arg-type]
        (lambda: Rewrite.file(None), "a file is named by a path, not None"),  # type: ignore[arg-type]
        (lambda: find_rewrite(5), "a file is named by a path, not 5"),  # type: ignore[arg-type]
        (lambda: shipped(5), "a rewrite that comes with shardwise has a name, not 5"),  # type: ignore[arg-type]
        (
            lambda: Rewrite("a -> c") >> "c -> d",  # type: ignore[operator]
            "a rewrite is followed by a rewrite, not 'c -> d'; give sw.Rewrite(text)",
        ),
        (lambda: Rewrite("a -> c").inverse(lossy="Allow"), "lossy is 'refuse' or 'allow', not 'Allow'"),  # type: ignore[arg-type]
        (lambda: Rewrite("a -> c").inverse(lossy=True), "lossy is 'refuse' or 'allow', not True"),  # type: ignore[arg-type]
        (lambda: Rewrite("a -> c").check(A).inverse(lossy=None), "lossy is 'refuse' or 'allow', not None"),  # type: ignore[arg-type]
        (lambda: Rewrite("a -> c").check([1]), "sources are a mapping of names to tensors or shapes, not [1]"),  # type: ignore[arg-type]
        (lambda: Rewrite("a -> c").check(None), "sources are a mapping of names to tensors or shapes, not None"),  # type: ignore[arg-type]
        (
            lambda: Rewrite("a -> c").check(A, 5),  # type: ignore[arg-type]
            "tensors of the target are a mapping of names to tensors or shapes, not 5",
        ),
        (lambda: Rewrite("a -> c").check({5: (2,)}), "sources: 5 is no name of a tensor: names are text"),  # type: ignore[dict-item]
        (lambda: Rewrite("a -> c").check({"a": 5}), f"sources: a: {NOT_A_TENSOR}5"),  # type: ignore[dict-item]
        (lambda: Rewrite("a -> c").check({"a": (1.5,)}), f"sources: a: {NOT_A_TENSOR}(1.5,)"),
        (lambda: Rewrite("a -> c").check({"a": (-1,)}), "sources: a: shape [-1] has a negative size"),
        (lambda: Rewrite("a -> c").check({"a": ((2,), "float99")}), "sources: a: there is no dtype 'float99'; "),
        (
            lambda: Rewrite("a -> c").check(A, aliases=5),  # type: ignore[arg-type]
            "aliases are a mapping of other names to names of sources, not 5",
        ),
        (
            lambda: Rewrite("a -> c").check(A, aliases={"x": "nope"}),
            "aliases: 'x' is given as another name of 'nope', which is no source",
        ),
    ],
)
def test_what_is_not_meant_is_refused_in_words(call: Callable[[], object], message: str) -> None:
    assert message in refusal(call)


def test_a_dtype_may_be_one_of_torch() -> None:
    sources: dict[str, TensorLike] = {"a": ((2,), torch.float16), "b": torch.zeros(3, dtype=torch.bfloat16)}
    assert [meta.dtype for meta in Rewrite("a -> c").check(sources).outputs.values()] == ["bfloat16", "float16"]


# Files


@pytest.mark.parametrize("text", ["", "\n\n", "# a -> b\n", "---\n# nothing\n"])
def test_a_file_without_a_statement_is_refused_and_text_without_one_changes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.rewrite"
    path.write_text(text)
    for call in (Rewrite.file, find_rewrite):
        assert refusal(lambda call=call: call(str(path))) == (  # type: ignore[misc]
            f"{path} holds no statement: write one a line, such as `a -> b`"
        )
    assert Rewrite(text).check(A).outputs.keys() == {"a"}


def test_a_configuration_without_a_statement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"aoa_statements": [], "aoa_config_reverse": true}')
    assert "holds no statement" in refusal(lambda: Rewrite.file(path))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.rewrite").write_bytes(b"\xef\xbb\xbfa -> b\n")
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"aoa_statements": "a -> b"}')
    for name in ("x.rewrite", "x.json"):
        assert Rewrite.file(tmp_path / name) == Rewrite("a -> b")


def test_a_pipe_is_read_once() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"a -> b\n")
        os.close(writing)
        assert find_rewrite(f"/dev/fd/{reading}") == Rewrite("a -> b")
    finally:
        os.close(reading)
