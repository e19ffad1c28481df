"""All sides by name."""

import importlib.util
import sys

from benchmarks.hybrid.tensor import TENSOR
from benchmarks.ours import OURS
from benchmarks.peers import PEERS
from benchmarks.workload import Side

SIDES: dict[str, Side] = {side.name: side for side in (*OURS, *PEERS, *TENSOR)}


def side_named(name: str) -> Side:
    """Return the side; raise `KeyError` with all names for an unknown one."""
    if name not in SIDES:
        raise KeyError(f"no side is named {name}; there are {', '.join(SIDES)}")
    return SIDES[name]


def installed(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the sides whose library is here; says which are left out."""
    left_out = [name for name in names if name.startswith("deepspeed")]
    if not left_out or importlib.util.find_spec("deepspeed") is not None:
        return names
    print(f"without {', '.join(left_out)}: pip install 'shardwise[bench]' brings DeepSpeed", file=sys.stderr)
    return tuple(name for name in names if name not in left_out)
