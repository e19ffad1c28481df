"""`sw.Preemption` in real processes: signals of schedulers to one rank, saves, exit codes, and a second signal."""

import contextlib
import signal
import socket
from pathlib import Path

import pytest

from shardwise import checkpoint
from tests.forks.programs import started

PROGRAM = """
import os, signal, sys, threading
import torch
import shardwise as sw

number, twice = getattr(signal, sys.argv[1]), sys.argv[2] == "twice"
torch.manual_seed(0)
channel = sw.processes(timeout_seconds=30) if os.environ["WORLD_SIZE"] != "1" else sw.default_channel()
engine = sw.parallelize(
    torch.nn.Linear(4, 1),
    sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    loss=lambda output, batch: output.square().mean(),
    channel=channel,
)
with sw.Preemption() as preemption:
    for step in range(9):
        if step == 3 and channel.rank == channel.size - 1:
            signal.raise_signal(number)
            if twice:
                threading.Event().wait(1.2)  # signals within a second are one request
                signal.raise_signal(number)
                threading.Event().wait(60)
        engine.step({"input": torch.full((2, 4), 1.0 + channel.rank)})
        if preemption.requested(engine):
            sw.save("saves", engine, extra={"step": step})
            break
channel.close()
sys.exit(preemption.exit_code)
"""


def ended(folder: Path, size: int, name: str, how: str) -> tuple[list[int], str]:
    """The exit codes of the ranks, and what rank 0 prints on its standard errors."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(["-c", PROGRAM, name, how], environment={**world, "RANK": str(rank)}, folder=folder)
            )
            for rank in range(size)
        ]
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        return [rank.wait(60) for rank in ranks], errors[0]


@pytest.mark.parametrize(("size", "name"), [(1, "SIGUSR1"), (2, "SIGTERM"), (2, "SIGUSR1")])
def test_a_signal_to_one_rank_ends_all_after_a_save_with_the_code_of_the_signal(
    size: int, name: str, tmp_path: Path
) -> None:
    codes, errors = ended(tmp_path, size, name, "once")
    assert (codes, errors) == ([128 + signal.Signals[name]] * size, "")
    assert checkpoint.open(tmp_path / "saves").step == 3


def test_a_second_signal_ends_the_rank_at_once_and_its_peer_learns_why(tmp_path: Path) -> None:
    codes, errors = ended(tmp_path, 2, "SIGTERM", "twice")
    assert codes == [1, 143]
    assert "rank 1 stopped: SIGTERM came twice" in errors
    assert not (tmp_path / "saves").exists()
