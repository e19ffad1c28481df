"""Rewrites as values: what they are made of, that they are equal, travel, and join."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite

FUSE = "q, k -> qk, axis=0"


def test_text_sequences_and_configurations_say_the_same() -> None:
    text = Rewrite(f"{FUSE}\nqk^T -> z")
    assert Rewrite([FUSE, "qk^T -> z"]) == text
    assert Rewrite({"aoa_statements": [FUSE, "qk^T -> z"]}) == text
    assert Rewrite({"aoa_statements": [FUSE, "qk^T -> z"], "aoa_config_reverse": False}) == text
    assert Rewrite({"aoa_statements": [FUSE, "qk^T -> z"], "aoa_config_reverse": True}) == text.inverse()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "a rewrite is text, a sequence of statements, or an AOA configuration, not 3"),
        ([1], "a rewrite is text, a sequence of statements, or an AOA configuration, not [1]"),
        ({"x": []}, "an AOA configuration has aoa_statements and perhaps aoa_config_reverse; this has 'x'"),
        ({}, "an AOA configuration has aoa_statements and perhaps aoa_config_reverse; this has nothing"),
        ({"aoa_statements": 5}, "aoa_statements are text or a sequence of statements, not 5"),
        ({"aoa_statements": [], "aoa_config_reverse": "false"}, "aoa_config_reverse is True or False, not 'false'"),
        ({"aoa_statements": [], "aoa_config_reverse": 1}, "aoa_config_reverse is True or False, not 1"),
    ],
)
def test_what_is_no_rewrite_is_refused(source: Any, message: str) -> None:
    with pytest.raises(RewriteError) as refused:
        Rewrite(source)
    assert str(refused.value) == message


def test_a_file_has_text_or_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.rewrite").write_text(f"# fuses\n{FUSE}\n")
    (tmp_path / "a.json").write_text(json.dumps({"aoa_statements": [FUSE], "aoa_config_reverse": True}))
    assert Rewrite.file(tmp_path / "a.rewrite") == Rewrite(FUSE)
    assert Rewrite.file(tmp_path / "a.json") == Rewrite(FUSE).inverse()


def test_a_file_that_is_no_rewrite_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b").write_text("a -> ")
    for name in ("a.json", "b", "c"):
        with pytest.raises(RewriteError, match=str(tmp_path / name)):
            Rewrite.file(tmp_path / name)


def test_an_inverse_that_lacks_parameters_is_shown_as_one() -> None:
    forward = Rewrite("a -> b, c, axis={n}") >> Rewrite("b -> d")
    inverse = forward.inverse()
    assert str(forward) == "a -> b, c, axis={n}\n---\nb -> d"
    assert str(inverse) == "# inverse of:\nb -> d\n---\n# inverse of:\na -> b, c, axis={n}"
    assert str(inverse.inverse()) == str(forward)
    assert inverse.inverse() == forward != inverse


def test_a_rewrite_with_its_parameters_is_read_into_an_equal_one() -> None:
    forward = (Rewrite("a -> b, c, axis={n}") >> Rewrite("b -> d")).with_parameters({"n": 1})
    assert Rewrite(str(forward)) == forward
    assert Rewrite(str(forward.inverse())) == forward.inverse() != forward


def test_what_was_checked_shows_its_outputs_as_metas_and_nothing_to_change() -> None:
    checked = Rewrite("a^T -> b").check({"a": (2, 3)})
    checked.outputs.clear()  # type: ignore[attr-defined]
    assert checked.outputs["b"].shape == (3, 2)
    assert not hasattr(checked, "nodes")


def test_a_rewrite_waits_for_its_parameters() -> None:
    rewrite = Rewrite(
        "q,k,v -> x, fused_qkv, num_heads={heads}, num_key_value_groups={groups}", parameters={"heads": 4}
    )
    assert rewrite.parameters_needed == {"heads", "groups"}
    assert rewrite.parameters == {"heads": 4}
    for use in (lambda: rewrite.statements, lambda: rewrite.check({})):
        with pytest.raises(RewriteError, match=r"without a value: \{groups\}; give them, parameters=\{'groups': 8\}"):
            use()
    whole = rewrite.with_parameters({"groups": 2})
    assert whole.check({"q": (8,), "k": (4,), "v": (4,)}).outputs["x"].shape == (16,)
    assert whole == Rewrite("q,k,v -> x, fused_qkv, num_heads=4, num_key_value_groups=2")
    both = (rewrite >> Rewrite("x -> y")).with_parameters({"groups": 2})
    assert both == whole >> Rewrite("x -> y")


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


def test_the_text_of_a_rewrite_is_a_rewrite_that_is_equal() -> None:
    rewrite = Rewrite(f"{FUSE}; qk^T -> z, dtype='float16'; _ -> w; z -> \"a-b\", optional=1")
    assert Rewrite(str(rewrite)) == rewrite
    assert repr(Rewrite("a->b")) == "Rewrite('a -> b')"


def test_a_second_rewrite_sees_what_comes_out_of_the_first() -> None:
    both = Rewrite("a -> b; t -> t2") >> Rewrite("b^T -> c")
    checked = both.check({"a": (2, 3), "t": (1,)}, {"c": (3, 2), "t2": (1,)})
    assert {name: meta.shape for name, meta in checked.outputs.items()} == {"t2": (1,), "c": (3, 2)}
    assert checked.sources_of("c") == {"a"}
    back = both.inverse()
    assert back.check(checked.outputs, {"a": (2, 3), "t": (1,)}).outputs.keys() == {"a", "t"}


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


def test_findings_in_all_stages_come_at_once_with_their_lines() -> None:
    with pytest.raises(RewriteError) as caught:
        Rewrite("a ->\n---\n\nb -> c, axs=1\n")
    assert [problem.split(",")[0] for problem in caught.value.problems] == ["line 1", "line 4"]
    with pytest.raises(RewriteError, match="line 3, column 1: there is no tensor a"):
        Rewrite("a -> b\n---\na -> c").check({"a": (1,)})


def test_a_drop_that_may_match_nothing_does_not_keep_a_rewrite_from_being_undone() -> None:
    rewrite = Rewrite("a -> b\nx -> _, optional=1")
    assert str(rewrite.inverse()) == "b -> a"
    assert rewrite.inverse().check({"b": (2,)}, {"a": (2,)}).outputs.keys() == {"a"}
    with pytest.raises(RewriteError, match="drops x"):
        rewrite.check({"a": (2,), "x": (3,)}).inverse()
    with pytest.raises(RewriteError, match="drops x"):
        rewrite.inverse().check({"b": (2,)}, {"a": (2,), "x": (3,)})
