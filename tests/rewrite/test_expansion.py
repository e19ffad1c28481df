"""Expansion: which names the instances of a statement have, and what is said where they do not fit together."""

import pytest

from shardwise.rewrite.environment import Environment
from shardwise.rewrite.expansion import expand
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.patterns import NameIndex
from shardwise.rewrite.sections import nodes_of
from shardwise.rewrite.syntax import parse


def expanded(text: str, names: str, wanted: str | None = None) -> list[str]:
    """The instances of a statement for names that are there; fails on findings."""
    instances, problems = _expand(text, names, wanted)
    assert not problems
    return instances


def problem(text: str, names: str, wanted: str | None = None) -> str:
    """The one message that there is."""
    instances, problems = _expand(text, names, wanted)
    assert not instances
    (message,) = problems
    return message


def _expand(text: str, names: str, wanted: str | None) -> tuple[list[str], list[str]]:
    (statement,) = parse(text, {})
    environment = Environment(nodes_of(dict.fromkeys(names.split(), TensorMeta((2,), "float32"))).items())
    index = None if wanted is None else NameIndex(wanted.split())
    instances, findings = expand(statement, environment, index)
    return [str(each) for each in instances], [finding.message for finding in findings]


EXPANSIONS = {
    "plain": ("a, b -> c, axis=0", "a b z", ["a, b -> c"]),
    "a placeholder": ("l.$L.w -> m.$L.w", "l.10.w l.2.w x l.w", ["l.10.w -> m.10.w", "l.2.w -> m.2.w"]),
    "twice in a name": ("l.$L.$L -> m.$L", "l.1.1 l.1.2", ["l.1.1 -> m.1"]),
    "inside a word": ("w1$L.a -> $L.a", "w10.a w2.a", ["w10.a -> 0.a"]),
    "a join": ("q.$L, k.$L -> f.$L, axis=0", "q.0 k.1 q.1 k.0", ["q.0, k.0 -> f.0", "q.1, k.1 -> f.1"]),
    "crossed": ("a.$L.$E, b.$E.$L -> c.$L.$E, axis=0", "a.1.2 b.2.1", ["a.1.2, b.2.1 -> c.1.2"]),
    "ragged": ("l.$L.$E -> $E.x.$L", "l.0.0 l.0.1 l.1.7", ["l.0.0 -> 0.x.0", "l.0.1 -> 1.x.0", "l.1.7 -> 7.x.1"]),
    "shared": ("s, a.$L -> b.$L, axis=0", "s a.0 a.1", ["s, a.0 -> b.0", "s, a.1 -> b.1"]),
    "one per layer": (
        "n.$L, e.$L.$E -> o.$L.$E, axis=0",
        "n.0 n.1 e.0.3 e.1.4 e.1.5",
        ["n.0, e.0.3 -> o.0.3", "n.1, e.1.4 -> o.1.4", "n.1, e.1.5 -> o.1.5"],
    ),
    "a star": ("e.*.w -> b, axis=0", "e.10.w e.9.w e.0.w", ["e.0.w, e.9.w, e.10.w -> b"]),
    "two stars": ("a.*, b.* -> c, axis=0", "a.1 a.0 b.5", ["a.0, a.1, b.5 -> c"]),
    "a star in each layer": (
        "l.$L.*.w -> l.$L, axis=0",
        "l.0.1.w l.1.0.w l.0.0.w",
        ["l.0.0.w, l.0.1.w -> l.0", "l.1.0.w -> l.1"],
    ),
    "the layer before": ("m.$L.w -> m.$L-1.w", "m.1.w m.2.w", ["m.1.w -> m.0.w", "m.2.w -> m.1.w"]),
    "AOA's offset": ("m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET", "m.1", ["m.1 -> m.0"]),
    "a shift on the left": ("m.$L+1 -> n.$L", "m.1 m.2 m.0", ["m.1 -> n.0", "m.2 -> n.1"]),
    "leading zeros": ("m.$L -> n.$L, o.$L, axis=0", "m.007", ["m.007 -> n.007, o.007"]),
    "an optional one": ("z.$L -> y.$L, optional=1", "a", []),
    "an optional plain one": ("z -> y, optional=1", "a", []),
    "a drop": ("a.$L -> _", "a.0 a.1", ["a.0 -> _", "a.1 -> _"]),
}


