"""`**` stands for the rest of a name: one statement takes what stands before all names off, or puts it on."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import TensorMeta
from tests.properties import tried

STATE = {
    "module.layers.0.w": (4, 2),
    "module.layers.10.w": (4, 2),
    "module.head": (3,),
    "optimizer/module.head/exp_avg": (3,),
    "optimizer/module.head/step": (),
    "extra/rng": (5,),
}


def metas(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(shape, "float32") for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("module.** -> **", {"layers.0.w", "layers.10.w", "head", "optimizer/head/exp_avg", "optimizer/head/step"}),
        (
            "** -> net.**",
            {
                "net.module.layers.0.w",
                "net.module.layers.10.w",
                "net.module.head",
                "optimizer/net.module.head/exp_avg",
                "optimizer/net.module.head/step",
            },
        ),
        (
            "module.** -> **\nlayers.0.w -> layers.0.w, permute='[]'\nlayers.** -> l.**",
            {"l.0.w", "l.10.w", "head", "optimizer/head/exp_avg", "optimizer/head/step"},
        ),
        ("module.layers.** -> _\nmodule.** -> **", {"head", "optimizer/head/exp_avg", "optimizer/head/step"}),
        ("module.layers.0.**, module.layers.10.** -> both.**, axis=0\nmodule.head -> _", {"both.w"}),
        ("optimizer/** -> _\nmodule.** -> **", {"layers.0.w", "layers.10.w", "head"}),
        ('"module.**" -> "a b.**"', {"a b.layers.0.w", "a b.layers.10.w", "a b.head", "optimizer/a b.head/exp_avg"}),
    ],
)
def test_a_rest_is_the_same_on_both_sides_and_state_goes_along(text: str, names: set[str]) -> None:
    text = text.replace("optimizer/**", '"optimizer/**"')
    checked = sw.Rewrite(text).check(metas(STATE))
    assert names <= set(checked.outputs)
    assert "extra/rng" in checked.outputs
    assert "module." in checked.explain()


def test_one_statement_takes_it_off_and_the_inverse_puts_it_on() -> None:
    rewrite = sw.Rewrite("module.** -> **")
    assert str(rewrite.inverse()) == "** -> module.**"
    alone = {name: shape for name, shape in STATE.items() if not name.startswith("extra/")}
    for there in (sw.Rewrite("module.** -> **"), sw.Rewrite("** -> net.**")):
        checked = there.check(metas(alone))
        back = checked.inverse()
        assert set(back.check(checked.outputs).outputs) == set(alone)
        assert len(str(back).splitlines()) == 1


def test_the_exact_inverse_leaves_other_names_alone() -> None:
    shapes = {**STATE, "other": (2,)}
    checked = sw.Rewrite("module.** -> **").check(metas(shapes))
    assert set(checked.inverse().check(checked.outputs).outputs) == set(shapes)


@tried(40)
@given(
    st.lists(st.text('ab.0$*" ', min_size=1, max_size=6), min_size=1, max_size=5, unique=True),
    st.text("a.$ ", max_size=3),
)
def test_any_names_come_back(names: list[str], prefix: str) -> None:
    shapes = dict.fromkeys((f"{prefix}x{name}" for name in names), (2,))
    left = "".join(f"\\{each}" if each in '$*\\"' else each for each in f"{prefix}x")
    checked = sw.Rewrite(f'"{left}**" -> "to.**"').check(metas(shapes))
    assert set(checked.outputs) == {f"to.{name}" for name in names}
    assert set(checked.inverse().check(checked.outputs).outputs) == set(shapes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.**.b -> c", "ends a name, after text alone"),
        ("a.$N.** -> b.**", "ends a name, after text alone"),
        ("a.*.** -> b.**", "ends a name, after text alone"),
        ("a.***  -> b.**", "ends a name, after text alone"),
        ("a.** -> b.**[0:2]", "ends a name"),
        ("nothing.** -> **", "no tensor has a name like nothing.**"),
        ("module.** -> one", "one is written by more than one instance"),
        ("_ -> new.**", "** has no value on the left, and no target is known"),
    ],
)
def test_what_it_cannot_mean_is_refused(text: str, said: str) -> None:
    with pytest.raises(RewriteError) as caught:
        sw.Rewrite(text).check(metas(STATE))
    assert said in str(caught.value)


def test_a_name_that_is_there_is_not_overwritten() -> None:
    with pytest.raises(RewriteError, match="head exists already"):
        sw.Rewrite("module.** -> **").check(metas({**STATE, "head": (3,)}))


@pytest.mark.parametrize(
    ("stored", "wanted", "statement"),
    [
        ("module.", "", "module.** -> **"),
        ("", "module.", "** -> module.**"),
        ("transformer.", "model.", "transformer.** -> model.**"),
        ("a b.", "", '"a b.**" -> **'),
    ],
)
def test_the_error_of_a_load_has_the_statement_that_makes_it_fit(
    tmp_path: Path, stored: str, wanted: str, statement: str
) -> None:
    names = ["layers.0.weight", "layers.1.weight", "norm.weight"]
    torch.save({f"{stored}{name}": torch.full((2,), at) for at, name in enumerate(names)}, tmp_path / "a.pt")
    target = {f"{wanted}{name}": torch.full((2,), 9) for name in names}
    with pytest.raises(CheckpointError) as caught:
        sw.load(tmp_path / "a.pt", target)
    assert f"rewrite=sw.Rewrite({statement!r})" in str(caught.value).partition("\n")[0]
    sw.load(tmp_path / "a.pt", target, rewrite=sw.Rewrite(statement))
    assert [int(target[f"{wanted}{name}"][0]) for name in names] == [0, 1, 2]


def test_names_that_differ_otherwise_have_no_such_statement(tmp_path: Path) -> None:
    torch.save({"module.a.weight": torch.ones(2), "b.weight": torch.ones(3)}, tmp_path / "a.pt")
    for target in ({"a.weight": torch.ones(2), "c.weight": torch.ones(2)}, {"a.weight": torch.ones(3)}):
        with pytest.raises(CheckpointError) as caught:
            sw.load(tmp_path / "a.pt", target)
        assert "sw.Rewrite" not in str(caught.value)
