"""Checkpoints for other programs: what is written, bit for bit, what loads it, and what is refused."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import dcp_folders
from shardwise.checkpoint.foreign.pickle_writer import pickled
from shardwise.errors import CheckpointError
from tests.checkpoint.deepspeed.load_universal import LOSSES, digest_of, write_universal
from tests.checkpoint.deepspeed.write import FOLDERS
from tests.checkpoint.small_states import contents
from tests.checkpoint.stored_values import random_state, same_bytes, save_dcp
from tests.properties import tried

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RUNS: dict[str, Any] = json.loads(LOSSES.read_text())
FORMATS = ("dcp", "torchtitan", "deepspeed-universal")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
@tried(100)
def test_a_written_pickle_has_its_value(value: Any) -> None:
    assert pickle.loads(pickled(value)) == value
    with pytest.raises(TypeError, match="a set is no value"):
        pickled([value, {1}])


@pytest.mark.parametrize("name", RUNS)
def test_universal_checkpoints_are_those_from_which_deepspeed_went_on(tmp_path: Path, name: str) -> None:
    assert digest_of(write_universal(name, tmp_path)) == RUNS[name]["digest"]
    reference = safetensors.torch.load_file(FOLDERS / f"{name.removeprefix('saved ')}.safetensors")["losses"]
    # In float32 other ranks differ in the order of sums; in 16 bits other stages round at other places.
    tolerance = 1e-6 if "fp32" in name else 1e-3
    for losses in RUNS[name]["losses"].values():
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), reference, rtol=tolerance, atol=0)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["z3-fp32-4", "z2-bf16-4", "z1-fp16-3"])
def test_everything_comes_back_and_what_it_was_is_certified(tmp_path: Path, name: str, to: Any) -> None:
    report = checkpoint.convert(FOLDERS / name, tmp_path / "out", to=to, certify=True)
    assert report.certificate is not None
    assert report.certificate.lossy == ()
    source, written = checkpoint.open(FOLDERS / name), checkpoint.open(tmp_path / "out")
    assert written.contents.aliases == source.contents.aliases
    assert written.step == source.step
    masters = {each for each in source.tensors if each.endswith("/master")}
    assert set(report.from_masters) == masters
    assert written.tensors.keys() == source.tensors.keys() - masters
    for each in written.tensors:
        master = f"optimizer/{each}/master"
        assert same_bytes(written.read(each), source.read(master if master in masters else each))
    (ours,), (theirs,) = source.contents.settings["optimizers"], written.contents.settings["optimizers"]
    assert _by_parameter(theirs) == _by_parameter(ours)


def _by_parameter(optimizer: dict[str, Any]) -> dict[str, Any]:
    return {name: group["settings"] for group in optimizer["groups"] for name in group["parameters"]}


def test_torch_loads_every_dtype_and_shape_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_folders, "_MAX_CHUNK_BYTES", 64)
    state = {
        **random_state(),
        "rows": torch.randn(37, 3),
        "empty": torch.ones(0, 3),
        "float8": torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn),
        "words": torch.tensor([1, 2, 4_000_000_000], dtype=torch.uint32),
    }
    checkpoint.save(tmp_path / "ours", state)
    checkpoint.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", max_shard_bytes=4000)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load({"model": loaded}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(same_bytes(loaded[name], tensor) for name, tensor in state.items())
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    rows = metadata.state_dict_metadata["model.rows"]
    assert isinstance(rows, TensorStorageMetadata)
    assert len(rows.chunks) == 7
    assert len(list((tmp_path / "dcp").glob("__0_*.distcp"))) > 1


def test_torch_gathers_what_its_own_saves_would_have(tmp_path: Path) -> None:
    folder = Path(__file__).parent / "foreign_files"
    checkpoint.convert(folder / "full_state.pt", tmp_path / "dcp", to="dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "gathered.pt")
    found = torch.load(tmp_path / "gathered.pt")
    expected = torch.load(folder / "full_state.pt")
    assert all(same_bytes(found["model"][name], tensor) for name, tensor in expected["model"].items())
    for name, state in expected["optimizer"]["state"].items():
        for key, tensor in state.items():
            assert same_bytes(found["optim"]["state"][name][key], tensor)
    assert found["optim"]["param_groups"] == expected["optimizer"]["param_groups"]


def test_archives_are_zip_files_with_true_checksums(tmp_path: Path) -> None:
    checkpoint.convert(FOLDERS / "z2-bf16-2", tmp_path / "out", to="deepspeed-universal")
    files = list((tmp_path / "out").rglob("*.pt"))
    assert len(files) == 14 * 4 + 3
    for path in files:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        torch.load(path, weights_only=True)
        torch.load(path, weights_only=True, mmap=True)


def test_a_rewrite_goes_along_with_the_state_of_optimizers(tmp_path: Path) -> None:
    state = {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}
    moments = {f"optimizer/{name}/exp_avg": torch.randn(2, 4) for name in state}
    checkpoint.save(tmp_path / "ours", {**state, **moments})
    checkpoint.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", rewrite=sw.Rewrite("a, b -> ab, axis=0"))
    target: dict[str, Any] = {
        "model": {"ab": torch.zeros(4, 4)},
        "optim": {"state": {"ab": {"exp_avg": torch.zeros(4, 4)}}},
    }
    load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(target["model"]["ab"], torch.cat([*state.values()]))
    assert torch.equal(target["optim"]["state"]["ab"]["exp_avg"], torch.cat([*moments.values()]))
    # State without settings of an optimizer is named as such, and says nothing of rates.
    assert "optimizer/ab/exp_avg" in checkpoint.open(tmp_path / "dcp").tensors
    assert checkpoint.open(tmp_path / "dcp").contents.settings == {}


@pytest.mark.parametrize("to", FORMATS)
def test_a_folder_is_there_as_a_whole_or_not_at_all(tmp_path: Path, to: Any) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("precious")
    checkpoint.save(tmp_path / "ours", {"w": torch.ones(3)})
    checkpoint.save(tmp_path / "nothing", {"optimizer/w/exp_avg": torch.ones(3)})
    before = contents(tmp_path)
    for source, target, words in (
        ("ours", tmp_path / "full", "is a folder that holds something"),
        ("ours", "memory://bucket/x", "is no local folder"),
        ("nothing", tmp_path / "new", "has no tensor of a model"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.convert(tmp_path / source, target, to=to)
    file = next((tmp_path / "ours").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    before[str(file.relative_to(tmp_path))] = file.read_bytes()
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.convert(tmp_path / "ours", tmp_path / "new", to=to)
    assert contents(tmp_path) == before


def test_folders_of_torchtitan_are_read_with_the_optimizer(tmp_path: Path) -> None:
    """Names as in torchtitan 0.3: weights at the top, a flattened optimizer, the trainer's own values."""
    weights = {"layers.0.w": torch.randn(3, 2), "norm": torch.randn(2), "tied": torch.randn(4)}
    state = {f"state.{name}.exp_avg": torch.randn_like(each) for name, each in weights.items()}
    rates = {"layers.0.w": 0.1, "norm": 0.2, "tied": 0.1}
    groups = {f"param_groups.{name}.lr": rate for name, rate in rates.items()}
    trainer = {"step": 7, "seen": torch.tensor(3)}
    save_dcp(tmp_path, {**weights, "optimizer": {**state, **groups}, "train_state": trainer})
    found = checkpoint.open(tmp_path)
    assert all(same_bytes(found.read(name), each) for name, each in weights.items())
    assert all(same_bytes(found.read(f"optimizer/{name}/exp_avg"), state[f"state.{name}.exp_avg"]) for name in weights)
    assert found.tensors.keys() - weights.keys() == {
        *(f"optimizer/{name}/exp_avg" for name in weights),
        "extra/train_state.seen",
    }
    assert found.step == 7
    [optimizer] = found.contents.settings["optimizers"]
    assert [each["parameters"] for each in optimizer["groups"]] == [["layers.0.w", "tied"], ["norm"]]
    target = {name: torch.zeros_like(each) for name, each in weights.items()}
    sw.load(tmp_path, target)
    assert all(torch.equal(target[name], each) for name, each in weights.items())