@pytest.mark.parametrize("name", EXPANSIONS)
def test_instances_have_these_names(name: str) -> None:
    text, names, expected = EXPANSIONS[name]
    assert expanded(text, names) == expected


def test_what_only_the_right_has_comes_from_the_target() -> None:
    assert expanded("w -> e.*, axis=0", "w", "e.10 e.2 f.1") == ["w -> e.2, e.10"]
    assert expanded("w.$L -> e.$L.*, axis=0", "w.0 w.1", "e.0.0 e.1.4 e.1.3") == ["w.0 -> e.0.0", "w.1 -> e.1.3, e.1.4"]
    assert expanded("w -> e.$E", "w", "e.0 e.1") == ["w -> e.0", "w -> e.1"]
    assert expanded("_ -> n.$L", "w", "n.0 n.1") == ["_ -> n.0", "_ -> n.1"]


PROBLEMS = {
    "absent": ("b -> c", "bb", "there is no tensor b; there is bb"),
    "nothing like it": ("l.$L.w -> m.$L", "l.w", "no tensor has a name like l.$L.w; write optional=1 if that may be"),
    "half of an optional one": ("a.$L, b.$L -> c.$L, axis=0, optional=1", "a.0", "no tensor has a name like b.$L"),
    "a missing partner": (
        "q.$L, k.$L -> f.$L, axis=0",
        "q.0 q.1 k.0",
        "k.1 is not there, and q.1 needs it",
    ),
    "a missing first": ("q.$L, k.$L -> f.$L, axis=0", "q.0 k.0 k.1", "q.1 is not there, and k.1 needs it"),
    "many missing": (
        "q.$L, k.$L -> f.$L, axis=0",
        "q.0 k.0 q.1 q.2 q.3 q.4",
        "k.1 is not there, and q.1 needs it; k.2 is not there, and q.2 needs it; "
        "k.3 is not there, and q.3 needs it (and 1 more like it)",
    ),
    "a missing layer": (
        "n.$L, e.$L.$E -> o.$L.$E, axis=0",
        "n.0 e.0.0 n.1",
        "e.1.$E is not there, and n.1 needs it",
    ),
    "one number twice": ("e.* -> b, axis=0", "e.1 e.01", "the star of e.* stands for 1 in both e.01 and e.1"),
    "a negative number": ("m.$L -> m.$L-1", "m.0", "m.$L-1 would hold a negative number for m.0"),
    "no target": (
        "w -> e.*, axis=0",
        "w",
        "* has no value on the left, and no target is known whose names give it one",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_names_that_do_not_fit_together_are_told(name: str) -> None:
    text, names, message = PROBLEMS[name]
    assert problem(text, names) == message


def test_a_target_without_such_names_is_told() -> None:
    assert problem("w.$L -> e.$L.*, axis=0", "w.0 w.1", "e.0.0") == "the target has no name like e.1.*"


def test_digits_that_could_be_told_apart_in_two_ways_are_refused() -> None:
    message = problem('"m.$A\\5$B" -> n.$A.$B', "m.151")
    assert message == "nothing but digits stands between two placeholders of m.$A5$B: put text there"


def test_runs_of_digits_that_are_too_long_for_integers_are_ordered_and_shifted() -> None:
    long, padded = "9" * 5000, "0" * 5000 + "3"
    assert expanded("e.* -> b, axis=0", f"e.{long} e.{padded} e.8 e.0") == [f"e.0, e.{padded}, e.8, e.{long} -> b"]
    assert expanded("m.$L -> n.$L+1", f"m.{long}") == [f"m.{long} -> n.1{'0' * 5000}"]
    assert problem("e.* -> b, axis=0", f"e.0 e.{'0' * 5000}").startswith("the star of e.* stands for 0 in both e.0")
