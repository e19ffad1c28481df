"""Stopping: where one rank fails, the others are told, so that none of them waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.comm import Channel
from shardwise.engine.zero.unshard import words_on_units
from shardwise.errors import MismatchError, PeerError


@contextmanager
def stopping_peers(world: Channel, doing: str) -> Iterator[None]:
    """Tell the other ranks when this one stops."""
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        if world.size > 1:
            world.abort(f"{type(error).__name__} in {doing}: {error}")
        if words := words_on_units(error):
            raise MismatchError(words) from error
        raise
