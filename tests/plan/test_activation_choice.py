"""The modules that a plan of activations means; `test_refusals.py` has the names that mean none."""

from typing import Any

import pytest

from shardwise.plan.activation_choice import meant_modules
from tests.plan.outlines import Tree, model

BLOCK: Tree = {"attention": {".in": 4}, "up": 4}
NET: Tree = {"embedding": 4, "layers[]": {"0": BLOCK, "1": BLOCK}}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("blocks", ["layers.0", "layers.1"]),
        (("*.up", "layers.0"), ["layers.0", "layers.1.up"]),
        (("layers.*",), ["layers.0", "layers.1"]),
        (("*.attention", "embedding"), ["embedding", "layers.0.attention", "layers.1.attention"]),
        ((".",), [""]),
        ((".", "layers.0"), [""]),
    ],
)
def test_of_matches_inside_each_other_the_outermost_is_meant(asked: Any, meant: list[str]) -> None:
    assert meant_modules(model(NET), asked, setting="activations.checkpoint") == meant
