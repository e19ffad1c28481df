"""The channel of a program that names none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.comm.alone import alone
from shardwise.comm.channel import Channel
from shardwise.comm.processes import processes
from shardwise.errors import ShardwiseError
from shardwise.launchers import place_of


def default_channel() -> Channel:
    """The initialised process group, else the processes that a launcher announces, else a world of one.

    Launchers are torchrun, srun and mpirun. Raises PlanError where one announces several processes, but not enough for
    them to meet.
    """
    initialised = dist.is_available() and dist.is_initialized()
    return processes() if initialised or place_of(os.environ) is not None else alone()


def channel_of(state: object) -> Channel | None:
    """The channel of an object that has one as `channel`, such as an engine: its ranks hold the object together."""
    channel = getattr(state, "channel", None)
    return channel if isinstance(channel, Channel) else None


@contextmanager
def given_or_default(channel: Channel | None, doing: str) -> Iterator[Channel]:
    """A channel for one thing to do: the one given, or the default one, which is closed afterwards.

    Errors that ranks do not agree on are told to the peers, with what this rank was `doing`, so that none waits.
    """
    used = channel if channel is not None else default_channel()
    try:
        yield used
    except ShardwiseError:
        raise
    except BaseException as error:
        used.abort(f"{type(error).__name__} in {doing}: {error}")
        raise
    finally:
        if channel is None:
            used.close()
