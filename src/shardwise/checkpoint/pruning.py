"""Pruning: old saves go, the newest stay."""

from shardwise.checkpoint.addresses import Address, store_of
from shardwise.checkpoint.commit import storing
from shardwise.checkpoint.saves import Listing, folder_of, list_saves, read_head, remove_save
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError

__all__ = ["prune"]


def prune(path: Address, *, keep: int) -> list[str]:
    """Remove all committed saves at `path` but the newest `keep`; returns the folders that were removed.

    A save loses its manifest first, so that at no instant it seems whole and is not. In a run of many ranks one calls
    it. Saves whose manifest is damaged, or names files that are not there, do not count, and stay; so do saves under
    other names than savers give, and files that no saver has made.
    Raises CheckpointError when something cannot be removed.
    """
    if type(keep) is not int:
        raise CheckpointError(f"keep is {keep!r}, a {type(keep).__name__}; give a whole number")
    if keep < 1:
        raise CheckpointError(f"keep={keep} would leave no save; keep 1 or more")
    store = store_of(path)
    with storing(store, "", "listed"):
        listing = list_saves(store)
    good = [number for number in listing.committed if _is_good(store, listing, number)]
    removed = []
    for number in good[:-keep]:
        with storing(store, folder_of(number), "removed"):
            remove_save(store, listing, number)
        removed.append(folder_of(number).rstrip("/"))
    return removed


def _is_good(store: Store, listing: Listing, number: int) -> bool:
    """Whether a save may stand for older ones: it can be read, as far as its manifest and names of files say."""
    try:
        return listing.is_complete(number, read_head(store, number))
    except CheckpointError:
        return False
