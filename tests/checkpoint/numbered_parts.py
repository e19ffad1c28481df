"""One of several numbered files of a model, as programs name and write them."""

import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

KINDS = {
    "safetensors": "model-{part:05d}-of-{count:05d}.safetensors",
    "from 0": "model-{before:05d}-of-{count:05d}.safetensors",
    "bin": "pytorch_model-{part:05d}-of-{count:05d}.bin",
    "gguf": "m-{part:05d}-of-{count:05d}.gguf",
    "ranks": "shard-{part:05d}-model-00001-of-00001.safetensors",
    "files of ranks": "shard-00001-model-{part:05d}-of-{count:05d}.safetensors",
    "no zeros": "model-{part}-of-{count}.safetensors",
    "underscores": "model_{part:05d}_of_{count:05d}.safetensors",
}


def write_gguf(path: Path, part: int, count: int, name: str) -> None:
    """With an alignment of its own."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + text("split.no") + struct.pack("<IH", 2, part - 1)
    head += text("general.alignment") + struct.pack("<II", 4, 256)
    head += text("split.count") + struct.pack("<IH", 2, count) + text(name) + struct.pack("<IQIQ", 1, 2, 0, 0)
    path.write_bytes(head + b"\0" * (-len(head) % 256) + struct.pack("<2f", part, part))


def write_part(kind: str, folder: Path, part: int, count: int) -> Path:
    """The file, with a tensor `layers.{part}.w` of the number of the part."""
    tensors = {f"layers.{part}.w": torch.full((2,), float(part))}
    path = folder / KINDS[kind].format(part=part, before=part - 1, count=count)
    if kind == "gguf":
        write_gguf(path, part, count, *tensors)
    elif kind == "bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path
