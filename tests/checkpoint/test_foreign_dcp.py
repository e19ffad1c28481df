"""Checkpoints of torch.distributed.checkpoint: every stored piece has the values that torch reads."""

import enum
import io
import json
import math
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint.foreign import dcp, read_foreign
from shardwise.checkpoint.foreign.torch_files import NotPlainError, find_tensor, read_value
from shardwise.checkpoint.local import LocalStore
from shardwise.errors import CheckpointError
from shardwise.space import check_cover
from tests.checkpoint.stored_values import assembled, check_contents, random_state, same_bytes

State = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_dcp(folder: Path, state: State, **options: Any) -> None:
    save(dict(state), storage_writer=FileSystemWriter(folder, **options), no_dist=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    save_dcp(folder, random_state() | {"optimizer": {"param_groups": [{"lr": 0.1, "params": ["w"]}]}})
    return folder


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}])
def test_every_piece_of_a_dcp_checkpoint_has_the_values_that_were_saved(tmp_path: Path, options: State) -> None:
    save_dcp(tmp_path, random_state(), **options)
    contents = read_foreign(LocalStore(tmp_path))
    assert contents.format == "dcp"
    assert contents.extra == {}
    check_contents(contents, tmp_path, random_state())
    again = {name: torch.zeros_like(tensor) for name, tensor in random_state().items()}
    load(again, checkpoint_id=tmp_path, no_dist=True)
    assert all(same_bytes(assembled(LocalStore(tmp_path), contents.tensors[name]), again[name]) for name in again)


def test_members_of_enumerations_may_be_pickled_as_the_first_pythons_3_11_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    save_dcp(tmp_path, random_state())
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    check_contents(read_foreign(LocalStore(tmp_path)), tmp_path, random_state())


def test_every_piece_of_a_dcp_checkpoint_in_safetensors_has_the_values_that_were_saved(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in random_state().items() if tensor.dtype != torch.complex128}
    save_dcp(tmp_path, state | {"step": 7}, serialization_format=SerializationFormat.SAFETENSORS)
    contents = dcp.read_contents(LocalStore(tmp_path))
    assert contents.extra == {"objects": {"step": 7}}
    check_contents(contents, tmp_path, state)


