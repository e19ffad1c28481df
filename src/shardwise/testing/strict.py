"""The backend "strict" of torch.distributed for the fake device: a double of NCCL, between real processes of one host.

    from shardwise.testing import accelerator, strict

    strict.register()
    with accelerator.present(), accelerator.behind(accelerator.LAST):
        torch.accelerator.set_device_index(rank)
        dist.init_process_group("strict", ...)      # or "cpu:gloo,fake:strict"

It refuses, with an error, what NCCL refuses, and what would make NCCL hang, end the process or write over memory.
docs/guides/testing.md lists it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardwise.testing.accelerator import NAME, load, visible

STRICT = "strict"
"""The name of the backend."""


class RefusedError(AssertionError):
    """An operation on the device was refused after its call had returned."""


@cache
def register() -> None:
    """Make "strict" the backend of the fake device, for the rest of this process."""
    load()
    dist.Backend.register_backend(STRICT, _made, extended_api=True, devices=[NAME])


@contextmanager
def hanging() -> Iterator[None]:
    """Calls that do not meet hang as in NCCL, until an abort or the time-out: for tests of a watch of one's own."""
    torch.ops.fake_device.hang(True)
    try:
        yield
    finally:
        torch.ops.fake_device.hang(False)


def faults() -> list[str]:
    """What was refused since the last call, first first, and forgotten with this one. Until then every call raises it.

    An operation ends behind the host, so that often no call is there to raise an error. Ask at the end of a test.
    """
    return list(torch.ops.fake_device.take_faults())


def sent_bytes() -> dict[str, int]:
    """How many bytes each kind of operation ("ALLGATHER", "SEND/RECV") has sent to other ranks in this process."""
    return dict(zip(torch.ops.fake_device.sent_names(), torch.ops.fake_device.sent_bytes(), strict=True))


def check() -> None:
    """Wait for the current device, then raise RefusedError if an operation was refused since `faults` was asked."""
    torch.accelerator.synchronize()
    if found := faults():
        raise RefusedError("\n".join(found))


def _made(options: Any, _: Any) -> Any:
    # The group is thrown away: it turns the backend, which has no class of Python, into an object of Python.
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    timeout: timedelta = options.timeout
    torch.ops.fake_device.set_strict_backend(group.boxed(), timeout.total_seconds(), list(visible()))
    return group._get_backend(torch.device(NAME))
