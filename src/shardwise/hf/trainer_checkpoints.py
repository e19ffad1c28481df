"""The checkpoints of a trainer: folders that the plain Trainer and `from_pretrained` read, and a save of any layout.

    checkpoint-40/  model.safetensors, config.json, ...    the whole model, in the dtypes in which it came
                    shardwise/                             what each rank owns: masters, optimizer state, random numbers
                    optimizer.pt                           the optimizer state for the plain Trainer
                    scheduler.pt, trainer_state.json       as the plain Trainer writes them
                    rng_state.pth, rng_state_1.pth         of the data ranks

A run goes on from `shardwise/` under any plan; without it, from the files of the plain Trainer.
"""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import safe_globals

from shardwise.checkpoint import load, save
from shardwise.errors import CheckpointError
from shardwise.hf.streamed_model import save_model
from shardwise.hf.streamed_optimizer import save_optimizer

_SAVE = "shardwise"
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


class TrainerCheckpoints:
    """The part of a trainer that saves and loads."""

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The whole model, written by rank 0; all ranks call this together."""
        if self._sw_engine is None:  # it is whole everywhere
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        save_model(self._sw_engine, partial(super()._save, output_dir, state_dict))  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """As in transformers; where it returns, the checkpoint is complete for every rank."""
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        # Rank 0 writes the last files, and removes old folders; another rank may look for the newest at once.
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        engine = self.engine
        save(Path(output_dir, _SAVE), engine, keep=1)
        if getattr(self.args, "shardwise_optimizer_pt", True):
            save_optimizer(engine, Path(output_dir, _OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _save_scaler(self: Any, output_dir: str) -> None:
        """Nothing: the save has the scale of losses."""

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        """Nothing: the save has the scale of losses."""

    def _save_rng_state(self: Any, output_dir: str) -> None:
        if not self._sw_ranks.is_speaker:
            return
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        os.makedirs(output_dir, exist_ok=True)
        if self._sw_ranks.rank == 0:
            torch.save(state, os.path.join(output_dir, "rng_state.pth"))
        if self._sw_ranks.count > 1:
            torch.save(state, os.path.join(output_dir, f"rng_state_{self._sw_ranks.rank}.pth"))

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        # Of another number of data ranks: the first one's.
        names = [f"rng_state_{self._sw_ranks.rank}.pth", "rng_state.pth", "rng_state_0.pth"]
        found = next((path for name in names if (path := Path(checkpoint, name)).is_file()), None)
        if found is None:
            return
        with safe_globals():
            state = _read(found)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available() and isinstance(state["cuda"], torch.Tensor):
            torch.cuda.set_rng_state(state["cuda"])

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights; those of a save come with the optimizer, when there is one."""
        if Path(resume_from_checkpoint, _SAVE).is_dir():
            return
        if self._sw_engine is None or self._sw_engine.model is not self.model:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        with self._sw_engine.whole(optimizer=False, rank0_only=True):
            if self.args.should_save:
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self: Any) -> None:
        with self.engine.whole(optimizer=False, rank0_only=True):
            if self.args.should_save:
                super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        engine = self.engine
        optimizer, scheduler = Path(checkpoint, _OPTIMIZER), Path(checkpoint, _SCHEDULER)
        if Path(checkpoint, _SAVE).is_dir():
            load(Path(checkpoint, _SAVE), engine)
        elif optimizer.is_file():
            with engine.whole(rank0_only=True):
                if self.args.should_save:
                    self.optimizer.load_state_dict(_read(optimizer))
        if scheduler.is_file():
            self.lr_scheduler.load_state_dict(_read(scheduler))


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Without the words of torch, which advise to run what is in the file.
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}): it is not complete, or no file that a Trainer wrote; "
            "resume from another checkpoint"
        ) from error
