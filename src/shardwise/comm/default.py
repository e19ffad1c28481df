"""The channel of a program that names none."""

import os

import torch.distributed as dist

from shardwise.comm.alone import alone
from shardwise.comm.channel import Channel
from shardwise.comm.processes import processes


def default_channel() -> Channel:
    """The initialised process group, else the processes that torchrun announces, else a world of one."""
    initialised = dist.is_available() and dist.is_initialized()
    if initialised or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return processes()
    return alone()
