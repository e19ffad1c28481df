"""Lightning's Trainer on real ranks, as torchrun and its own launcher start them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks.programs import ROOT
from tests.lightning.lightning_modules import Net, fitted, weights
from tests.processes.as_started import outputs

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
