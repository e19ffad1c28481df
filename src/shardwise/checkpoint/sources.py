"""Sources: what a path holds, in whatever format, found out once and known to every rank."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TypeVar

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.formats.registry import is_unfinished, read_foreign, recognise
from shardwise.checkpoint.formats.unread import no_checkpoint
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.packed_contents import pack_contents, unpack_contents
from shardwise.checkpoint.saves import folder_of, read_save, select
from shardwise.checkpoint.stores import Address, Store, listed_once, refusals, store_of
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, json_as, understood
from shardwise.errors import CheckpointError, MismatchError, PeerError, ShardwiseError
from shardwise.rewrite.sections import uncollected

S = TypeVar("S")
T = TypeVar("T")

_ATTEMPTS = 10
"""Times that a reader may find its save removed, because newer ones are kept only, before it gives up."""


@uncollected()
def read_contents(store: Store, *, step: int | None = None) -> Contents:
    """What the checkpoint in `store` holds: the newest save of ours or the one of `step`, or another format's.

    Raises CheckpointError when there is none, or its metadata is damaged.
    """
    if is_unfinished(store.location):
        raise CheckpointError(no_checkpoint(store))
    seen = listed_once(store)
    with refusals(f"{store.location} cannot be listed"):
        kind = recognise(seen)
        if kind in (None, "shardwise"):
            return _read_save(store, seen, step)
    if step is not None:
        raise CheckpointError(
            f"{store.location} is a {kind} checkpoint, which has no steps to choose from; leave out step"
        )
    return read_foreign(seen)


def _read_save(store: Store, seen: Store, step: int | None) -> Contents:
    """The newest save, or that of `step`. seen: the store as it was a moment ago, which does for the first look."""
    looks = chain([seen], repeat(store))
    return with_newest(
        lambda: select(next(looks), step=step),
        lambda number: read_save(store, number),
        lambda number: _is_removed(store, folder_of(number) + MANIFEST),
    )


def with_newest(find: Callable[[], S], use: Callable[[S], T], is_removed: Callable[[S], bool]) -> T:
    """Do something with what was found; again with the newer save, where this one was removed meanwhile.

    `use` raises CheckpointError when it misses files.
    """
    # A trainer that keeps its newest saves may remove the one that is being read; then a newer one is there.
    for attempt in range(1, _ATTEMPTS + 1):
        found = find()
        try:
            return use(found)
        except CheckpointError:
            if attempt == _ATTEMPTS or not is_removed(found):
                raise
    raise AssertionError("the last attempt returns or raises")


def with_contents(store: Store, step: int | None, use: Callable[[Contents], T]) -> T:
    """As `with_newest`, of what `read_contents` gives."""
    return with_newest(lambda: read_contents(store, step=step), use, lambda contents: was_removed(store, contents))


def was_removed(store: Store, contents: Contents) -> bool:
    """Whether a save is no longer there: who missed files of it was late, and the save was not damaged."""
    return bool(contents.manifest) and _is_removed(store, contents.manifest)


def _is_removed(store: Store, manifest: str) -> bool:
    try:
        return manifest not in store.names(manifest.rpartition("/")[0])
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that all ranks know."""

    store: Store
    """Where this rank looks for it."""
    contents: Contents
    """What it holds, the same on all ranks."""
    readers: frozenset[int]
    """The ranks that see its files."""
    words: Sequence[bytes]
    """What each rank said besides."""


def agree_on_source(
    channel: Channel, path: Address, *, step: int | None, shared: bool, options: Callable[[], tuple[str, bytes]]
) -> Source:
    """The checkpoint at `path`, known to all ranks.

    shared: rank 0 reads the metadata for all, and every rank sees the files. Otherwise every rank looks; those that
    find the checkpoint are its readers. options: what this rank loads with, in words that are the same on all ranks.
    And what the others have to know besides.
    Raises the same error on all ranks: CheckpointError when none finds one, MismatchError for different options.
    """
    contents: Contents | None = None
    refusal: ShardwiseError | None = None
    place = packed = b""
    with agreed(channel, purpose="options of a load, and the checkpoint", num_parts=3) as agreement:
        given, agreement.value = options()
        store = store_of(path)
        # One rank reads: a thousand ranks that list and parse the same files are a burden for the storage. It also
        # makes all see the same save, where a new one appears meanwhile.
        if channel.rank == 0 or not shared:
            try:
                contents = read_contents(store, step=step)
            except ShardwiseError as error:  # first the options are compared, and another rank may see the checkpoint
                refusal = error
        if contents is not None:
            # The path for itself: one checkpoint may be mounted under different names.
            place = json.dumps(contents.location).encode()
            packed = pack_contents(replace(contents, location="")) if channel.size > 1 else b""
        agreement.parts = [given.encode(), place, packed]
    texts, places, answers = agreement.of_parts
    if different := [rank for rank, text in enumerate(texts) if text != texts[0]]:
        one, other = (each.decode(errors="replace") for each in (texts[0], texts[different[0]]))
        raise MismatchError(
            f"rank {different[0]} loads with {other}, but rank 0 with {one}; make the same call on all ranks"
        )
    known = understood(places, lambda each: json_as(str)(each) if each else None, purpose="place of the checkpoint")
    seen = {rank: each for rank, each in enumerate(known) if each is not None}
    if not seen:
        with agreed(channel, purpose="verdict on the checkpoint"):
            if refusal is not None:
                raise refusal
    first = min(seen, default=0)
    if others := [rank for rank in seen if answers[rank] != answers[first]]:
        raise CheckpointError(
            f"rank {first} and rank {others[0]} see different checkpoints at {seen[first]} and {seen[others[0]]}. "
            "Choose one that both see (step=..., or --resume PATH of one save), or remove the newer ones"
        )
    if contents is None:
        read = understood(
            answers, lambda each: unpack_contents(each) if each else None, purpose="contents of the checkpoint"
        )
        contents = read[first]
    if contents is None:
        raise PeerError(f"rank {first} gave no contents of the checkpoint", rank=first, operation="exchange")
    # The words of one rank for all, also where others know it under another path.
    contents = replace(contents, location=seen.get(first, ""))
    readers = frozenset(range(channel.size) if shared else seen)
    return Source(store=store, contents=contents, readers=readers, words=agreement.values)
