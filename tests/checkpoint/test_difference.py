"""`diff`: what two checkpoints hold differently, against a loop over whole tensors; whatever formats and pieces."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import LocalStore, diff
from tests.checkpoint.cut_tensors import Cut, cut, save_pieces
from tests.checkpoint.faulty import Counting
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import bits, share_of_state, whole_state
from tests.properties import tried

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(path: Path, state: Mapping[str, torch.Tensor], **arguments: Any) -> Path:
    checkpoint.save(path, dict(state), **arguments)
    return path


STATE = {"w": torch.arange(12.0).view(3, 4), "b": torch.tensor([1, 2, 3])}


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    how=st.tuples(*[st.tuples(st.sampled_from(["rows", "columns", "runs"]), st.integers(1, 4))] * 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]),
    num_changes=st.integers(0, 4),
    window=st.integers(16, 100),
    seed=st.integers(0, 1000),
)
@tried(20)
def test_differences_are_those_of_a_loop_whatever_the_pieces(
    shape: list[int],
    how: tuple[tuple[Cut, int], tuple[Cut, int]],
    dtype: torch.dtype,
    num_changes: int,
    window: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("random")
    a = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)
    b = a.clone()
    for _ in range(num_changes):
        index = tuple(random.Random(seed).randrange(size) for size in shape)
        b[index] = (b[index] + 1).to(dtype) if dtype != torch.bool else ~b[index]
        seed += 1
    for name, tensor, (kind, size) in (("a", a, how[0]), ("b", b, how[1])):
        save_pieces(path / name, cut("w", tensor, kind, size))
    with small_limits(window):
        found = diff(path / "a", path / "b")
    indices = [tuple(each) for each in torch.ones(shape).nonzero().tolist()]
    different = [index for index in indices if bits(a[index]).tolist() != bits(b[index]).tolist()]
    assert found.equal == (not different)
    if not different:
        assert (found.num_equal, found.equal_bytes) == (1, a.numel() * dtype.itemsize)
        return
    (row,) = found.tensors
    assert (row.name, row.finding, row.num_different, row.first_index) == ("w", "values", len(different), different[0])
    assert (row.first_a, row.first_b) == (a[different[0]].item(), b[different[0]].item())
    wide = torch.complex128 if dtype.is_complex else torch.float64
    largest = max(float((a[index].to(wide) - b[index].to(wide)).abs()) for index in different)
    assert row.max_difference == pytest.approx(largest, rel=1e-12)


def test_each_kind_of_difference_is_found(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {**STATE, "shape": torch.ones(2, 3), "gone": torch.ones(2), "same": torch.ones(3)})
    b = saved(
        tmp_path / "b",
        {
            "w": STATE["w"] + torch.tensor([[0, 0, 0, 0], [0, 0, 0.5, -2.0], [0, 0, 0.5, -2.0]]),
            "b": STATE["b"].double(),
            "shape": torch.ones(3, 2),
            "same": torch.ones(3),
            "new": torch.zeros(0, 4).half(),
        },
    )
    with small_limits(16):  # a row of w
        found = diff(a, b)
    assert not found.equal
    rows = {row.name: row for row in found.tensors}
    assert list(rows) == ["w", "b", "shape", "gone", "new"]
    assert [row.finding for row in rows.values()] == ["values", "dtype", "shape", "only in A", "only in B"]
    assert (rows["w"].num_different, rows["w"].max_difference, rows["w"].first_index) == (4, 2.0, (1, 2))
    assert (rows["b"].a, rows["b"].b, rows["b"].num_different) == (("int64", (3,)), ("float64", (3,)), 0)
    assert (rows["shape"].a, rows["shape"].b) == (("float32", (2, 3)), ("float32", (3, 2)))
    assert (rows["gone"].a, rows["gone"].b) == (("float32", (2,)), None)
    assert (rows["new"].a, rows["new"].b) == (None, ("float16", (0, 4)))
    assert (found.num_equal, found.equal_bytes) == (1, 12)
    lines = str(found).splitlines()
    assert lines[:3] == [f"A: {a}/save-00000001 (shardwise, 1 rank)", f"B: {b}/save-00000001 (shardwise, 1 rank)", ""]
    assert lines[3:] == [
        "tensor  differs in  A            B               elements  max |A-B|  first at",
        "w       values      6.0          6.5             4 of 12   2          [1, 2]",
        "b       dtype       int64        float64         none      0",
        "shape   shape       [2, 3]       [3, 2]",
        "gone    only in A   float32 [2]  -",
        "new     only in B   -            float16 [0, 4]",
        "",
        "1 of 6 tensors are equal (12 B; 1 of them by their checksums, unread); extra is equal",
    ]


def test_a_tie_is_the_tensor_that_it_is_tied_to(tmp_path: Path) -> None:
    w, other = torch.ones(3), torch.zeros(3)
    tied = saved(tmp_path / "tied", {"in": w, "out": w})
    turned = saved(tmp_path / "turned", {"out": w, "in": w})
    apart = saved(tmp_path / "apart", {"in": w, "out": w.clone()})
    differs = saved(tmp_path / "differs", {"in": w, "out": other})
    left_out = saved(tmp_path / "left out", {"in": w})
    renamed = saved(tmp_path / "renamed", {"other": w})
    for path in (tied, turned, apart, left_out):
        assert diff(tied, path).equal
        assert diff(path, tied).equal
    (row,) = diff(tied, differs).tensors
    assert (row.name, row.finding) == ("out", "values")
    assert [row.name for row in diff(tied, renamed).tensors] == ["in", "other"]
    assert [row.finding for row in diff(apart, left_out).tensors] == ["only in A"]


def test_extra_and_settings_are_compared_in_place(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", STATE, extra={"step": 1, "data": {"at": [1, 2], "kept": math.nan}, "gone": None})
    b = saved(tmp_path / "b", STATE, extra={"step": 1, "data": {"at": [1, 3], "kept": math.nan}, "new": [1]})
    found = diff(a, b)
    assert not found.equal
    assert found.num_equal == 2
    assert [(each.place, each.a, each.b) for each in found.extra] == [
        ("extra.data.at[1]", "2", "3"),
        ("extra.gone", "null", None),
        ("extra.new", None, "[1]"),
    ]
    assert str(found).endswith("; extra differs")
    assert diff(a, b, model_only=True).equal
    model = torch.nn.Linear(2, 2)
    for name, rate in (("c", 0.1), ("d", 0.25)):
        sw.save(tmp_path / name, checkpoint.TorchState(model, torch.optim.SGD(model.parameters(), lr=rate)))
    (setting,) = diff(tmp_path / "c", tmp_path / "d").extra
    assert (setting.place, setting.a, setting.b) == ("settings.optimizers[0].groups[0].settings.lr", "0.1", "0.25")


def test_what_checksums_show_to_be_equal_is_not_read(tmp_path: Path) -> None:
    state = whole_state(1)
    shares = [share_of_state(state, rank, 3) for rank in range(3)]
    changed = {**state, "flat": state["flat"] + 1}
    save_pieces(tmp_path / "a", shares, extra={"step": 1})
    save_pieces(tmp_path / "b", [share_of_state(changed, rank, 3) for rank in range(3)], extra={"step": 1})
    a, b = Counting(LocalStore(tmp_path / "a")), Counting(LocalStore(tmp_path / "b"))
    found = diff(a, b)
    assert [row.name for row in found.tensors] == ["flat"]
    assert (found.num_equal, found.num_equal_by_checksum) == (4, 3)  # one has no elements
    for store in (a, b):
        data = [each for each in store.operations if each.kind == "read_into" and ".safetensors" in each.name]
        assert sum(each.num_bytes for each in data) == state["flat"].nbytes


def test_json_holds_everything_and_is_strict(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"w": torch.tensor([1.0, math.nan]), "c": torch.tensor([1 + 2j]), "gone": torch.ones(1)})
    b = saved(tmp_path / "b", {"w": torch.tensor([1.0, math.inf]), "c": torch.tensor([1 - 2j])}, extra={"x": 1})
    text = json.dumps(diff(a, b).to_json(), allow_nan=False)
    found = json.loads(text)
    rows = {row["name"]: row for row in found["tensors"]}
    assert (rows["w"]["first_a"], rows["w"]["first_b"], rows["w"]["max_difference"]) == ("nan", "inf", "nan")
    assert (rows["c"]["first_a"], rows["c"]["first_b"], rows["c"]["max_difference"]) == ([1, 2], [1, -2], 4)
    assert (rows["gone"]["a"], rows["gone"]["b"]) == (["float32", [1]], None)
    assert found["extra"] == [{"place": "extra.x", "a": None, "b": "1"}]
    assert (found["equal"], found["num_equal"]) == (False, 0)


def test_odd_names_are_shown_on_one_line_and_steps_are_chosen_on_each_side(tmp_path: Path) -> None:
    odd = 'a "name"/..[0:2] run 3:4\n\u00e9\x1b[1m' + "x" * 300
    state = {"scalar": torch.tensor(2.0), "none": torch.zeros(0, 3), odd: torch.ones(1), "": torch.ones(2)}
    saved(tmp_path / "a", state, step=1)
    saved(tmp_path / "a", {**state, "scalar": torch.tensor(3.0), odd: -state[odd]}, step=2)
    found = diff(tmp_path / "a", tmp_path / "a", step_a=1)
    rows = {row.name: row for row in found.tensors}
    assert rows.keys() == {"scalar", odd}
    assert (rows["scalar"].first_index, rows["scalar"].max_difference) == ((), 1.0)
    assert "\x1b" not in str(found)
    assert len(str(found).splitlines()) == 3 + 3 + 2
    assert diff(tmp_path / "a", tmp_path / "a", step_a=1, step_b=1).equal
