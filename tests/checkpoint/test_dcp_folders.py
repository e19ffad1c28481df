"""Folders for torch, torchtitan and DeepSpeed: what loads them, and that all comes back."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from shardwise import checkpoint
from tests.checkpoint.deepspeed.load_universal import LOSSES, digest_of, write_universal
from tests.checkpoint.deepspeed.write import FOLDERS
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import same_tensor
from tests.checkpoint.stored_values import random_state


def test_parameters_that_no_step_has_changed_are_in_the_groups_that_torch_gathers(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2, bias=False), "idle": torch.nn.Linear(2, 2, bias=False)})
    optimizer = torch.optim.AdamW([*model.named_parameters()])
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    checkpoint.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "gathered.pt")
    (group,) = torch.load(tmp_path / "gathered.pt")["optim"]["param_groups"]
    assert group["params"] == ["used.weight", "idle.weight"]


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


RUNS: dict[str, Any] = json.loads(LOSSES.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_universal_checkpoints_are_those_from_which_deepspeed_went_on(tmp_path: Path, name: str) -> None:
    assert digest_of(write_universal(name, tmp_path)) == RUNS[name]["digest"]
    reference = safetensors.torch.load_file(FOLDERS / f"{name.removeprefix('saved ')}.safetensors")["losses"]
    # In float32 other ranks differ in the order of sums; in 16 bits other stages round at other places.
    tolerance = 1e-6 if "fp32" in name else 1e-3
    for losses in RUNS[name]["losses"].values():
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), reference, rtol=tolerance, atol=0)


def test_torch_loads_every_dtype_and_shape_of_chunks(tmp_path: Path) -> None:
    state = {
        **random_state(),
        "rows": torch.randn(37, 3),
        "empty": torch.ones(0, 3),
        "float8": torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn),
        "words": torch.tensor([1, 2, 4_000_000_000], dtype=torch.uint32),
    }
    state["tied"] = state["rows"]
    checkpoint.save(tmp_path / "ours", state)
    with small_limits(64):
        checkpoint.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", max_shard_bytes=4000)
    assert checkpoint.verify(tmp_path / "dcp").good
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load({"model": loaded}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(same_tensor(loaded[name], tensor) for name, tensor in state.items())
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
    assert all(same_tensor(found["model"][name], tensor) for name, tensor in expected["model"].items())
    for name, state in expected["optimizer"]["state"].items():
        for key, tensor in state.items():
            assert same_tensor(found["optim"]["state"][name][key], tensor)
    assert found["optim"]["param_groups"] == expected["optimizer"]["param_groups"]