@pytest.mark.parametrize("what", ["deep", "through a tensor", "other names"])
def test_paths_that_make_no_sense_leave_the_names_of_the_folder(tmp_path: Path, what: str) -> None:
    save_dcp(tmp_path, {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"exp_avg": torch.ones(2)}}}})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    paths: dict[str, Any] = {
        "deep": ("a",) * 100_000,
        "through a tensor": ("optim", "state", "w", "exp_avg", "more"),
        "other names": ("optim", "state", "v", "exp_avg"),
    }
    metadata.planner_data["optim.state.w.exp_avg"] = paths[what]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert checkpoint.open(tmp_path).tensors.keys() == {"model.w", "optim.state.w.exp_avg"}


def test_names_that_no_folder_can_have_are_refused_all_at_once(tmp_path: Path) -> None:
    names = ["../../x", "a//b", "/abs", "nul\0"]
    checkpoint.save(tmp_path / "ours", {name: torch.ones(2) for name in [*names, "w"]})
    with pytest.raises(CheckpointError, match="cannot name a folder") as caught:
        checkpoint.convert(tmp_path / "ours", tmp_path / "out", to="deepspeed-universal")
    assert len(caught.value.problems) == len(names)
    assert not (tmp_path / "out").exists()
    checkpoint.convert(tmp_path / "ours", tmp_path / "out", to="dcp", certify=True)


