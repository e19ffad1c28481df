"""The folders of a trainer's checkpoints: each has its name when it is complete, and which of them a run goes on from.

.checkpoint-40.new/checkpoint-40/     while it is written; no program takes it for a checkpoint
checkpoint-40/                        by one rename, with all its files durable
.checkpoint-40.old/                   one that had the name before, until the new one has it
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.checkpoint.formats.registry import recognise
from shardwise.checkpoint.formats.torch_files.saved_values import read_file
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.stores import OneFile, OpenFile, about, reason
from shardwise.errors import CheckpointError

SAVE = "shardwise"
"""In a checkpoint, the folder with what each rank owns."""
OPTIMIZER, SCHEDULER, SCALER, STATE = "optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json"

_COMPLETE = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = re.compile(r"\.(checkpoint-\d+)\.(new|old)")
_SMALL = re.compile(r"scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth")
"""Files of torch that are read whole."""


class StagedCheckpoint:
    """A checkpoint that is being written."""

    def __init__(self, run: str, step: int) -> None:
        self._run, self._name = Path(run), f"checkpoint-{step}"
        self.parent = str(self._run / f".{self._name}.new")
        """The folder in which the checkpoint is meanwhile."""
        self.final = os.path.join(run, self._name)
        """The path that it gets."""

    def begin(self) -> None:
        """Clear away what killed processes left. Raises CheckpointError."""
        with _in_words(self._run):
            recover(self._run)
            os.makedirs(Path(self.parent, self._name))

    def publish(self) -> None:
        """Give it its name. Raises CheckpointError."""
        with _in_words(self._run):
            written = Path(self.parent, self._name)
            for folder, _, files in os.walk(written):
                for each in (folder, *(os.path.join(folder, file) for file in files)):
                    _sync(each)
            before = self._run / f".{self._name}.old"
            if os.path.isdir(self.final):
                os.rename(self.final, before)
            os.rename(written, self.final)
            _sync(self._run)
            shutil.rmtree(self.parent)
            shutil.rmtree(before, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.parent, ignore_errors=True)


def recover(run: Path) -> None:
    """Remove unfinished checkpoints of killed processes. One that was to be replaced, and was not, comes back."""
    for each in list(run.iterdir()) if run.is_dir() else []:
        if (found := _UNFINISHED.fullmatch(each.name)) is None:
            continue
        if found[2] == "old" and not (run / found[1]).exists():
            os.rename(each, run / found[1])
        else:
            shutil.rmtree(each)


def newest_complete(
    run: Path, *, after: int | None = None, may_begin: bool = False
) -> tuple[Path | None, dict[Path, list[str]]]:
    """The checkpoint of the latest step that is complete; and for each later one why it is not.

    after: a step that a run may resume from as well: None is given where no checkpoint is of a later one. may_begin:
    None is given where there is no checkpoint at all. Else raises CheckpointError where none is complete.
    """
    with _in_words(run):
        recover(run)
        named = [(each, _COMPLETE.fullmatch(each.name)) for each in run.iterdir()] if run.is_dir() else []
    steps = {each: int(found[1]) for each, found in named if found is not None and each.is_dir()}
    if after is not None:
        steps = {each: step for each, step in steps.items() if step > after}
    passed: dict[Path, list[str]] = {}
    for each in sorted(steps, key=lambda one: steps[one], reverse=True):
        if not (problems := problems_of(each)):
            return each, passed
        passed[each] = problems
    if after is not None or (may_begin and not passed):
        return None, passed
    if passed:
        raise CheckpointError(
            *(problem for problems in passed.values() for problem in problems),
            about=f"no checkpoint in {run} is complete. Train without resume_from_checkpoint",
        )
    raise CheckpointError(f"{run} has no checkpoint to resume from; train without resume_from_checkpoint")


def problems_of(folder: Path) -> list[str]:
    """What of the files that a run would read is missing or damaged, as far as their beginnings and lengths show it."""
    if not folder.is_dir():
        return [f"{folder} is no folder; give the path of a checkpoint"]
    problems: list[str] = []
    with _noting(problems):
        _check_state(folder / STATE)
    store = LocalStore(folder)
    with _noting(problems):
        if (folder / SAVE).is_dir():
            read_contents(LocalStore(folder / SAVE))
        elif recognise(store) is not None:  # reads what is beside the model as well, where there is an optimizer
            read_contents(store)
    for name in sorted(each.name for each in folder.iterdir() if _SMALL.fullmatch(each.name)):
        with _noting(problems), OpenFile(OneFile(store, name), name) as opened, about(opened.place):
            read_file(opened)
    return list(dict.fromkeys(problems))


def _check_state(file: Path) -> None:
    try:
        state: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, which is written last: the save was killed") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    if not isinstance(state, dict) or type(state.get("global_step")) is not int:
        raise CheckpointError(f"{file}: it has no global_step")


@contextlib.contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        problems += error.problems
    except OSError as error:
        problems.append(f"{error.filename}: {reason(error)}")


@contextlib.contextmanager
def _in_words(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or run} cannot be written: {reason(error)}") from error


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems that have nothing to sync there
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
