"""Lightning's Trainer on real ranks, as torchrun and its own launcher start them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from shardwise.comm import Channel
from shardwise.lightning import Strategy
from tests.forks.programs import ROOT
from tests.lightning.lightning_modules import PLANS, Net, Seen, fitted, loader, trainer_for, weights
from tests.processes.as_started import outputs
from tests.processes.pool import Pool

PROGRAM = """
import json, sys
import lightning.pytorch as pl
import torch
import shardwise as sw
from shardwise.lightning import Strategy
from tests.lightning.lightning_modules import Net, Seen, loader, trainer_for, weights

if __name__ == "__main__":
    folder = sys.argv[1]
    torch.manual_seed(3)
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3))
    saving = pl.callbacks.ModelCheckpoint(folder, filename="last", save_top_k=-1)

    class Rows(pl.LightningDataModule):  # its loaders are made when the ranks are known
        def train_dataloader(self): return loader(self.trainer.strategy)
        val_dataloader = train_dataloader

    trainer = trainer_for(Strategy(plan), seen := Seen(), saving, devices=2)
    trainer.fit(Net(), datamodule=Rows())
    state = {name: each.tolist() for name, each in weights(trainer).items()}
    with open(f"{folder}/{trainer.global_rank}.json", "w") as file:
        json.dump({"losses": seen.losses, "state": state}, file)
"""


@pytest.mark.timeout(320)
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("its own", marks=pytest.mark.stress)])
def test_ranks_have_the_numbers_of_one_process(launcher: str, tmp_path: Path) -> None:
    if launcher == "torchrun":
        outputs([["-c", PROGRAM, str(tmp_path)]] * 2, environment={"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"})
    else:  # which starts the program again by its name
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(program), str(tmp_path)]
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr
    trainer, seen = fitted("auto")
    expected = weights(trainer)
    read = Net.load_from_checkpoint(tmp_path / "last.ckpt").state_dict()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["losses"] == pytest.approx(seen.losses, rel=2e-5)
        for name, each in found["state"].items():
            assert read[name].tolist() == each
            assert read[name].flatten().tolist() == pytest.approx(expected[name].flatten().tolist(), abs=2e-5)


class SignalIn(pl.Callback):  # type: ignore[misc]
    """A signal comes to this process in a batch."""

    def __init__(self, number: signal.Signals, at: int) -> None:
        self.number, self.at = number, at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.at:
            signal.raise_signal(self.number)


class GoesOn(DataLoader[Any]):
    """Lightning saves where a loader is that says so, and not where others are."""

    first = given = 0

    def __iter__(self) -> Any:
        first, self.first = self.first, 0
        for self.given, batch in enumerate(super().__iter__(), 1):
            if self.given > first:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]


def run_here(channel: Channel, *callbacks: Any, resumes: Path | None = None, **settings: Any) -> tuple[Any, Any]:
    """A trainer, its losses, and whether a signal has ended it."""
    torch.manual_seed(3)
    strategy, seen = Strategy(PLANS["stage 3"], channel=channel), Seen()
    trainer = trainer_for(strategy, seen, *callbacks, num_sanity_val_steps=0, **settings)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        rows = loader(strategy)
        trainer.fit(Net(), GoesOn(rows.dataset, batch_size=2, sampler=rows.sampler), ckpt_path=resumes)
    except SIGTERMException:
        assert strategy.preemption.exit_code
    else:
        assert not strategy.preemption.exit_code
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    return trainer, [loss for loss in seen.losses if loss == loss]


def stopped_here(channel: Channel, folder: Path) -> tuple[list[float], ...]:
    """The losses of a run, of one that a signal to rank 1 ends in batch 3, and of the one that resumes."""
    batches: dict[str, Any] = {"accumulate_grad_batches": 2}
    _, whole = run_here(channel, **batches)
    saving = pl.callbacks.ModelCheckpoint(folder, filename="left", save_on_exception=True, monitor=None)
    signals = [SignalIn(signal.SIGTERM, 3)] if channel.rank == 1 else []
    _, stopped = run_here(channel, saving, *signals, **batches)
    _, resumed = run_here(channel, resumes=folder / "left.ckpt", **batches)
    return whole, stopped, resumed


def test_a_signal_to_one_rank_ends_all_which_save_on_exceptions_and_the_run_resumes_bit_for_bit(
    pool: Pool, tmp_path: Path
) -> None:
    for whole, stopped, resumed in pool.run(2, stopped_here, tmp_path):
        assert (len(whole), len(stopped)) == (6, 2)
        assert stopped + resumed == whole


def requeued_here(channel: Channel, folder: Path) -> str:
    """What the scheduler is told, where the signal that asks for it has come to rank 1."""
    command = folder / f"bin-{channel.rank}" / "scontrol"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho $@ >> {folder}/told\n")
    command.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
        for name, value in {"JOB_ID": 17, "NODEID": 0, "LOCALID": channel.rank, "PROCID": channel.rank}.items():
            patch.setenv(f"SLURM_{name}", str(value))
        signals = [SignalIn(signal.SIGUSR1, 2)] if channel.rank == 1 else []
        environment = SLURMEnvironment()
        trainer, _ = run_here(channel, *signals, plugins=[environment], folder=folder)
    channel.exchange(b"", purpose="rank 0 has told")
    assert trainer.global_step == 2
    return (folder / "told").read_text()


def test_under_slurm_the_signal_that_asks_for_it_saves_and_requeues_the_job(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, requeued_here, tmp_path) == ["requeue 17\n"] * 2
    read = torch.load(tmp_path / "hpc_ckpt_1.ckpt")
    assert read["global_step"] == 2
