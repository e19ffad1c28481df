"""Which host a rank is on, where ranks are on more than one: in what a channel says of ranks, and in a note of errors.

    "rank 3 (node07) is gone (its process died)"     written with `RankNames`, by who knows the channel
    "ranks by host: 0, 1 on node05; 2, 3 on node07"  a note under every other error that leaves the library

Where all ranks are on one host, nothing is added.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.errors import ShardwiseError, few_of

_SHOWN_HOSTS, _SHOWN_RANKS = 16, 8


class RankNames:
    """Ranks in words, by number: "3 (node07)"."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        """hosts: by rank; empty where unknown."""
        self._hosts = hosts if len(set(hosts)) > 1 else ()

    def __getitem__(self, rank: int) -> str:
        host = self._hosts[rank] if rank < len(self._hosts) else ""
        return f"{rank} ({host})" if host else str(rank)


def hosts_of(channel: object) -> Sequence[str]:
    """The host of each rank of a channel; empty for a channel that does not know."""
    found: Sequence[str] = getattr(channel, "hosts", ())
    return found


def names_of(channel: object) -> RankNames:
    """The ranks of a channel in words."""
    return RankNames(hosts_of(channel))


def ranks_by_host(hosts: Sequence[str]) -> str:
    """The ranks of each host in words; empty where they are all on one. hosts: by rank; empty where unknown."""
    by_host: dict[str, list[str]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(str(rank))
    if len(by_host) < 2:
        return ""
    lines = [f"{few_of(ranks, _SHOWN_RANKS, quotes=False)} on {host}" for host, ranks in by_host.items()]
    more = f"; and {len(lines) - _SHOWN_HOSTS} more hosts" if len(lines) > _SHOWN_HOSTS else ""
    return f"ranks by host: {'; '.join(lines[:_SHOWN_HOSTS])}{more}"


@contextmanager
def naming_hosts(channel: object) -> Iterator[None]:
    """Errors of shardwise that leave this block have a note of the ranks of each host."""
    try:
        yield
    except ShardwiseError as error:
        note = ranks_by_host(hosts_of(channel))
        if note and note not in getattr(error, "__notes__", ()):  # an error may pass two places
            error.add_note(note)
        raise
