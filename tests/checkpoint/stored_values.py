"""The values that stored pieces have, read from their byte ranges, and states to store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.local import LocalStore
from shardwise.space import check_cover


def assembled(store: LocalStore, stored: StoredTensor) -> torch.Tensor:
    """The tensor, from the byte ranges of its pieces."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    whole = torch.zeros(stored.shape, dtype=dtype)
    for each in stored.pieces:
        reader = store.open(each.file)
        data = bytearray(each.num_bytes)
        reader.read_into(memoryview(data), each.start)
        reader.close()
        whole[each.piece.box.slices()] = torch.frombuffer(data, dtype=dtype).view(each.piece.shape)
    return whole


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))


def save_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """A checkpoint of torch.distributed by one process."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # many seconds of imports
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(state), storage_writer=FileSystemWriter(folder), no_dist=True)


def random_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {
        "w": torch.randn(3, 4),
        "large": torch.randn(70, 50),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "three": torch.randn(2, 1, 5),
        "bool": torch.tensor([True, False]),
        "part": torch.randn(10)[3:7],
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64, torch.complex128):
        state[str(dtype)] = torch.randn(4).to(dtype)
    for dtype in (torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16, torch.uint64):
        state[str(dtype)] = torch.arange(5).to(dtype)
    return state


def check_contents(contents: Contents, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    store = LocalStore(folder)
    assert contents.tensors.keys() == tensors.keys()
    assert contents.location == str(folder)
    assert {name: store.open(name).size for name in contents.file_sizes} == contents.file_sizes
    for name, tensor in tensors.items():
        stored = contents.tensors[name]
        assert (stored.name, stored.shape) == (name, tuple(tensor.shape))
        assert f"torch.{stored.dtype}" == str(tensor.dtype)
        assert all(each.piece.num_elements and each.checksums is None for each in stored.pieces)
        assert all(each.file in contents.file_sizes for each in stored.pieces)
        assert check_cover(each.piece for each in stored.pieces) == []
        assert same_bytes(assembled(store, stored), tensor)
