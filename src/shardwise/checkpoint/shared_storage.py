"""Shared storage: whether all ranks see what rank 0 writes, found out before anything depends on it."""

import contextlib
import json
import platform
import time

from shardwise.checkpoint.addresses import Address, store_of
from shardwise.checkpoint.commit import Attempt, begin, storing
from shardwise.checkpoint.saves import reason
from shardwise.checkpoint.stores import Store
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.errors import CheckpointError, few_of

__all__ = ["check_shared_storage"]

_PATIENCE_SECONDS = 60.0
"""A network file system may answer from its cache for so long (`acdirmax` of NFS) that a new folder is not there."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5
_LATE, _SEEN = b"late", b"seen"


def check_shared_storage(path: Address, channel: Channel, *, timeout_seconds: float) -> None:
    """Raise CheckpointError, the same on all ranks, unless rank 0 can write to `path` and every rank sees it there.

    Rank 0 leaves a small file in the folder of the next save and removes it again. Ranks look for it as long as a slow
    network file system may take to show it: a minute, and `timeout_seconds` at most. All ranks call this together.
    """
    attempt: Attempt | None = None
    with agreed(channel, purpose="a probe of the storage of saves") as agreement:
        store = store_of(path)
        if channel.rank == 0:
            attempt = begin(store)
            with storing(store, attempt.folder + attempt.probe_file, "created"):
                store.create(attempt.folder + attempt.probe_file, attempt.id.encode())
            agreement.value = json.dumps([attempt.number, attempt.id]).encode()
    # Nobody looks before it is there: a file system remembers for a while what it did not find.
    number, name = json.loads(agreement.values[0])
    written = Attempt(number=number, id=name)
    try:
        found = _look(store, written, channel, patience_seconds=min(timeout_seconds, _PATIENCE_SECONDS))
    finally:
        if attempt is not None:
            with contextlib.suppress(OSError):  # the next save removes it with the other rests of torn saves
                store.delete(attempt.folder + attempt.probe_file)
    facts = json.dumps([found, platform.node(), store.location]).encode()
    answers = [json.loads(each) for each in channel.exchange(facts, purpose="who sees the storage of saves")]
    if any(not_found for not_found, _, _ in answers):
        raise CheckpointError(_refusal(answers))


def _look(store: Store, written: Attempt, channel: Channel, *, patience_seconds: float) -> str:
    """Why this rank does not see the probe; empty once it does. Ranks stop looking together."""
    deadline = time.monotonic() + patience_seconds
    pause_seconds = 0.0
    why = "not there"
    while True:
        if why:
            time.sleep(pause_seconds)
            why = _missing(store, written)
        word = b"" if why else _SEEN
        # Ranks meet again and again, so that none seems stuck; the clock is that of rank 0.
        if channel.rank == 0 and time.monotonic() >= deadline:
            word = _LATE
        words = channel.exchange(word, purpose="whether the storage of saves is shared")
        if words[0] == _LATE or all(each == _SEEN for each in words):
            return why
        pause_seconds = min(max(_FIRST_PAUSE_SECONDS, 2 * pause_seconds), _LONGEST_PAUSE_SECONDS)


def _missing(store: Store, written: Attempt) -> str:
    name = written.folder + written.probe_file
    try:
        reader = store.open(name)
        try:
            seen = bytearray(min(reader.size, len(written.id)))
            reader.read_into(memoryview(seen), 0)
        finally:
            reader.close()
    except (OSError, EOFError) as error:
        return reason(error)
    return "" if bytes(seen) == written.id.encode() else "another file is there"


def _refusal(answers: list[tuple[str, str, str]]) -> str:
    """What is wrong, in words that are the same on all ranks."""
    _, own_host, own_location = answers[0]
    blind = {rank: answer for rank, answer in enumerate(answers) if answer[0]}
    first = next(iter(blind.values()))
    named = few_of([f"rank {rank} on {host}" for rank, (_, host, _) in blind.items()], quotes=False)
    text = (
        f"the storage of saves is not shared: rank 0 on {own_host} writes to {own_location}, and {named} "
        f"{'does' if len(blind) == 1 else 'do'} not find its file there ({first[0]})"
    )
    if first[2] != own_location:
        text += f"; the folder is {first[2]} there, since a relative path begins in the working directory of each rank"
    return (
        f"{text}. Every save would be lost. Save to a folder that all hosts mount (checkpoint.path or train.output of "
        "`shardwise train`), or to an address such as s3://bucket/run"
    )
