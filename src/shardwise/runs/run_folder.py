"""The folder of a run, for somebody who looks from outside: how far it is, and whether it still runs.

run.json         written by rank 0 at the start, and again at the end: {"steps", "ranks", "host", "pid", "ended"}
metrics.jsonl    a line per update, or per log of a Trainer; only its end is read, however long the run is

"ended"    process of "pid"              last line     the run is
null       is there, or on another host  is new        running
null       is there, or on another host  is old        silent
null       is gone                       any           dead: it was killed, or its machine stopped
"..."                                                  finished, stopped by SIGTERM, failed
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardwise.errors import ConfigError, in_words

METRICS = "metrics.jsonl"
_MARK = "run.json"
_TAIL_BYTES = 1 << 20
_SILENT_SECONDS = 60.0
"""And ten times as long as a line takes: after so long without one something is wrong."""


class RunMark:
    """`run.json` of a run that begins; `end` completes it."""

    def __init__(self, folder: Path, *, steps: int | None, num_ranks: int, rows: str = "tokens") -> None:
        """rows: what the run reads so many of per second."""
        self._path = folder / _MARK
        self._values: dict[str, Any] = {
            "steps": steps,
            "ranks": num_ranks,
            "rows": rows,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": time.time(),
            "ended": None,
        }
        self.said = "finished"
        """How it has ended, where no error says so."""
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Say how it ended; None: without an error."""
        said = self.said
        if error is not None:
            # A stop says it in its own words, and is no failure.
            stopped = not isinstance(error, Exception)
            said = in_words(error).partition("\n")[0] if not stopped else str(error) or type(error).__name__
            said = said if stopped else f"failed: {said}"
        self._values["ended"] = said
        self._write()

    def _write(self) -> None:
        begun = self._path.with_name(f"{_MARK}.part")
        begun.write_text(json.dumps(self._values) + "\n", encoding="utf-8")
        begun.replace(self._path)


def begun(folder: Path, *, steps: int | None, num_ranks: int, rows: str, setting: str = "") -> RunMark:
    """The mark of a run in its folder, which is made. Raises ConfigError where it cannot be written to.

    setting: that names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return RunMark(folder, steps=steps, num_ranks=num_ranks, rows=rows)
    except OSError as error:
        named = f"{setting}: " if setting else ""
        raise ConfigError(
            f"{named}the folder {folder} cannot be written to ({error.strerror}); name another one"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it is now."""

    folder: Path
    lines: Sequence[Mapping[str, Any]]
    """Of the last updates, the newest last."""
    mark: Mapping[str, Any]
    age_s: float
    """Of the newest line, or of the start where there is none."""

    @property
    def ended(self) -> str | None:
        """How it has ended; None: it has not, as far as can be seen from here."""
        if (said := self.mark.get("ended")) is not None:
            return str(said)
        if self.mark.get("host") == socket.gethostname() and not _is_alive(int(self.mark["pid"])):
            return f"dead: process {self.mark['pid']} of rank 0 is gone"
        return None

    @property
    def state(self) -> str:
        """One word or a few."""
        if (said := self.ended) is not None:
            return said
        if not self.lines:  # how seldom they come is not known: a Trainer writes one for each log
            return "no update yet" + (f" for {round(self.age_s)} s" if self.age_s > _SILENT_SECONDS else "")
        elapsed = [line["elapsed_s"] for line in self.lines if line.get("elapsed_s") is not None]
        pace_s = (elapsed[-1] - elapsed[0]) / (len(elapsed) - 1) if len(elapsed) > 1 else sum(elapsed)
        return f"silent for {round(self.age_s)} s" if self.age_s > _SILENT_SECONDS + 10 * pace_s else "running"


def view(folder: Path, *, num_lines: int = 10, now_s: float | None = None) -> RunView:
    """What a folder shows. Raises ConfigError for one that is not of a run."""
    path = folder / METRICS
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            # Without the first line, which may be cut, and what rank 0 is writing now.
            whole = file.read().decode(errors="replace").split("\n")[(size > _TAIL_BYTES) : -1]
        written_s = path.stat().st_mtime
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give the folder of a run, such as runs/demo, "
            "or the output_dir of a Trainer"
        ) from error
    lines: list[dict[str, Any]] = []
    for line in map(_parsed, whole[-2 * num_lines :]):
        if line is not None and "elapsed_s" in line:
            lines.append(line)
        elif line is not None and lines:  # an evaluation after its update
            lines[-1] |= line
    try:
        mark = _parsed((folder / _MARK).read_text(encoding="utf-8")) or {}
    except OSError:
        mark = {}  # a run of an earlier version
    return RunView(folder=folder, lines=lines[-num_lines:], mark=mark, age_s=(now_s or time.time()) - written_s)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True
