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
