"""Folders of torch.distributed.checkpoint: names and values of what is in them, and metadata that does not fit."""

import enum
import json
import math
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

import shardwise as sw
from shardwise import checkpoint
from shardwise.errors import CheckpointError
from tests.checkpoint.small_states import same_tensor
from tests.checkpoint.stored_values import random_state, save_dcp
from tests.contracts.format_cases import check_tensors
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_members_of_enumerations_may_be_pickled_as_the_first_pythons_3_11_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    save_dcp(tmp_path, random_state())
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    check_tensors(tmp_path, random_state())


def test_objects_are_read_as_json_and_others_named(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a", "b"], "foreach": None, "fused": False}]
    odd = {"slice": slice(1, 2), "inf": math.inf, "keys": ({1: 2},), "device": torch.device("cpu"), "bytes": b"x"}
    save_dcp(tmp_path, {"w": torch.ones(1), "optimizer": {"param_groups": groups}, "size": torch.Size([1, 2]), **odd})
    extra = dict(checkpoint.open(tmp_path).contents.extra)
    assert extra["objects"] == {
        "optimizer.param_groups.0.lr": 0.1,
        "optimizer.param_groups.0.betas": [0.9, 0.99],
        "optimizer.param_groups.0.params": ["a", "b"],
        "optimizer.param_groups.0.foreach": None,
        "optimizer.param_groups.0.fused": False,
        "size": [1, 2],
    }
    assert json.loads(json.dumps(extra)) == extra
    assert sorted(extra["skipped"]) == ["bytes", "device", "inf", "keys", "slice"]


class Runs:
    """Unpickled by anybody else, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", ["all", "planner", "key", "object"])
def test_nothing_that_a_file_names_is_run(tmp_path: Path, where: str) -> None:
    evil = Runs(tmp_path / "made")
    save_dcp(tmp_path / "saved", {"w": torch.ones(2), **({"evil": evil} if where == "object" else {})})
    file = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    if where == "planner":
        metadata.planner_data = evil
    if where == "key":
        metadata.storage_data[evil] = 1
    if where == "object":
        contents = checkpoint.open(tmp_path / "saved").contents
        assert contents.extra == {"skipped": ["evil"]}
        assert "evil" in contents.notes[0]
    else:
        file.write_bytes(pickle.dumps(evil if where == "all" else metadata))
        with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
            checkpoint.open(tmp_path / "saved")
    assert not (tmp_path / "made").exists()


Change = Callable[[Any, Any], object]
PLACE = MetadataIndex("w", (0, 0))


def chunk(offset: tuple[int, int], sizes: tuple[int, int]) -> Change:
    made = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    return lambda metadata, w: w.chunks.__setitem__(0, made)


def several(metadata: Any, w: Any) -> None:
    metadata.storage_data[PLACE].transform_descriptors = ["stream.zstd"]
    metadata.state_dict_metadata["large"].chunks.clear()


def out_of_the_folder(metadata: Any, w: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


CHANGES: dict[str, Change] = {
    "a chunk outside": chunk((1, 0), (3, 4)),
    "half a chunk": chunk((0, 0), (1, 4)),
    "a chunk twice": lambda metadata, w: w.chunks.extend(w.chunks),
    "no chunk": lambda metadata, w: w.chunks.clear(),
    "another dtype": lambda metadata, w: setattr(w.properties, "dtype", torch.int32),
    "a place that is lost": lambda metadata, w: metadata.storage_data.pop(PLACE),
    "the place of another": lambda metadata, w: metadata.storage_data.update(
        {PLACE: metadata.storage_data[MetadataIndex("large", (0, 0))]}
    ),
    "compressed": lambda metadata, w: setattr(metadata.storage_data[PLACE], "transform_descriptors", ["stream.zstd"]),
    "shifted by a byte": lambda metadata, w: setattr(metadata.storage_data[PLACE], "offset", 1),
    "before the file": lambda metadata, w: setattr(metadata.storage_data[PLACE], "offset", -4),
    "two findings": several,
    "out of the folder": out_of_the_folder,
}


def changed(change: Change) -> Callable[[Path], object]:
    def call(folder: Path) -> object:
        save_dcp(folder, {"w": torch.ones(3, 4), "large": torch.ones(70, 50)})
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata, metadata.state_dict_metadata["w"])
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return checkpoint.open(folder)

    return call


def in_another_place(folder: Path) -> object:
    """A file in safetensors, which says itself what it holds."""
    form = SerializationFormat.SAFETENSORS
    save({"w": torch.ones(3, 4)}, storage_writer=FileSystemWriter(folder, serialization_format=form), no_dist=True)
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"[0, 0]", b"[1, 0]"))
    return checkpoint.open(folder)


def without(name: str) -> Callable[[Path], object]:
    def call(folder: Path) -> object:
        save_dcp(folder, {"w": torch.ones(3, 4)})
        (folder / name).unlink()
        return checkpoint.open(folder)

    return call


REFUSED = Refusals(
    "checkpoint.dcp",
    {
        **{name: changed(change) for name, change in CHANGES.items()},
        "a file that holds another chunk": in_another_place,
        **{f"without {name}": without(name) for name in (".metadata", "__0_0.distcp")},
    },
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_does_not_fit_the_data_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_metadata_that_is_cut_is_refused(tmp_path: Path) -> None:
    save_dcp(tmp_path, random_state())
    whole = (tmp_path / ".metadata").read_bytes()
    for size in sorted(random.Random(0).sample(range(len(whole)), 60)):
        (tmp_path / ".metadata").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            checkpoint.open(tmp_path)


def test_folders_of_torchtitan_are_read_with_the_optimizer(tmp_path: Path) -> None:
    """Names as in torchtitan 0.3: weights at the top, a flattened optimizer, the trainer's own values."""
    weights = {"layers.0.w": torch.randn(3, 2), "norm": torch.randn(2), "tied": torch.randn(4)}
    state = {f"state.{name}.exp_avg": torch.randn_like(each) for name, each in weights.items()}
    rates = {"layers.0.w": 0.1, "norm": 0.2, "tied": 0.1}
    groups = {f"param_groups.{name}.lr": rate for name, rate in rates.items()}
    trainer = {"step": 7, "seen": torch.tensor(3)}
    save_dcp(tmp_path, {**weights, "optimizer": {**state, **groups}, "train_state": trainer})
    found = checkpoint.open(tmp_path)
    assert all(same_tensor(found.read(name), each) for name, each in weights.items())
    assert all(same_tensor(found.read(f"optimizer/{name}/exp_avg"), state[f"state.{name}.exp_avg"]) for name in weights)
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
