"""How ranks talk: one protocol, `Channel`, and its implementations.

`processes` (torch.distributed) and `launch`, which starts such processes, are loaded when first used; `simulate` runs n
ranks in this process; `alone` is a world of one; `Recorded` wraps any channel and lists its calls.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.comm.alone import alone
from shardwise.comm.channel import Channel, Work
from shardwise.comm.recorded import Call, Recorded
from shardwise.comm.simulated import simulate

if TYPE_CHECKING:
    from shardwise.comm.launch import launch
    from shardwise.comm.processes import processes

__all__ = ["Call", "Channel", "Recorded", "Work", "alone", "launch", "processes", "simulate"]


def __getattr__(name: str) -> object:
    if name not in ("launch", "processes"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function: object = getattr(import_module(f"{__name__}.{name}"), name)
    # The import has bound the name to the submodule; the function is what callers of the room mean by it.
    globals()[name] = function
    return function
