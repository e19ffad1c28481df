"""Copying: files are filled with the outputs of a conversion, window by window, in bounded memory.

Two windows are in memory: one is read and put together while a thread hashes and writes the one before.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shardwise.checkpoint.buffers import GrowingBuffer
from shardwise.checkpoint.commit import Written
from shardwise.checkpoint.held import bytes_of
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.safetensors_files import DataFile, FileFilling
from shardwise.checkpoint.stores import Store, Writer
from shardwise.checkpoint.windows import BATCH_BYTES

__all__ = ["Copying", "Progress"]

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all, after each window."""


class Copying:
    """Fills files with pieces of the outputs."""

    def __init__(self, store: Store, outputs: Outputs, progress: Progress) -> None:
        self._outputs = outputs
        batch = GrowingBuffer(BATCH_BYTES)  # windows are read one after the other
        self._readers = (outputs.reader(store, batch), outputs.reader(store, batch))
        self._progress = progress
        self._done = 0
        self._total = outputs.num_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of data files read so far."""
        return sum(reader.read_bytes for reader in self._readers)

    def fill(self, file: DataFile, writer: Writer) -> Written:
        """Write a file. Raises CheckpointError for what cannot be read, and OSError for what cannot be written."""
        filling = FileFilling(file, writer, block_bytes=self._outputs.contents.block_bytes)
        with ThreadPoolExecutor(1, thread_name_prefix="shardwise-write") as thread:
            writing: Future[int] | None = None
            for turn, window in enumerate(self._outputs.windows(file.pieces)):
                parts = self._readers[turn % 2].read(window)
                self._finish(writing)
                writing = thread.submit(_write, filling, parts)
            self._finish(writing)
        filling.flush()
        return Written(filling.checksums)

    def _finish(self, writing: "Future[int] | None") -> None:
        if writing is not None:
            self._done += writing.result()
            self._progress(self._done, self._total)


def _write(filling: FileFilling, parts: Sequence[torch.Tensor]) -> int:
    """Write the elements of a window; returns how many bytes they have."""
    num_bytes = 0
    for elements in parts:
        data = elements.view(torch.uint8)
        filling.write(bytes_of(data))
        num_bytes += data.numel()
    return num_bytes
