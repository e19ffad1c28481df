"""What is no checkpoint that we read is named as what it is, with what to do, wherever a checkpoint is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")
FOLDERS = {
    "DeepSpeed, too far out": ["runs/a/global_step5/mp_rank_00_model_states.pt", "zero_to_fp32.py"],
    "DeepSpeed without latest": ["global_step5/mp_rank_00_model_states.pt", "zero_to_fp32.py"],
    "Megatron as DCP": ["latest_checkpointed_iteration.txt", "iter_0000100/.metadata", "iter_0000100/__0_0.distcp"],
    "DCP without metadata": ["__0_0.distcp", "__1_0.distcp"],
    "TensorFlow": ["checkpoint", "model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"],
    "saved model": ["saved_model.pb", "variables/variables.index"],
    "Keras": ["weights.h5"],
    "Flax": ["flax_model.msgpack", "config.json"],
    "Orbax": ["_CHECKPOINT_METADATA", "manifest.ocdbt", "d/abc"],
    "ONNX": ["model.onnx"],
    "GGUF": ["q4.gguf"],
    "Lightning": ["epoch=1.ckpt"],
    "Llama": ["consolidated.00.pth", "params.json"],
    "anything": ["a.txt", "b\n.txt", "c", "d"],
    "cache of the hub": ["blobs/1a", "refs/main", "snapshots/0f/model.safetensors", "snapshots/0f/config.json"],
    "data of a save": ["5e1f09ab-rank00000.safetensors"],
    "runs": ["one/save-00000001/manifest.json", "two/model.safetensors", "three/x.txt"],
    "empty": [],
}
FILES = [
    "model.onnx",
    "manifest.json",
    ".metadata",
    "__0_0.distcp",
    "model.safetensors.index.json",
    "notes.txt",
    "x.pkl",
]

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


def opened(path: Path) -> object:
    """By one way, whose words are those of all others."""
    said = set()
    for way in WAYS:
        with pytest.raises(CheckpointError) as caught:
            way(path)
        said.add(str(caught.value).partition("; give a folder of safetensors files")[0])
    assert len(said) == 1, said
    return checkpoint.open(path)


def folder_of(names: list[str]) -> Any:
    def call(folder: Path) -> object:
        (folder / "given").mkdir()
        for name in names:
            (folder / "given" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "given" / name).write_bytes(b"x")
        return opened(folder / "given")

    return call


def file_of(name: str, data: bytes = b"x") -> Any:
    def call(folder: Path) -> object:
        (folder / name).write_bytes(data)
        return opened(folder / name) if data == b"x" else checkpoint.open(folder / name)

    return call


def script(folder: Path) -> object:
    torch.jit.script(torch.nn.Linear(2, 2)).save(folder / "model.pt")
    return checkpoint.open(folder / "model.pt")


REFUSED = Refusals(
    "checkpoint.unread",
    {
        **{f"a folder: {kind}": folder_of(names) for kind, names in FOLDERS.items()},
        **{f"a file: {name}": file_of(name) for name in FILES},
        "a file: a pointer of git LFS": file_of("model.bin", b"version https://git-lfs.github.com/spec/v1\n"),
        "a file: a program of TorchScript": script,
        "nothing": lambda folder: opened(folder / "absent"),
    },
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(case: str) -> None:
    REFUSED.check(case)


def test_a_name_of_the_hub_is_told_from_a_place_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"If meta-llama/Llama-3\.2-1B is on the Hugging Face hub, name hf://meta-llama.* `hf download",
    ):
        checkpoint.open("meta-llama/Llama-3.2-1B")
    (tmp_path / "here").mkdir()
    with pytest.raises(CheckpointError, match=r"does not exist$"):
        checkpoint.open("here/absent")
