"""The matcher of names against a table written by hand."""

import pytest

from shardwise.plan.names import matches

NAMES = (
    "norm.weight",
    "layers.0.norm.weight",
    "layers.0.attn.q.weight",
    "layers.10.norm.bias",
    "head[0].w?",
    "norms.w",
)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("norm.weight", ["norm.weight"]),
        ("norm", ["norm.weight"]),  # a module means all that it contains
        ("*norm", ["norm.weight", "layers.0.norm.weight", "layers.10.norm.bias"]),
        ("*norm*", ["norm.weight", "layers.0.norm.weight", "layers.10.norm.bias", "norms.w"]),
        ("*.norm.*", ["layers.0.norm.weight", "layers.10.norm.bias"]),
        ("*weight", ["norm.weight", "layers.0.norm.weight", "layers.0.attn.q.weight"]),
        ("layers", ["layers.0.norm.weight", "layers.0.attn.q.weight", "layers.10.norm.bias"]),
        ("layers.0", ["layers.0.norm.weight", "layers.0.attn.q.weight"]),
        ("layers.1", []),  # no beginning of a word
        ("layers.?", ["layers.0.norm.weight", "layers.0.attn.q.weight"]),
        ("layers.[01]*.norm", ["layers.0.norm.weight", "layers.10.norm.bias"]),
        ("layers.[!0].norm", []),
        ("Norm", []),  # case counts
        ("weight", []),  # a last word alone is no name
        ("head[0].w?", ["head[0].w?"]),  # a name means itself, whatever letters it has
        ("head[0]", ["head[0].w?"]),
        ("*", list(NAMES)),
        ("", []),
    ],
)
def test_a_pattern_means_names_and_modules_that_contain_them(pattern: str, meant: list[str]) -> None:
    assert [name for name in NAMES if matches(pattern, name)] == meant