@pytest.mark.parametrize("dims", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1)])
def test_tensors_that_do_not_lie_row_major_are_read_in_boxes_that_do(tmp_path: Path, dims: tuple[int, ...]) -> None:
    state = {"w": torch.randn(4, 3, 5).permute(dims), "row": torch.randn(1, 5).t()}
    images = {"images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    save_dcp(tmp_path, state | images)
    contents = dcp.read_contents(LocalStore(tmp_path))
    check_contents(contents, tmp_path, state | images)
    assert len(contents.tensors["row"].pieces) == 1
    assert len(contents.tensors["images"].pieces) == 2 * 4 * 5


def test_objects_are_read_as_json_and_others_named(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a", "b"], "foreach": None, "fused": False}]
    odd = {"slice": slice(1, 2), "inf": math.inf, "keys": ({1: 2},), "device": torch.device("cpu"), "bytes": b"x"}
    save_dcp(tmp_path, {"w": torch.ones(1), "optimizer": {"param_groups": groups}, "size": torch.Size([1, 2]), **odd})
    extra = dcp.read_contents(LocalStore(tmp_path)).extra
    assert (
        extra["objects"]
        == {
            "optimizer.param_groups.0.lr": 0.1,
            "optimizer.param_groups.0.betas": [0.9, 0.99],
            "optimizer.param_groups.0.params": ["a", "b"],
            "optimizer.param_groups.0.foreach": None,
            "optimizer.param_groups.0.fused": False,
            "size": [1, 2],
        }
        or extra["objects"] == {}
    )
    assert json.loads(json.dumps(extra)) == extra
    assert sorted(extra["skipped"]) == ["bytes", "device", "inf", "keys", "slice"]


def metadata_of(folder: Path) -> Metadata:
    found = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def put_metadata(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        dcp.read_contents(LocalStore(folder))
    assert str(folder) in str(caught.value)
    return caught.value


def test_a_missing_or_truncated_file_is_named_once(checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    error = refusal(checkpoint)
    assert error.problems == (
        f"{data} has {len(content) - 1:,} bytes, but the checkpoint has saved {len(content):,} in it: it is truncated",
    )
    data.unlink()
    assert refusal(checkpoint).problems == (f"{data} is missing",)
    (checkpoint / ".metadata").unlink()
    assert refusal(checkpoint).problems == (f"{checkpoint / '.metadata'} is missing",)


def test_metadata_cannot_point_out_of_the_folder(checkpoint: Path) -> None:
    metadata = metadata_of(checkpoint)
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"
    put_metadata(checkpoint, metadata)
    assert "../../secret" in str(refusal(checkpoint))


class Runs:
    """Unpickled by anybody else, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", ["all", "planner", "key"])
def test_nothing_that_the_metadata_names_is_run(checkpoint: Path, tmp_path: Path, where: str) -> None:
    evil = Runs(tmp_path / "made")
    metadata = metadata_of(checkpoint)
    if where == "planner":
        metadata.planner_data = evil
    if where == "key":
        metadata.storage_data[evil] = 1
    put_metadata(checkpoint, evil if where == "all" else metadata)
    assert "names posix.mkdir" in str(refusal(checkpoint))
    assert not (tmp_path / "made").exists()


def test_nothing_that_an_object_names_is_run(tmp_path: Path) -> None:
    save_dcp(tmp_path / "saved", {"w": torch.ones(2), "evil": Runs(tmp_path / "made")})
    assert dcp.read_contents(LocalStore(tmp_path / "saved")).extra == {"skipped": ["evil"]}
    assert not (tmp_path / "made").exists()


def test_objects_that_grow_without_end_are_refused() -> None:
    doubled: Any = "x"
    for _ in range(60):
        doubled = [doubled, doubled]
    endless: list[Any] = []
    endless.append(endless)
    for value in (doubled, endless):
        file = io.BytesIO()
        torch.save(value, file)
        with pytest.raises(NotPlainError):
            read_value(file.getvalue())


def tensor_of(metadata: Metadata, name: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata[name]
    assert isinstance(found, TensorStorageMetadata)
    return found


def changed_chunk(metadata: Metadata) -> None:
    tensor_of(metadata, "w").chunks[0] = ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([3, 4]))


def halved_chunk(metadata: Metadata) -> None:
    tensor_of(metadata, "w").chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 4]))


def doubled_chunk(metadata: Metadata) -> None:
    tensor_of(metadata, "w").chunks *= 2


def no_chunk(metadata: Metadata) -> None:
    tensor_of(metadata, "w").chunks.clear()


def other_dtype(metadata: Metadata) -> None:
    tensor_of(metadata, "w").properties.dtype = torch.int32


def lost_place(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("w", (0, 0))]


def other_place(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("w", (0, 0))] = metadata.storage_data[MetadataIndex("large", (0, 0))]


def compressed(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("w", (0, 0))].transform_descriptors = ["stream.zstd"]


def shifted(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("w", (0, 0))].offset += 1


def negative(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("w", (0, 0))].offset = -4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_chunk, "has a chunk outside"),
        (halved_chunk, r"of shape \(3, 4\), but by the metadata float32 of shape \(1, 4\)"),
        (doubled_chunk, "w: 12 of 12 elements are held more than once"),
        (no_chunk, "no chunk of it was saved"),
        (other_dtype, "it is float32 of shape .* by the metadata int32"),
        (lost_place, "gives no place for the chunk of w"),
        (other_place, r"it is float32 of shape \(70, 50\)"),
        (compressed, "stream.zstd"),
        (shifted, "neither in the format of torch.save|announce a header"),
        (negative, "not whole numbers"),
    ],
)
def test_metadata_that_does_not_fit_the_data_is_refused(
    checkpoint: Path, change: Callable[[Metadata], None], message: str
) -> None:
    metadata = metadata_of(checkpoint)
    change(metadata)
    put_metadata(checkpoint, metadata)
    assert re.search(message, str(refusal(checkpoint)))


def test_all_findings_come_at_once(checkpoint: Path) -> None:
    metadata = metadata_of(checkpoint)
    for change in (compressed, lost_place):
        change(metadata)
    tensor_of(metadata, "large").chunks.clear()
    put_metadata(checkpoint, metadata)
    assert len(refusal(checkpoint).problems) == 2


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_flipped_bits_are_refused_or_change_nothing_but_values_and_names(checkpoint: Path, name: str) -> None:
    whole = (checkpoint / name).read_bytes()
    chance = random.Random(0)
    refused = 0
    problems: list[str] = []
    for _ in range(150):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (checkpoint / name).write_bytes(data)
        try:
            contents = read_foreign(LocalStore(checkpoint))
        except CheckpointError as error:
            problems += error.problems
            refused += 1
        else:
            assert all(check_cover(each.piece for each in one.pieces) == [] for one in contents.tensors.values())
    assert refused >= 3
    assert all(problem.startswith(f"{checkpoint}/") for problem in problems)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_cut_files_are_refused(checkpoint: Path, name: str) -> None:
    whole = (checkpoint / name).read_bytes()
    for size in sorted(random.Random(0).sample(range(len(whole)), 60)):
        (checkpoint / name).write_bytes(whole[:size])
        assert name in str(refusal(checkpoint))


def reading(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, num_bytes: data[start : start + num_bytes]


def test_what_torch_does_not_write_is_no_tensor() -> None:
    for value in (5, [torch.ones(1)], torch.ones(2).to_sparse()):
        file = io.BytesIO()
        torch.save(value, file)
        data = file.getvalue()
        with pytest.raises(CheckpointError):
            find_tensor(reading(data), len(data))
