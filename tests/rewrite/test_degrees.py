"""Degrees of fused tensors: they follow the data from layouts and to them; what layouts do not tell is refused."""

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import pytest

from shardwise.errors import RewriteError
from shardwise.rewrite import Checked, Rewrite, TensorMeta
from tests.refusals import Refusals
from tests.rewrite.degree_oracle import NotToldError, interpret_laid
from tests.rewrite.filling import assert_same, resolved
from tests.rewrite.oracle import Tensor, Values
from tests.rewrite.strategies import OpenChain, open_chain

Layouts = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def metas(layouts: Layouts) -> dict[str, TensorMeta]:
    return {name: TensorMeta(shape, "float32", degrees) for name, (shape, degrees) in layouts.items()}


def numbered(*shape: int) -> Values:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def told(way: Callable[[], Checked], sources: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """What a rewrite makes of sources; None where it is refused, which says which degree to give."""
    try:
        checked = way()
    except RewriteError as refused:
        message = str(refused)
    else:
        return resolved(checked, sources, {})
    assert re.search(r"Write (src|dst)_tp=|does not divide|cannot be undone exactly", message), message
    return None


STRESS = [pytest.param(first, marks=pytest.mark.stress) for first in range(200, 3000, 10)]


@pytest.mark.parametrize("first", [*range(0, 200, 10), *STRESS])
def test_what_no_rank_could_do_alone_is_laid_out_as_found_by_brute_force_and_seldom_refused(first: int) -> None:
    """Where one of several tensors is cut in an unknown way, along another dim, all of it is said to be unknown."""
    made = list(filter(None, (laid_out_like_brute_force(open_chain(Random(first + at))) for at in range(10))))
    assert made.count("made") > 1
    assert made.count("refused") <= 2


def laid_out_like_brute_force(case: OpenChain) -> str:
    """Whether it was made or refused; empty where the oracle cannot tell a degree, and nothing else may."""
    rewrite, sources = Rewrite(case.text), laid_out(case.sources)
    layouts = {name: each.degrees for name, each in case.target.items()}
    made = told(lambda: rewrite.check(sources, case.target), case.sources)
    try:
        expected = interpret_laid(case.text, case.sources, layouts)
    except NotToldError:
        assert made is None
        return ""
    if made is None:
        return "refused"
    assert_same(made, expected)
    checked = rewrite.check(sources, case.target)
    if not checked.invertible:
        return "made"
    bare = {name: (each.shape, each.dtype) for name, each in case.target.items()}
    plain = {name: (each.shape, each.dtype) for name, each in sources.items()}
    lasting = checked.lasting_degrees
    # As a save has it that is cut in other ways by now, and knows how its tensors were fused.
    saved = {
        name: meta._replace(degrees=lasting[name], recorded=True) if name in lasting else meta
        for name, meta in case.relaid.items()
    }
    ways: list[Callable[[], Checked]] = [
        lambda: checked.inverse().check(case.target, sources),
        lambda: rewrite.inverse().check(case.target, sources),
        lambda: rewrite.inverse().check(saved, sources),
        lambda: Rewrite(str(rewrite.check(plain).inverse())).check(case.target, sources),
    ]
    assert_same(resolved(checked.inverse().check(bare), made, {}), case.sources)
    for back in [told(way, made) for way in ways]:
        if back is not None:
            assert_same(back, case.sources)
    return "made"


def laid_out(tensors: Mapping[str, Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(each.shape, each.dtype, each.degrees) for name, each in tensors.items()}


def untold(text: str, sources: Layouts, target: Layouts | None = None) -> Any:
    return lambda: Rewrite(text).apply(metas(sources), wanted=None if target is None else metas(target))


FUSE = "g, u -> t, fused_ffn, axis=0; t -> x"
PART = "t -> g, u, fused_ffn, axis=0"
GU: Layouts = {"g": ((4,), ()), "u": ((4,), ())}
X: Layouts = {"x": ((8,), (2,))}
REFUSED = Refusals(
    "rewrite.degrees",
    {
        "unknown, through a name": untold(FUSE, GU, {"x": ((8,), (0,))}),
        "unknown, read through a transpose": untold(f"x^T -> t; {PART}", {"x": ((1, 8), (1, 0))}),
        "two copies that lie differently": untold(f"{FUSE}; t -> y", GU, {**X, "y": ((8,), (4,))}),
        "a stack of tensors that are cut differently": untold(
            "x, y -> t, stack=0; t -> g, u, fused_ffn, axis=1", {**X, "y": ((8,), (4,))}
        ),
        "an uneven part": untold(f"x -> s, t, axis=0, sizes='[2,6]'; {PART}; s -> o", X),
        "ranks in another order": untold(f"x -> a, b, axis=0; b, a -> t, axis=0; {PART}", X),
        "a cut that becomes two dims": untold(
            "x -> t, reshape='[2,4]'; t -> g, u, fused_ffn, axis=1", {"x": ((8,), (4,))}
        ),
        "half of it dropped": untold(f"{FUSE}, y, axis=0; y -> _", GU, {"x": ((4,), (2,))}),
        "beside other findings": lambda: Rewrite(f"{FUSE}\na -> b, c, axis=0").apply(
            {"g": (4,), "u": (4,), "a": (3,)}, wanted={"x": TensorMeta((8,), "float32", (0,))}
        ),
    },
    kind=RewriteError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_layouts_do_not_tell_is_to_be_said(case: str) -> None:
    REFUSED.check(case)


def test_an_inverse_says_the_degrees_that_layouts_told_and_leaves_open_what_none_told() -> None:
    sources = {"g": (4,), "u": (4,)}
    cut, whole = ({"x": TensorMeta((8,), "float32", degrees)} for degrees in ((2,), (1,)))
    assert str(Rewrite(FUSE).check(sources).inverse()) == "x -> t\nt -> g, u, fused_ffn, axis=0"
    assert str(Rewrite(FUSE).check(sources, cut).inverse()) == "x -> t\nt -> g, u, fused_ffn, axis=0, src_tp=2"
    assert str(Rewrite(FUSE).check(sources, whole).inverse()) == "x -> t\nt -> g, u, fused_ffn, axis=0, src_tp=1"
    again = "x -> x, fused_ffn, axis=0"  # nothing changes where no layout tells, and yet there is something to undo
    assert str(Rewrite(again).check({"x": (8,)}).inverse()) == again
    fused = Tensor(np.array([0, 1, 4, 5, 2, 3, 6, 7], np.float32))
    back = Rewrite(again).check({"x": (8,)}).inverse().check(cut)
    assert_same(resolved(back, {"x": fused}, {}), {"x": Tensor(numbered(8))})


def test_state_of_the_optimizer_goes_with_the_degree_of_its_parameter() -> None:
    state = {"x": Tensor(np.array([0, 1, 4, 5, 2, 3, 6, 7], np.float32), "float32", (2,))}
    state["optimizer/x/exp_avg"] = Tensor(state["x"].values + 10, "float32", (2,))
    made = resolved(Rewrite("x -> t; t -> g, u, fused_ffn, axis=0").check(laid_out(state)), state, {})
    assert made["u"].values.tolist() == [4, 5, 6, 7]
    assert made["optimizer/u/exp_avg"].values.tolist() == [14, 15, 16, 17]


def test_a_target_with_other_dims_than_the_rewrite_makes_is_refused_for_its_shape_alone() -> None:
    with pytest.raises(RewriteError, match=r"x: shape \[2, 4\] in the target, \[8\] by the rewrite"):
        Rewrite(FUSE).check(metas(GU), metas({"x": ((2, 4), (1, 2))}))
