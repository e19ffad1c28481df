"""What the gradient of a value is on a rank along tp: whole, or a term of a sum over the ranks."""

from collections.abc import Mapping
from typing import Literal

Gradient = Literal["complete", "own", "both", "hidden"]
"""`both`: a sum of complete ones and own ones. `hidden`: the graph does not show it."""

Sources = frozenset[str | int]
"""The terms of a gradient: complete and own gradients, gradients that come back for a crossing of this number, and
marks. `hidden` is below a node with its own graph, `blurred` below one that mixes gradients from several sides.
"""


def resolve(sources: Sources, came: Mapping[int, Gradient | None]) -> Gradient | None:
    """The gradient that is a sum of these. came: what came back for each crossing; None, and left out: no gradient."""
    # A compiled node adds the gradients of all its outputs to all its inputs as far as the graph shows, so own and
    # complete ones seem to meet in every parameter inside. Where only one kind comes in, there is no doubt.
    kinds = {came.get(each) if isinstance(each, int) else each for each in sources} - {None, "blurred"}
    if not kinds:
        return None
    if "hidden" in kinds or ("blurred" in sources and len(kinds) > 1):
        return "hidden"
    if kinds == {"complete"}:
        return "complete"
    return "own" if kinds == {"own"} else "both"
