"""Where in the user's own code something happened."""

import sys
from pathlib import Path

_OURS = str(Path(__file__).parents[2])


def user_site() -> str:
    """The innermost line of code that belongs neither to shardwise nor to torch: "file.py:12, in forward"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_OURS) and module.partition(".")[0] not in ("torch", "contextlib", "threading"):
            return f"{name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside of any file"


def outermost_method(owner: object) -> str:
    """The name of the first method of `owner` in the calls that lead here; empty where there is none."""
    frame = sys._getframe(1)
    name = ""
    while frame is not None:
        if frame.f_locals.get("self") is owner:
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return name
