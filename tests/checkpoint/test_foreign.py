"""Safetensors files of others: every stored piece has the values that the safetensors library reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint.foreign import huggingface, read_foreign, recognise
from shardwise.checkpoint.local import LocalStore
from shardwise.errors import CheckpointError
from tests.checkpoint.stored_values import check_contents, random_state

State = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def put_safetensors(folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]], index: State | None = None) -> None:
    for name, tensors in files.items():
        safetensors.torch.save_file(dict(tensors), folder / name, metadata={"format": "pt", "name": name})
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SHARDS: dict[str, dict[str, torch.Tensor]] = {
    "model-1.safetensors": {"a": torch.arange(6.0).view(2, 3), "s": torch.tensor(2)},
    "model-2.safetensors": {"b": torch.ones(4, dtype=torch.bfloat16), "e": torch.zeros(0, 2)},
}
TENSORS = {name: tensor for tensors in SHARDS.values() for name, tensor in tensors.items()}
WEIGHT_MAP = {name: file for file, tensors in SHARDS.items() for name in tensors}


@pytest.mark.parametrize("index", [None, {"metadata": {"total_size": 40}, "weight_map": WEIGHT_MAP}])
def test_shards_are_read_with_and_without_an_index(tmp_path: Path, index: State | None) -> None:
    put_safetensors(tmp_path, SHARDS, index)
    if index is not None:
        (tmp_path / "other.safetensors").write_bytes(b"not in the index")
    contents = read_foreign(LocalStore(tmp_path))
    check_contents(contents, tmp_path, TENSORS)
    assert contents.format == "safetensors"
    assert contents.extra == {"metadata": {"format": "pt"} | {f"name ({name})": name for name in SHARDS}}


def test_one_file_is_read_alone(tmp_path: Path) -> None:
    put_safetensors(tmp_path, SHARDS, {"weight_map": WEIGHT_MAP})
    name = "model-1.safetensors"
    contents = huggingface.read_contents(LocalStore(tmp_path), file=name)
    assert contents.tensors.keys() == {"a", "s"}
    assert contents.location == str(tmp_path / name)
    assert contents.extra == {"metadata": {"format": "pt", "name": name}}


def findings(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        huggingface.read_contents(LocalStore(folder))
    return caught.value.problems


def test_every_difference_between_index_and_shards_is_found(tmp_path: Path) -> None:
    first, second = SHARDS
    weight_map = {"a": second, "b": second, "c": "gone.safetensors", "e": first}
    put_safetensors(tmp_path, SHARDS, {"weight_map": weight_map})
    assert set(findings(tmp_path)) == {
        f"{tmp_path}/gone.safetensors is missing",
        "the index says that tensor a is in model-2.safetensors, but it is not",
        "tensor a is in model-1.safetensors, but the index has it in model-2.safetensors",
        "the index says that tensor e is in model-1.safetensors, but it is not",
        "tensor e is in model-2.safetensors, but the index has it in model-1.safetensors",
        "tensor s is in model-1.safetensors, but the index does not name it",
    }


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    put_safetensors(tmp_path, {"1.safetensors": TENSORS, "2.safetensors": TENSORS})
    found = findings(tmp_path)
    assert {each.partition(".safetensors. ")[0] for each in found} == {
        f"tensor {name} is in several files: 1.safetensors, 2" for name in TENSORS
    }
    assert all("remove the others" in each for each in found)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    put_safetensors(tmp_path, SHARDS)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    [problem] = findings(tmp_path)
    assert problem.startswith(f"{tmp_path}/model.safetensors.index.json")


def test_damaged_shards_are_all_named(tmp_path: Path) -> None:
    put_safetensors(tmp_path, SHARDS)
    for name in SHARDS:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    problems = findings(tmp_path)
    assert [problem.split(":")[0] for problem in problems] == [f"{tmp_path}/{name}" for name in SHARDS]
    assert all("truncated" in problem for problem in problems)


def test_several_indices_and_no_file_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint: it is empty"):
        read_foreign(LocalStore(tmp_path))
    put_safetensors(tmp_path, {}, {"weight_map": {}})
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    assert "has 2 indices" in findings(tmp_path)[0]


@pytest.mark.parametrize("distributed", [False, True])
def test_what_dcp_writes_for_hugging_face_is_read(tmp_path: Path, distributed: bool) -> None:
    state = {name: tensor for name, tensor in random_state().items() if tensor.dtype != torch.complex128}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=distributed)
    save(dict(state), storage_writer=writer, no_dist=True)
    check_contents(read_foreign(LocalStore(tmp_path)), tmp_path, state)


def put_boxes(folder: Path, whole: torch.Tensor, rows: list[tuple[int, int]]) -> None:
    for number, (first, stop) in enumerate(rows):
        info = json.dumps({"w": {"saved_offsets": [first, 0]}})
        box = {"w": whole[first:stop].contiguous()}
        safetensors.torch.save_file(box, folder / f"{number}.safetensors", metadata={"DCP_SHARDING_INFO": info})


def test_boxes_in_several_files_make_up_a_tensor(tmp_path: Path) -> None:
    whole = torch.arange(15.0).view(5, 3)
    put_boxes(tmp_path, whole, [(0, 2), (2, 5)])
    contents = read_foreign(LocalStore(tmp_path))
    check_contents(contents, tmp_path, {"w": whole})
    assert contents.extra == {"metadata": {}}


@pytest.mark.parametrize("rows", [[(2, 5)], [(0, 2), (3, 5)], [(0, 3), (2, 5)]])
def test_boxes_that_make_up_no_tensor_are_refused(tmp_path: Path, rows: list[tuple[int, int]]) -> None:
    put_boxes(tmp_path, torch.arange(15.0).view(5, 3), rows)
    assert "of 15 elements are held" in findings(tmp_path)[0]


@pytest.mark.parametrize(
    "info", ["{", "[]", '{"w": {"saved_offsets": 1}}', '{"w": {"saved_offsets": [-1]}}', '{"w": []}']
)
def test_damaged_words_about_boxes_are_named(tmp_path: Path, info: str) -> None:
    file = tmp_path / "1.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, file, metadata={"DCP_SHARDING_INFO": info})
    assert "1.safetensors: DCP_SHARDING_INFO" in findings(tmp_path)[0]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([], None),
        (["README.md", "deep/model.safetensors"], None),
        (["manifest.json", "1-rank00000.safetensors"], "shardwise"),
        (["save-00000001/manifest.json", "save-00000001/1-rank00000.safetensors"], "shardwise"),
        (["save-00000001/1-rank00000.safetensors"], None),
        ([".metadata", "__0_0.distcp"], "dcp"),
        (["model.safetensors", "config.json"], "safetensors"),
        (["model.safetensors.index.json"], "safetensors"),
    ],
)
def test_formats_are_recognised_by_names(tmp_path: Path, names: list[str], kind: str | None) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert recognise(LocalStore(tmp_path)) == kind
