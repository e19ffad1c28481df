"""What is no checkpoint that we read is named as what it is, with what to do, wherever a checkpoint is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

import shardwise as sw
from shardwise import checkpoint
from shardwise.cli import main
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.stored_values import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FOLDERS: dict[str, tuple[list[str], list[str]]] = {
    "DeepSpeed, too far out": (
        ["runs/a/global_step5/mp_rank_00_model_states.pt", "zero_to_fp32.py"],
        ["a folder with files of DeepSpeed, but neither a save", "name the folder of one save"],
    ),
    "DeepSpeed without latest": (
        ["global_step5/mp_rank_00_model_states.pt", "zero_to_fp32.py"],
        ["but global_step5 in it holds one: name it"],
    ),
    "Megatron as DCP": (
        ["latest_checkpointed_iteration.txt", "iter_0000100/.metadata", "iter_0000100/__0_0.distcp"],
        ["but iter_0000100 in it holds one: name it"],
    ),
    "DCP without metadata": (
        ["__0_0.distcp", "__1_0.distcp"],
        ["data of torch.distributed.checkpoint without the .metadata", "interrupted or copied in part"],
    ),
    "TensorFlow": (["checkpoint", "model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"], ["TensorFlow"]),
    "saved model": (["saved_model.pb", "variables/variables.index"], ["TensorFlow"]),
    "Keras": (["weights.h5"], ["Keras"]),
    "Flax": (["flax_model.msgpack", "config.json"], ["Flax or Orbax, which is not read yet"]),
    "Orbax": (["_CHECKPOINT_METADATA", "manifest.ocdbt", "d/abc"], ["Flax or Orbax"]),
    "ONNX": (["model.onnx"], ["ONNX, which is not read yet"]),
    "GGUF": (["q4.gguf"], ["a folder of models of llama.cpp (GGUF)", "name the file of one"]),
    "Lightning": (["epoch=1.ckpt"], ["a folder of files that torch.save may have written", "name the file"]),
    "Llama": (["consolidated.00.pth", "params.json"], ["a model as Meta publishes it", "convert_llama_weights"]),
    "anything": (["a.txt", "b\n.txt", "c", "d"], [r"it has a.txt, b\n.txt, c and 1 more; name the folder or the file"]),
    "cache of the hub": (
        ["blobs/1a", "refs/main", "snapshots/0f/model.safetensors", "snapshots/0f/config.json"],
        ["but snapshots/0f in it holds one: name it"],
    ),
    "data of a save": (["5e1f09ab-rank00000.safetensors"], ["data of a save without its manifest.json"]),
    "runs": (
        ["one/save-00000001/manifest.json", "two/model.safetensors", "three/x.txt"],
        ["but one, two in it hold one each: name one of them"],
    ),
}  # fmt: skip

FILES = {
    "model.onnx": "a model of ONNX",
    "manifest.json": "one file of several; name the folder that holds it",
    ".metadata": "one file of several; name the folder that holds it",
    "__0_0.distcp": "one file of several; name the folder that holds it",
    "model.safetensors.index.json": "one file of several; name the folder that holds it",
    "notes.txt": "it is a file; name the folder of a checkpoint, or a .safetensors file",
}

WAYS: list[Callable[[Path], object]] = [
    checkpoint.open,
    checkpoint.verify,
    checkpoint.verify_all,
    lambda path: sw.load(path, {"w": torch.zeros(2)}, channel=alone()),
    lambda path: checkpoint.convert(path, f"{path}-converted"),
    lambda path: checkpoint.import_hf(path, f"{path}-imported"),
    lambda path: checkpoint.export_hf(path, f"{path}-exported"),
    lambda path: checkpoint.diff(path, path),
]


def check_told(path: Path, place: str, said: list[str]) -> None:
    for way in WAYS:
        with pytest.raises(CheckpointError) as caught:
            way(path)
        assert str(caught.value).startswith(place)
        assert all(each in str(caught.value) for each in said), str(caught.value)
    for command in (["ls", path], ["verify", path], ["verify", path, "--all"], ["convert", path, f"{path}-cli"]):
        result = CliRunner().invoke(main, ["ckpt", *map(str, command)])
        assert result.exit_code == 1
        assert all(each in result.stderr for each in said)


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_of_other_programs_are_named(kind: str, tmp_path: Path) -> None:
    names, said = FOLDERS[kind]
    path = tmp_path / "given"
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    check_told(path, f"{path} holds no checkpoint that is read: ", said)


@pytest.mark.parametrize("name", FILES)
def test_files_are_named_themselves_and_not_their_folder(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"x")
    check_told(path, f"{path} is no checkpoint that is read: it is ", [FILES[name]])


def test_places_where_nothing_is_say_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    check_told(tmp_path / "empty", f"{tmp_path}/empty holds no checkpoint: it is empty", [])
    check_told(tmp_path / "absent", f"{tmp_path}/absent holds no checkpoint: it does not exist", [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"If meta-llama/Llama-3\.2-1B is on the Hugging Face hub, run `hf download"
    ):
        checkpoint.open("meta-llama/Llama-3.2-1B")
    with pytest.raises(CheckpointError, match=r"does not exist$"):
        checkpoint.open("empty/absent")  # its folder is here, so that it is no name of a hub


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "a\nb.safetensors"])
def test_a_safetensors_file_is_read_by_itself(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    safetensors.torch.save_file({"w": torch.arange(2.0)}, path)
    (tmp_path / "other.safetensors").write_bytes(b"damaged, and of no interest")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    target = {"w": torch.zeros(2)}
    assert sw.load(path, target, channel=alone()).report.location == str(path)
    assert target["w"].tolist() == [0, 1]
    assert checkpoint.open(path).location == str(path)
    assert checkpoint.diff(path, path).equal
    assert checkpoint.open(checkpoint.convert(path, tmp_path / "saves").destination).read("w").tolist() == [0, 1]


def test_what_is_read_is_not_called_unread(tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp", {"w": torch.ones(2)})
    (tmp_path / "dcp" / "pytorch_model.bin").write_bytes(b"beside it")
    assert checkpoint.open(tmp_path / "dcp").contents.format == "dcp"
