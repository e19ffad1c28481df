"""Life: whether a process that took part before is still there, as far as its own host can tell.

Without a channel nothing tells of a peer's death. Each process therefore leaves in the store who it is; whoever waits
for it on the same host asks the kernel.
"""

import json
import os
from pathlib import Path

__all__ = ["is_gone", "own_record"]


def own_record() -> str:
    """This process, as others of its host know it; "" where the system does not say."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return json.dumps([host, os.readlink("/proc/self/ns/pid"), os.getpid(), _start_of(os.getpid())])
    except (OSError, ValueError, IndexError):
        return ""


def is_gone(record: str) -> bool:
    """Whether the process of a record was on this host and is no more; False where that cannot be known."""
    own = own_record()
    if not record or not own:
        return False
    *place, process, start = json.loads(record)
    if place != json.loads(own)[:2]:
        return False
    try:
        return _start_of(int(process)) != str(start)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False


def _start_of(process: int) -> str:
    """When a process was started, which tells it from a later one with its number. Zombies are gone."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
