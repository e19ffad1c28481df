"""Which host a rank is on, said in one place: where errors leave the library, and where a channel says what broke.

    "rank 3 is gone (its process died)"       ->  "rank 3 (node07) is gone (its process died)"
    "ranks 3 and 5 differ"                    ->  "ranks 3 (node07) and 5 (node09) differ"
    "data rank 3 ..."                         stays: it is no rank of the world

Where all ranks are on one host, nothing is added.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.errors import CheckpointError, PlanError, RewriteError, ShardwiseError

_RANKS = re.compile(r"(?<!data )(?<!local )\b([Rr]anks? )(\d+(?:(?:, | and |, and )\d+)*)(?!\d| to \d|-\d)")


def with_hosts(text: str, hosts: Sequence[str]) -> str:
    """The text, in which each rank that is named has its host behind it. hosts: by rank; empty where unknown."""
    if len(set(hosts)) < 2:
        return text

    def named(found: re.Match[str]) -> str:
        rest = text[found.end() :]
        return found[1] + re.sub(r"\d+", lambda number: _named(number, found[2], rest, hosts), found[2])

    return _RANKS.sub(named, text)


def _named(number: re.Match[str], listed: str, rest: str, hosts: Sequence[str]) -> str:
    rank = int(number[0])
    host = hosts[rank] if rank < len(hosts) else ""
    is_last = number.end() == len(listed)
    says_it = is_last and rest.startswith((f" ({host})", f" on {host}"))
    return number[0] if says_it or not host else f"{number[0]} ({host})"


def hosts_of(channel: object) -> Sequence[str]:
    """The host of each rank of a channel; empty for a channel that does not know."""
    found: Sequence[str] = getattr(channel, "hosts", ())
    return found


@contextmanager
def naming_hosts(channel: object) -> Iterator[None]:
    """Errors of shardwise that leave this block name the host of each rank that they name."""
    try:
        yield
    except ShardwiseError as error:
        hosts = hosts_of(channel)
        # In the error itself: another one would lose its class, its attributes and where it comes from.
        error.args = tuple(with_hosts(each, hosts) if isinstance(each, str) else each for each in error.args)
        if isinstance(error, PlanError | CheckpointError | RewriteError):
            error.problems = tuple(with_hosts(each, hosts) for each in error.problems)
        raise
