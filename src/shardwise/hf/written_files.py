"""Files that rank 0 writes: each takes its name in one act, and what goes wrong is said on all ranks."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import Writer
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
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


class WriteVerdict:
    """Whether rank 0 could write."""

    def __init__(self, channel: Channel, what: str) -> None:
        self._channel = channel
        self._what = what
        self.failure: CheckpointError | None = None

    def check(self) -> None:
        """Raise CheckpointError on all ranks, if it could not."""
        self.names(None)

    def names(self, own: Sequence[str] | None) -> list[str] | None:
        """What rank 0 gives. Raises CheckpointError on all ranks, if it could not write."""
        with agreed(self._channel, purpose=f"verdict on {self._what}", only=0) as agreement:
            if self.failure is not None:
                raise self.failure
            if self._channel.rank == 0:
                agreement.value = json.dumps(own).encode()
        names: list[str] | None = json.loads(bytes(agreement.values[0]))
        return names


@contextlib.contextmanager
def writing(channel: Channel, what: str) -> Iterator[WriteVerdict]:
    """Inside, rank 0 writes; all ranks ask for the verdict later, when no transfer is under way."""
    verdict = WriteVerdict(channel, what)
    try:
        yield verdict
    except (OSError, RuntimeError) as error:  # the second is what torch.save raises of a full disk
        verdict.failure = CheckpointError(f"{what} cannot be written: {error}")
