"""The file with every round of a benchmark, and what is noted of the machine."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

__all__ = ["write_rounds"]


def write_rounds(folder: Path, name: str, outcomes: Sequence[Any], command: str, **more: Any) -> dict[str, Any]:
    """Write `name.json`: how it was made, which is returned, and every round of every outcome (dataclasses)."""
    made = {
        "command": command,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"made": made, "outcomes": [asdict(outcome) for outcome in outcomes]}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
    return made
