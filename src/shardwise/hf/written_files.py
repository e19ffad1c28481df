"""Files that rank 0 writes: each takes its name in one act, and what goes wrong is said on all ranks."""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.full_tensors import full
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import Writer
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, json_as, understood
from shardwise.engine import Engine
from shardwise.engine.model.state import sources_of
from shardwise.errors import CheckpointError


@contextlib.contextmanager
def replacing(path: Path, *, num_bytes: int) -> Iterator[Writer]:
    """Takes the bytes of a file, which has its name when all are there and durable. Raises OSError."""
    hidden = f".{path.name}.new"
    with contextlib.suppress(FileNotFoundError):  # of a process that was killed
        os.unlink(path.parent / hidden)
    with LocalStore(path.parent).write(hidden, num_bytes=num_bytes) as writer:
        yield writer
    os.replace(path.parent / hidden, path)


class _WriteVerdict:
    """Whether rank 0 could write."""

    def __init__(self, channel: Channel, what: str) -> None:
        self._channel = channel
        self._what = what
        self.failure: CheckpointError | None = None

    def names(self, own: Sequence[str] | None = None) -> list[str] | None:
        """What rank 0 gives. Raises CheckpointError on all ranks, if it could not write."""
        with agreed(self._channel, purpose=f"verdict on {self._what}", only=0) as agreement:
            if self.failure is not None:
                raise self.failure
            if self._channel.rank == 0:
                agreement.value = json.dumps(own).encode()
        form = json_as(list[str] | None)
        (names,) = understood(agreement.values[:1], form, purpose=f"verdict on {self._what}")
        return names  # type: ignore[no-any-return]


@contextlib.contextmanager
def _writing(channel: Channel, what: str) -> Iterator[_WriteVerdict]:
    """Inside, rank 0 writes; all ranks ask for the verdict later, when no transfer is under way."""
    verdict = _WriteVerdict(channel, what)
    try:
        yield verdict
    except (OSError, RuntimeError) as error:  # the second is what torch.save raises of a full disk
        verdict.failure = CheckpointError(f"{what} cannot be written: {error}")


def write_streamed(
    engine: Engine[Any],
    what: str,
    note: Callable[[], Sequence[str] | None] | None,
    write: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    save: Callable[[], object],
    *,
    doing: str,
    optimizer: bool,
) -> None:
    """Have rank 0 write files of a model, or of its optimizers, tensor by tensor; all ranks call this together.

    note: called on rank 0 while tensors have shapes alone; the names of those that `write` takes, in their order. Where
        there is none, or it gives None, `save` is called with all tensors whole in the memory of rank 0.
    Raises CheckpointError, the same on all ranks, for what cannot be written.
    """
    channel, names = engine.channel, None
    if note is not None:
        own = None
        with engine.whole(optimizer=optimizer, rank0_only=True, only=()), _writing(channel, what) as verdict:
            if channel.rank == 0:
                own = note()
        names = verdict.names(own)
    if names is None:
        with engine.whole(optimizer=optimizer, rank0_only=True), _writing(channel, what) as verdict:
            if channel.rank == 0:
                save()
        verdict.names()
        return
    pieces = sources_of(engine.hand_over(doing=doing, needs_weights=optimizer))
    values = full(pieces, channel=channel, to=0, names=names, optimizer=optimizer)
    with _writing(channel, what) as verdict:
        if channel.rank == 0:
            write(values)
    # All go through to the end: the others wait for a rank that does not.
    deque(values, maxlen=0)
    verdict.names()
