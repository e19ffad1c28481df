"""Copies of a Trainer's run in the memory of its hosts: a checkpoint without the model's own files.

    output_dir/checkpoint-40    seldom     train(resume_from_checkpoint=True) takes the newer one
    a copy of step 47           often      as a folder of its small files, whose shardwise/ is in memory

A copy holds what each rank owns, as `shardwise/` of a checkpoint does. Its `extra` has the small files of all ranks.
"""

import base64
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Replicas, Store
from shardwise.checkpoint import open as look_into
from shardwise.checkpoint.keeper_store import KeeperStore
from shardwise.comm.agreement import agreed, json_as, understood
from shardwise.hf.checkpoint_folders import SAVE
from shardwise.moving.nested_exchange import exchange
from shardwise.runs.copy_times import CopiesAtSteps

_FILES = "trainer"


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """A copy to resume from."""

    step: int
    files: Mapping[str, str]
    """Small files of a checkpoint by name, in base64."""
    store: Store
    """As this rank reaches it."""

    def write_to(self, folder: Path) -> None:
        """Write the small files, as a checkpoint has them."""
        (folder / SAVE).mkdir()
        for name, text in self.files.items():
            (folder / Path(name).name).write_bytes(base64.b64decode(text))


class MemoryCopies:
    """Those of one call of `train`."""

    def __init__(self, trainer: Any, replicas: Replicas, *, every: int) -> None:
        self._trainer, self._replicas = trainer, replicas
        self._copies = CopiesAtSteps(replicas, every=every)
        self._seen_step = -1

    def save(self) -> None:
        """Copy the run, when it is time; called after each step, and again when an epoch ends behind it."""
        state = self._trainer.state
        is_again, self._seen_step = state.global_step == self._seen_step, state.global_step
        if is_again == (state.epoch == int(state.epoch)):
            trainer = self._trainer
            self._copies.save(state.global_step, trainer.engine, extra=self._extra, data=trainer._sw_data)

    def newest(self) -> MemoryCopy | None:
        """The newest copy, the same on all ranks, which call this together; None where there is none."""
        found = self._replicas.newest()
        if not isinstance(found, KeeperStore):
            return None
        purpose, channel = "small files of a copy", self._trainer.channel
        with agreed(channel, purpose=purpose, only=0) as agreement:
            if channel.rank == 0:
                extra = look_into(found).extra
                agreement.value = json.dumps([extra["step"], extra[_FILES]]).encode()
        ((step, files),) = understood(agreement.values[:1], json_as(tuple[int, dict[str, str]]), purpose=purpose)
        return MemoryCopy(step, files, found)

    def forget(self) -> None:
        """What comes is another run."""
        self._replicas.forget()

    def _extra(self) -> dict[str, Any]:
        trainer = self._trainer
        trainer.store_flos()
        with tempfile.TemporaryDirectory() as folder:
            trainer._sw_save_small_files(folder)
            own = {each.name: base64.b64encode(each.read_bytes()).decode() for each in Path(folder).iterdir()}
        told = exchange(own, channel=trainer.channel, purpose="small files of a copy")
        return {
            "step": trainer.state.global_step,
            _FILES: {name: each for files in told for name, each in files.items()},
        }
