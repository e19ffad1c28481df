"""The checkpoints of a trainer: folders that the plain Trainer and `from_pretrained` read, and a save of any layout.

    checkpoint-40/  model.safetensors, config.json, ...    the whole model, in the dtypes in which it came
                    shardwise/                             what each rank owns: masters, optimizer state, random numbers
                    optimizer.pt, scaler.pt                the optimizer state and the scale for the plain Trainer
                    scheduler.pt, trainer_state.json       as the plain Trainer writes them
                    rng_state.pth, rng_state_1.pth         of the data ranks

A run goes on from `shardwise/` under any plan; without it, from the files of the plain Trainer. No rank holds the whole
model or the whole state: files are written tensor by tensor, and each rank reads what it owns.
"""

import os
import random
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import rotate_checkpoints

from shardwise.checkpoint import load, save
from shardwise.comm.agreement import agreed, understood
from shardwise.engine.step.loss_scaling import GROWTH_INTERVAL
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.hf.checkpoint_folders import (
    OPTIMIZER,
    SAVE,
    SCALER,
    SCHEDULER,
    STATE,
    StagedCheckpoint,
    newest_complete,
    problems_of,
)
from shardwise.hf.memory_copies import MemoryCopy
from shardwise.hf.resumed_state import has_weights, load_plain, load_weights
from shardwise.hf.streamed_model import save_model
from shardwise.hf.streamed_optimizer import save_optimizer


