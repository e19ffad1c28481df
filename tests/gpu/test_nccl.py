"""The contract of `Channel` over NCCL, on as many GPUs as there are."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANK = """
import warnings
import torch
from shardwise.comm.processes import processes
from tests.contracts.channel_cases import CASES
warnings.simplefilter("error", FutureWarning)
channel = processes(timeout_seconds=60)
assert channel.device.type == "cuda", channel.device
for case in CASES:
    if not case.poisons:
        case(channel)
        torch.cuda.synchronize()
channel.close()
if channel.rank == 0:
    print("passed")
"""


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nccl_fulfils_the_contract(size: int) -> None:
    if size > torch.cuda.device_count():
        pytest.skip(f"needs {size} GPUs")
    command = [
        "-c",
        f"from shardwise.comm.launch import launch; exit(launch(None, ['-c', {RANK!r}], num_processes={size}))",
    ]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("passed\n"), done.stderr
