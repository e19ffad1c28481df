"""One run on the model: its files are copied, converted, or only opened."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.rewrite.weights import STATEMENTS
from shardwise import checkpoint
from shardwise.rewrite import Rewrite

__all__ = ["CONVERSIONS", "COPY", "OPEN", "RUNS", "Taken", "run"]

COPY, OPEN = "copy the files", "only open"


def _copy(source: Path, destination: Path) -> None:
    """What a file manager does, and then what a save does: bytes that are not on the disk are not saved."""
    destination.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, destination / path.name)
        with open(destination / path.name, "rb") as file:
            os.fsync(file.fileno())


def _open(source: Path, _: Path) -> None:
    checkpoint.open(source)


def _as_it_is(source: Path, destination: Path) -> None:
    checkpoint.convert(source, destination, to="whole")


def _to_save(source: Path, destination: Path) -> None:
    checkpoint.convert(source, destination, to="whole", rewrite=Rewrite(STATEMENTS))


def _to_folder(source: Path, destination: Path) -> None:
    checkpoint.convert(source, destination, to="hf", rewrite=Rewrite(STATEMENTS))


CONVERSIONS: Mapping[str, Callable[[Path, Path], None]] = MappingProxyType(
    {"rewrite to a save": _to_save, "rewrite to Hugging Face files": _to_folder}
)
"""What was asked for, by what it is called."""

RUNS: Mapping[str, Callable[[Path, Path], None]] = MappingProxyType(
    {COPY: _copy, **CONVERSIONS, "to a save without a rewrite": _as_it_is, OPEN: _open}
)
"""What a process can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a run took."""

    seconds: float
    peak_bytes: int
    """The most memory that the process had: VmHWM, with its interpreter, its modules and the files that it maps."""


def run(name: str, source: Path, destination: Path) -> Taken:
    """Do it in this process, which does nothing else."""
    begun = time.perf_counter()
    RUNS[name](source, destination)
    seconds = time.perf_counter() - begun
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    (peak,) = (1024 * int(row[1]) for row in rows if row[0] == "VmHWM:")
    return Taken(seconds=seconds, peak_bytes=peak)
