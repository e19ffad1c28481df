"""All sides by name."""

from benchmarks.ours import OURS
from benchmarks.peers import PEERS
from benchmarks.workload import Side

SIDES: dict[str, Side] = {side.name: side for side in (*OURS, *PEERS)}


def side_named(name: str) -> Side:
    """Return the side; raise `KeyError` with all names for an unknown one."""
    if name not in SIDES:
        raise KeyError(f"no side is named {name}; there are {', '.join(SIDES)}")
    return SIDES[name]