class TrainerCheckpoints:
    """The part of a trainer that saves and loads."""

    _sw_staged: StagedCheckpoint | None = None
    """The checkpoint that is being written."""
    _sw_copy: MemoryCopy | None = None
    """The copy from which this run resumes."""
    _sw_weights: Path | None = None
    """The checkpoint whose weights the engine takes over when it is made."""

    # Saving ---------------------------------------------------------------------------------------------------------

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The whole model, written by rank 0; all ranks call this together."""
        write = partial(super()._save, output_dir, state_dict)  # type: ignore[misc]
        if self._sw_engine is None:  # it is whole everywhere
            write()
        else:
            save_model(self._sw_engine, write)

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """As in transformers. The folder gets its name when it is complete: a save that is killed leaves none."""
        state, channel = self.state, self._sw_ranks.world
        staged = StagedCheckpoint(self._get_output_dir(trial), state.global_step)
        with agreed(channel, purpose="verdict on the folder of a checkpoint"):
            if channel.rank == 0:
                staged.begin()
        failure: CheckpointError | None = None
        self._sw_staged = staged
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            if state.best_global_step == state.global_step and state.best_model_checkpoint is not None:
                state.best_model_checkpoint = staged.final
                if self.args.should_save:
                    state.save_to_json(os.path.join(staged.parent, os.path.basename(staged.final), STATE))
        except ShardwiseError:  # on all ranks
            staged.discard()
            raise
        except (OSError, RuntimeError) as error:  # the second is what torch.save raises of a full disk
            failure = CheckpointError(f"{staged.final} cannot be written: {error}")
        finally:
            self._sw_staged = None
        with agreed(channel, purpose="verdict on the files of a checkpoint"):
            if failure is not None:
                staged.discard()
                raise failure
        with agreed(channel, purpose="verdict on a checkpoint"):
            if channel.rank == 0:
                staged.publish()
        if self.args.push_to_hub:
            self._push_from_checkpoint(staged.final)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=os.path.dirname(staged.final),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )
        # Rank 0 removes old folders; another rank may look for the newest at once.
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self: Any, trial: Any) -> str:
        staged: StagedCheckpoint | None = self._sw_staged
        if staged is not None:
            return staged.parent
        folder: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return folder

    def _push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        if self._sw_staged is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        engine = self.engine
        save(Path(output_dir, SAVE), engine, keep=1, data=self._sw_data)
        if getattr(self.args, "shardwise_optimizer_pt", True):
            save_optimizer(engine, Path(output_dir, OPTIMIZER))
        self._sw_save_scheduler(output_dir)

    def _sw_save_scheduler(self: Any, output_dir: str) -> None:
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _sw_save_small_files(self: Any, output_dir: str) -> None:
        """Those of a checkpoint besides the model and what each rank owns, from the ranks that write them."""
        self._sw_save_scheduler(output_dir)
        self._save_rng_state(output_dir)
        if self.args.should_save:
            stateful = [*self.callback_handler.callbacks, self.control]
            stateful = [each for each in stateful if isinstance(each, ExportableState)]
            replace(self.state, stateful_callbacks=stateful).save_to_json(os.path.join(output_dir, STATE))

    def _save_scaler(self: Any, output_dir: str) -> None:
        """The scale of losses for the plain Trainer, as a GradScaler has it; ours goes on from the save."""
        scale = self.engine.settings().get("loss_scale")
        if scale is not None and self.args.should_save:
            factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": GROWTH_INTERVAL}
            found = {"scale": scale["scale"], **factors, "_growth_tracker": scale["in_a_row"]}
            torch.save(found, os.path.join(output_dir, SCALER))

    def _save_rng_state(self: Any, output_dir: str) -> None:
        if not self._sw_ranks.is_speaker:
            return
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        if self._sw_ranks.rank == 0:
            torch.save(state, os.path.join(output_dir, "rng_state.pth"))
        if self._sw_ranks.count > 1:
            torch.save(state, os.path.join(output_dir, f"rng_state_{self._sw_ranks.rank}.pth"))

    # Loading --------------------------------------------------------------------------------------------------------

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. True means the last complete checkpoint, or a copy in memory that is newer.

        With copies in memory, a run without either begins: a launcher starts the same script again after a loss.
        Raises CheckpointError, the same on all ranks, for one that is not complete.
        """
        self._sw_copy = None
        if self._sw_copies is not None and resume_from_checkpoint is not True:
            self._sw_copies.forget()
        if resume_from_checkpoint:
            resume_from_checkpoint = self._sw_checked(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _sw_checked(self: Any, asked: Any) -> str | None:
        """The path of the checkpoint that a run resumes from: of a copy, where it is newer; None: it begins."""
        channel, copies = self._sw_ranks.world, self._sw_copies
        copy = copies.newest() if copies is not None and asked is True else None
        with agreed(channel, purpose="verdict on the checkpoint to resume from", only=0) as agreement:
            if channel.rank == 0 and asked is True:
                found, passed = newest_complete(
                    Path(self.args.output_dir),
                    after=None if copy is None else copy.step,
                    may_begin=copies is not None,
                )
                agreement.value = b"" if found is None else found.name.encode()
                for folder, problems in passed.items():
                    warnings.warn(
                        f"{folder} is passed over for {found or 'a copy in memory'}: {'; '.join(problems)}",
                        stacklevel=3,
                    )
            elif channel.rank == 0 and (problems := problems_of(Path(asked))):
                raise CheckpointError(
                    *problems, about=f"{asked} cannot be resumed from; give another checkpoint, or True for the last"
                )
        if asked is not True:
            return str(os.fspath(asked))
        (name,) = understood(agreement.values[:1], _name_in, purpose="verdict on the checkpoint to resume from")
        if copy is not None and not name:
            self._sw_copy = copy
            copy.write_to(folder := Path(self._sw_services.enter_context(TemporaryDirectory())))
            return str(folder)
        return os.path.join(str(self.args.output_dir), name) if name else None

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        # Of another number of data ranks: the first one's.
        names = [f"rng_state_{self._sw_ranks.rank}.pth", "rng_state.pth", "rng_state_0.pth"]
        found = next((path for name in names if (path := Path(checkpoint, name)).is_file()), None)
        if found is None:
            return
        with safe_globals():
            state = torch.load(found, map_location="cpu", weights_only=True)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available() and isinstance(state["cuda"], torch.Tensor):
            torch.cuda.set_rng_state(state["cuda"])

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights, which the engine takes over when it is made; those of a save come with the optimizer."""
        engine, folder = self._sw_engine, Path(resume_from_checkpoint)
        has_engine = engine is not None and engine.model is self.model
        if has_weights(folder):
            self._sw_weights = folder
            if has_engine and not self.is_in_train:
                self._sw_take_over_weights(engine)
        elif has_engine:
            with engine.whole(optimizer=False, rank0_only=True):
                if self.args.should_save:
                    super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _sw_take_over_weights(self: Any, engine: Any) -> None:
        """Those that wait for the engine."""
        folder, self._sw_weights = self._sw_weights, None
        if folder is not None:
            load_weights(engine, folder)

    def _load_best_model(self: Any) -> None:
        if has_weights(folder := Path(self.state.best_model_checkpoint)):
            load_weights(self.engine, folder)
            return
        with self.engine.whole(optimizer=False, rank0_only=True):
            if self.args.should_save:
                super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / SAVE).is_dir():
            self._sw_weights = None
            load(folder / SAVE if self._sw_copy is None else self._sw_copy.store, self.engine, data=self._sw_data)
        elif (folder / OPTIMIZER).is_file():
            self._sw_load_plain(folder)
        if (folder / SCHEDULER).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True))

    def _sw_load_plain(self: Any, folder: Path) -> None:
        engine = self.engine
        if has_weights(folder) and load_plain(engine, folder):
            self._sw_weights = None
            return
        self._sw_take_over_weights(engine)
        # Adapters, and state with Python numbers: through the whole optimizer.
        with engine.whole(rank0_only=True):
            if self.args.should_save:
                state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
                self.optimizer.load_state_dict(state)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        """Nothing: the scale of losses comes with the state of the optimizer."""


def _name_in(answer: bytes) -> str:
    """The name of a folder."""
    name = answer.decode()
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no name")
    return name
