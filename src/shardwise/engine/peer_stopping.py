"""Stopping: where one rank fails, the others are told, so that none of them waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.comm import Channel
from shardwise.errors import CallMismatchError, PeerError


@contextmanager
def stopping_peers(world: Channel, doing: str, *, advice: str = "") -> Iterator[None]:
    """Tell the other ranks when this one stops. advice: what to do where ranks make calls that do not fit."""
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        if world.size > 1:
            world.abort(f"{type(error).__name__} in {doing}: {error}")
        if advice and isinstance(error, CallMismatchError):
            raise CallMismatchError(f"{error}\n{advice}") from error
        raise
