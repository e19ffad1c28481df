"""Files of JSON lines that grow with a run, and are continued by one that goes on."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """A file with a JSON object per line, which is on disk as soon as it is added.

    kept: the lines of the run before, with which it begins; they are written as they come.
    """

    def __init__(self, path: Path, *, kept: Iterable[str] = ()) -> None:
        # In one act: a run that is stopped here has the old file or the new one.
        begun = path.with_name(f"{path.name}.part")
        with begun.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in kept)
        begun.replace(path)
        # A line is handed to the system as soon as it is written: a killed run keeps the updates that it made.
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def add(self, values: Mapping[str, Any]) -> None:
        """Write a line; a number that is not finite has no JSON and becomes null."""
        self._file.write(json.dumps(_finite(values), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def lines_up_to(path: Path, last_step: int, *, before: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines of a file up to an update, and their values, one after the other.

    before: the key of a list; it and what follows are not read, as ranks have many values. The last line of a run that
    was killed may be torn.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            head, cut, _ = line.partition(f', "{before}": [') if before else (line, "", "")
            line, is_whole = line.rstrip("\n"), line.endswith("}\n")
            try:
                values = json.loads(head + "}" if cut and is_whole else line)
                # Updates after the save were made by the earlier run too, but are made again now: their lines would be
                # there twice.
                if values["step"] <= last_step:
                    yield line, values
            except (json.JSONDecodeError, KeyError, TypeError):
                continue


def _finite(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value
