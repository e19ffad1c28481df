"""Which channel a program gets that names none, and the one that belongs to an object."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.comm.agreement import aborting
from shardwise.comm.channel import Channel, alone
from shardwise.comm.device.kinds import only_device
from shardwise.comm.process.world import processes
from shardwise.launchers.environment import place_of


def default_channel() -> Channel:
    """The initialised process group, else the processes that a launcher announces, else a world of one.

    Each rank has the accelerator of its host, if there is one and the process group is not for the CPU alone.
    Launchers are torchrun, srun and mpirun. Raises PlanError where one announces several processes, but not enough for
    them to meet.
    """
    initialised = dist.is_available() and dist.is_initialized()
    return processes() if initialised or place_of(os.environ) is not None else alone(only_device(None))


@contextmanager
def given_or_default(channel: Channel | None, doing: str) -> Iterator[Channel]:
    """A channel for one thing to do: the one given, or the default one, which is closed afterwards.

    An error that the ranks have not agreed on aborts the channel, with what this rank was `doing`: no peer waits.
    """
    # A channel that was given may serve other things after this one: only its owner closes it.
    used = channel if channel is not None else default_channel()
    try:
        with aborting(used, doing):
            yield used
    finally:
        if channel is None:
            used.close()


def channel_of(state: object) -> Channel | None:
    """The channel of an object that has one as `channel`, such as an engine: its ranks hold the object together."""
    channel = getattr(state, "channel", None)
    return channel if isinstance(channel, Channel) else None
