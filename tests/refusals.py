"""Refusals as tables of (call, whole message). The messages are in tests/golden/refusals; `make golden` writes them.

    REFUSED = Refusals("engine.precision", {"an unknown dtype": lambda: sw.Precision(compute="float7")})

    @pytest.mark.parametrize("case", REFUSED)
    def test_refusals(case: str) -> None:
        REFUSED.check(case)

A call may take a folder, an empty one. In messages its path is FOLDER, a line of a program is its file and LINE, and
the random number of a save is ATTEMPT.
Whoever changes a message reads the difference.
"""

import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError

FOLDER = Path(__file__).parent / "golden" / "refusals"


class Refusals(Mapping[str, Callable[..., object]]):
    """The table of one test file."""

    def __init__(
        self,
        name: str,
        calls: Mapping[str, Callable[..., object]],
        *,
        kind: type[BaseException] | tuple[type[BaseException], ...] = ShardwiseError,
    ) -> None:
        """name: the room and the subject, as in "engine.precision". kind: what is raised."""
        self.path = FOLDER / f"{name}.json"
        self._calls = calls
        self._kind = kind

    def __getitem__(self, case: str) -> Callable[..., object]:
        return self._calls[case]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def check(self, case: str) -> None:
        """The call is refused in the words of the table, to the letter."""
        known = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        assert known.keys() <= self.keys(), f"`make golden` leaves out the messages of {self.path.name} without a call"
        assert self.said(case) == known.get(case), f"`make golden` writes the messages of {self.path.name} anew"

    def said(self, case: str) -> str:
        """The kind of the error, and its message."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                call: Any = self._calls[case]
                needed = [each for each in inspect.signature(call).parameters.values() if each.default is each.empty]
                call(*([Path(folder)] if needed else []))
            except self._kind as error:
                said = f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
                said = re.sub(r"\b[0-9a-f]{8}(?=-rank\d{5})", "ATTEMPT", said)
                return re.sub(r"[\w./-]*/(\w+\.py):\d+", r"\1:LINE", said)
        raise AssertionError(f"{case!r} is not refused")

    def write(self) -> None:
        """Write the messages of all calls."""
        FOLDER.mkdir(exist_ok=True)
        said = {case: self.said(case) for case in self._calls}
        self.path.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tables() -> list[Refusals]:
    """Those of all test files."""
    root = Path(__file__).parent
    files = [each for each in sorted(root.rglob("test_*.py")) if "Refusals(" in each.read_text(encoding="utf-8")]
    modules = [importlib.import_module(".".join(each.relative_to(root.parent).with_suffix("").parts)) for each in files]
    return [each for module in modules for each in vars(module).values() if isinstance(each, Refusals)]