@pytest.mark.parametrize("to", FORMATS)
def test_state_of_no_parameter_is_refused(tmp_path: Path, to: Any) -> None:
    checkpoint.save(tmp_path / "ours", {"w": torch.ones(2), "optimizer/0/exp_avg": torch.ones(2)})
    with pytest.raises(CheckpointError, match="the optimizer has state of '0', and no tensor is called so"):
        checkpoint.convert(tmp_path / "ours", tmp_path / "out", to=to)


def test_what_would_have_one_name_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "optimizer/w/exp_avg": torch.ones(2)}
    state |= {"step": torch.ones(2), "optimizer.state.w.exp_avg": torch.zeros(2)}
    checkpoint.save(tmp_path / "ours", state, step=3)
    with pytest.raises(CheckpointError, match=r"would have 'optimizer\.state\.w\.exp_avg', 'step' twice"):
        checkpoint.convert(tmp_path / "ours", tmp_path / "out", to="torchtitan")
    checkpoint.convert(tmp_path / "ours", tmp_path / "out", to="dcp", certify=True)


def test_another_dtype_is_that_of_masters_rounded_once(tmp_path: Path) -> None:
    checkpoint.convert(FOLDERS / "z2-bf16-2", tmp_path / "dcp", to="dcp", dtype="bfloat16", certify=True)
    source, written = checkpoint.open(FOLDERS / "z2-bf16-2"), checkpoint.open(tmp_path / "dcp")
    for name in ("embed.weight", "layers.0.norm.bias"):
        assert torch.equal(written.read(name), source.read(name))
        assert torch.equal(written.read(name), source.read(f"optimizer/{name}/master").bfloat16())
    assert not [each for each in written.tensors if each.endswith("/master")]


def test_a_module_may_be_called_state(tmp_path: Path) -> None:
    weights = {"state.w": torch.randn(3), "param_groups": torch.randn(2)}
    moments = {name: {"exp_avg": torch.randn_like(each)} for name, each in weights.items()}
    groups = [{"params": list(weights), "lr": 0.5}]
    save_dcp(tmp_path, {"model": weights, "optimizer": {"state": moments, "param_groups": groups}})
    found = checkpoint.open(tmp_path)
    assert found.tensors.keys() == {*weights, *(f"optimizer/{name}/exp_avg" for name in weights)}
    assert all(same_bytes(found.read(name), each) for name, each in weights.items())
