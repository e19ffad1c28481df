"""States to store, and what torch.distributed writes of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


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
