"""The channel of a program that names none."""

import os

import torch.distributed as dist

from shardwise.comm.alone import alone
from shardwise.comm.channel import Channel


def default_channel() -> Channel:
    """The initialised process group, else the processes that torchrun announces, else a world of one."""
    initialised = dist.is_available() and dist.is_initialized()
    if initialised or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        from shardwise.comm.processes import processes

        return processes()
    return alone()
