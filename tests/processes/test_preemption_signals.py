"""`sw.Preemption` in real processes: signals of schedulers to one rank, saves, exit codes, and a second signal."""

import signal
from pathlib import Path

from shardwise import checkpoint
from tests.processes.as_started import ended

PROGRAM = """
import signal, sys, threading
import torch
import shardwise as sw

number, twice = getattr(signal, sys.argv[1]), sys.argv[2] == "twice"
torch.manual_seed(0)
channel = sw.processes(timeout_seconds=60)
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
                threading.Event().wait()
        engine.step({"input": torch.full((2, 4), 1.0 + channel.rank)})
        if preemption.requested(engine):
            sw.save("saves", engine, extra={"step": step})
            break
channel.close()
sys.exit(preemption.exit_code)
"""


def test_a_signal_to_one_rank_ends_all_after_a_save_with_the_code_of_the_signal(tmp_path: Path) -> None:
    ranks = ended([["-c", PROGRAM, "SIGUSR1", "once"]] * 2, folder=tmp_path)
    assert [code for code, *_ in ranks] == [128 + signal.SIGUSR1] * 2
    assert ranks[0][2] == ""
    assert checkpoint.open(tmp_path / "saves").step == 3


def test_a_second_signal_ends_the_rank_at_once_and_its_peer_learns_why(tmp_path: Path) -> None:
    (code, _, errors), (other, *_) = ended([["-c", PROGRAM, "SIGTERM", "twice"]] * 2, folder=tmp_path)
    assert (code, other) == (1, 143)
    assert "rank 1 stopped: SIGTERM came twice" in errors
    assert not (tmp_path / "saves").exists()
