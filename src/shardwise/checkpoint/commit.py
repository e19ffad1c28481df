"""One attempt to save: its place in the store, and the act that makes it a save.

    rank 0        begin: number 7, id 5e1f09ab ------------> all ranks
    every rank    write 5e1f09ab-rank0000N.safetensors, durable; report its checksums to rank 0
    rank 0        all files seen from here? write the tables; a newer save by now? create manifest.json; clean up
    a failure     discard: what was written goes, unless the manifest is there after all

Nothing is locked. The number decides: of two attempts at one number one creates the manifest, and an attempt that finds
a newer save gives up. `check_shared_storage` finds out, before anything depends on it, that all ranks see one store.
"""

import contextlib
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from shardwise.checkpoint.arrangement import Arrangement
from shardwise.checkpoint.contents import CHECKSUM_BYTES, StoredPiece, StoredTensor
from shardwise.checkpoint.formats.registry import format_of
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.manifest import MANIFEST, FileEntry, Head, pack_tables
from shardwise.checkpoint.safetensors_files import DataFile
from shardwise.checkpoint.saves import Listing, clean_up, folder_of, listing_of, newest_after, read_head, storing
from shardwise.checkpoint.stores import Address, Store, reason, sizes_of, store_of
from shardwise.comm import Channel
from shardwise.comm.agreement import a_list, agreed, texts_in, understood
from shardwise.comm.digests import checksum
from shardwise.errors import CheckpointError, few_of
from shardwise.moving.replica_samples import compare_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Where one attempt to save writes. Rank 0 chooses, all ranks have the same."""

    number: int
    """Of the save that it wants to become."""
    id: str
    """With which the names of its files begin."""
    names: tuple[str, ...] = field(default=(), repr=False)
    """Of the files that were in the store when it was begun; on the rank that has begun it."""

    @property
    def folder(self) -> str:
        """The folder of the save in its store, with the slash."""
        return folder_of(self.number)

    def pack(self) -> bytes:
        """As bytes, for the other ranks."""
        return json.dumps([self.number, self.id]).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> "Attempt":
        """From bytes of `pack`. Raises TypeError or ValueError for any other."""
        number, name = a_list(packed)
        if type(number) is not int:
            raise TypeError("no place of a save")
        return cls(number=number, id=str(name))

    def data_file(self, rank: int) -> str:
        """Name of a rank's data file, relative to the folder."""
        return f"{self.id}-rank{rank:05d}.safetensors"

    def table_file(self, number: int) -> str:
        """Name of a table of tensors, relative to the folder."""
        return f"{self.id}-tensors-{number:05d}.json"

    def report_file(self, rank: int) -> str:
        """Name of what a rank says of its data file where ranks meet in the store, relative to the folder."""
        return f"{self.id}-rank{rank:05d}.report.json"

    @property
    def probe_file(self) -> str:
        """Name of the file by which ranks find out whether they share the store: what rank 0 would report."""
        return self.report_file(0)

    @property
    def creation_file(self) -> str:
        """Name of the file by which a store shows that it creates a name once: what no rank reports."""
        return self.report_file(99_999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What the manifest says besides the tensors."""

    step: int | None
    layout: str
    block_bytes: int
    aliases: Mapping[str, str]
    settings: Mapping[str, Any]
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank reports of its file: how it can be verified."""

    checksums: Sequence[bytes]
    """Of each piece, in the order of the file."""
    samples: bytes = b""
    """Digests of its replicas: see `replica_samples`."""

    def pack(self) -> bytes:
        """As bytes; the reader knows the pieces."""
        return b"".join([*self.checksums, self.samples])

    @classmethod
    def unpack(cls, data: bytes, file: DataFile, block_bytes: int) -> "Written":
        """From bytes of `pack`. Raises CheckpointError where they are not those of this file."""
        # No lengths are sent: how many checksums each piece has follows from its size.
        ends = [0]
        for num_bytes in file.sizes:
            ends.append(ends[-1] + CHECKSUM_BYTES * -(-num_bytes // block_bytes))
        if ends[-1] > len(data):
            raise CheckpointError(
                f"a rank has reported {len(data)} bytes of checksums for a file whose blocks have {ends[-1]}. Its "
                "memory is broken, or it runs another version of shardwise"
            )
        return cls([data[start:stop] for start, stop in pairwise(ends)], samples=data[ends[-1] :])


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What was saved."""

    location: str
    """Path or address of the folder of the save."""
    step: int | None
    """By which it can be loaded; None where none was given."""
    num_tensors: int
    """Tensors of the save, on all ranks together; a tied one counts once."""
    num_bytes: int
    """Bytes of all tensors."""
    written_bytes: int
    """Bytes that this rank wrote."""


def begin(store: Store) -> Attempt:
    """The next attempt in `store`, which is about to write: see `place_in`. Raises CheckpointError for a store that
    does not say which of two savers was first.
    """
    attempt = place_in(store)
    if (check := getattr(store, "check_creation", None)) is not None:
        name = attempt.folder + attempt.creation_file
        with storing(store, name, "created"):
            check(name)
    return attempt


def place_in(store: Store) -> Attempt:
    """Where the next attempt writes: the number after the newest committed save, and a new id. Nothing is written.

    Raises CheckpointError for a store that has no place for saves.
    """
    with storing(store, "", "listed"):
        names = tuple(store.names())
    listing, kind = listing_of(names, location=store.location), format_of(names)
    if kind not in (None, "shardwise"):
        raise CheckpointError(
            f"{store.location} holds a {kind} checkpoint, and a save in it would make it unreadable as one; name "
            "another folder"
        )
    # Number 0 is the store itself: its own files would be mixed with those of a second save.
    if listing.committed == (0,):
        raise CheckpointError(
            f"{store.location} is the folder of one save, and a save never changes; save to the folder around it, or "
            "to another one"
        )
    # The id is random: two programs that begin at once see the same saves and choose the same number.
    return Attempt(number=_free_number(store, listing.next_number), id=secrets.token_hex(4), names=names)


def _free_number(store: Store, number: int) -> int:
    """The first number from this one on whose folder is not a link or a file that a user put there."""
    if isinstance(store, LocalStore):
        while os.path.islink(path := f"{store.location}/{folder_of(number)}".rstrip("/")) or os.path.isfile(path):
            number += 1
    return number


def commit(
    store: Store,
    attempt: Attempt,
    arrangement: Arrangement,
    written: Sequence[Written],
    description: Description,
    *,
    again: Callable[[], bool] = lambda: False,
) -> Listing:
    """Make the attempt a save: called by one rank when all have reported. Afterwards the rest of torn saves is removed.

    Returns the saves that there are now: those of when it was begun, and this one.
    again: called while a rank's file is not visible here, as on network file systems for some seconds. Pauses, and says
        whether to look once more.
    Raises CheckpointError when another saver was faster, a rank's file is not visible here, replicas differ, or the
    store fails. Then no save was made.
    """
    compare_samples(arrangement.shared, [each.samples for each in written])
    folder = attempt.folder
    writers = [rank for rank in range(arrangement.num_ranks) if arrangement.file(rank).pieces]
    sizes = {rank: arrangement.file(rank).num_bytes for rank in writers}
    # Before the manifest: a save whose files not everybody can see would be committed, and not load.
    while problems := _unseen_files(store, attempt, sizes):
        # If the number is taken, the files are not late: the saver that committed it has removed ours as left over.
        _refuse_when_late(store, attempt, after=attempt.number - 1)
        if not again():
            raise CheckpointError(*problems)
    files = [
        FileEntry(
            name=attempt.data_file(rank),
            bytes=arrangement.file(rank).num_bytes,
            head_bytes=len(arrangement.file(rank).header),
            checksum=checksum(arrangement.file(rank).header).hex(),
        )
        for rank in writers
    ]
    pieces: dict[str, list[StoredPiece]] = {each.name: [] for each in arrangement.tensors}
    for rank in writers:
        # Ranks send checksums only: the rest of their files follows from the arrangement, which rank 0 has too.
        for stored in arrangement.file(rank).stored(attempt.data_file(rank), written[rank].checksums):
            pieces[stored.piece.name].append(stored)
    tensors = [
        StoredTensor(name=each.name, dtype=each.dtype, shape=each.global_shape, pieces=tuple(pieces[each.name]))
        for each in arrangement.tensors
    ]
    tables = []
    for number, table in enumerate(pack_tables(tensors, [entry.name for entry in files])):
        name = attempt.table_file(number)
        with storing(store, folder + name, "written"), store.write(folder + name, num_bytes=len(table)) as writer:
            writer.write(memoryview(table))
        tables.append(FileEntry(name=name, bytes=len(table), head_bytes=len(table), checksum=checksum(table).hex()))
    head = Head(
        id=attempt.id,
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        step=description.step,
        layout=description.layout,
        world_size=arrangement.num_ranks,
        file_layout=arrangement.file_layout,
        block_bytes=description.block_bytes,
        num_tensors=len(tensors),
        num_bytes=arrangement.num_bytes,
        files=files,
        tables=tables,
        aliases=dict(description.aliases),
        extra=dict(description.extra),
        settings=dict(description.settings),
    )
    # After a newer save, files of older attempts may be removed.
    _refuse_when_late(store, attempt, after=attempt.number)
    _create_manifest(store, attempt, head.pack())
    # Not listed again: many saves of many ranks are many names.
    own = [attempt.folder + name for name in (MANIFEST, *(each.name for each in (*files, *tables)))]
    listing = listing_of([*attempt.names, *own], location=store.location)
    # The save stands. What cannot be removed now goes with the next one.
    with contextlib.suppress(OSError, CheckpointError):
        clean_up(store, listing, attempt.number)
    return listing


def discard(store: Store, attempt: Attempt, rank: int | None) -> None:
    """Remove what `rank` (None: any rank) has written of an attempt that failed, as far as that can be done.

    Files of a rank that may still be writing stay: it would fail as well, and its words would hide the cause.

    Nothing is removed where the manifest is there after all: creating it may have failed after it took effect.
    """
    with contextlib.suppress(OSError, CheckpointError):
        if _stands(store, attempt):
            return
        for name in store.names(attempt.folder.rstrip("/")):
            # By id: another attempt may be at work in the same folder, with files of its own.
            if name.startswith(attempt.folder + attempt.id) and (rank is None or attempt.data_file(rank) in name):
                store.delete(name)


def _unseen_files(store: Store, attempt: Attempt, sizes: dict[int, int]) -> list[str]:
    """Findings about files that a rank says it has written, and that are not there from here, with all their bytes.

    Those that are there are taken out of `sizes`: nobody looks at them again.
    """
    problems = []
    names = {rank: attempt.folder + attempt.data_file(rank) for rank in sizes}
    # The size as well: a network file system may show a file before all of its bytes.
    found = sizes_of(store, names.values(), folder=attempt.folder)
    for rank, name in names.items():
        if (seen := found[name]) == sizes[rank]:
            del sizes[rank]
            continue
        why = seen if isinstance(seen, str) else f"it has {seen} bytes instead of {sizes[rank]}"
        problems.append(
            f"rank {rank} has written {store.location}/{name}, but rank 0 does not find all of it there ({why}). "
            "Save to storage that all ranks share. Nothing was committed"
        )
    return problems


def _refuse_when_late(store: Store, attempt: Attempt, *, after: int) -> None:
    """Raise CheckpointError where a save with a number above `after` is there by now."""
    with storing(store, "", "listed"):
        newest = newest_after(store, after)
    if newest:
        raise _lost(store, newest)


def _create_manifest(store: Store, attempt: Attempt, data: bytes) -> None:
    """The commit. A failure may come after it took effect: then the error says so."""
    try:
        with storing(store, attempt.folder + MANIFEST, "created"):
            store.create(attempt.folder + MANIFEST, data)
    except CheckpointError as error:
        is_there = False
        with contextlib.suppress(OSError, CheckpointError):
            is_there = _stands(store, attempt)
        # Four cases: refused by another saver's manifest, refused by our
        # own (asked twice), failed after it took effect, and failed.
        exists = isinstance(error.__cause__, FileExistsError)
        if exists and not is_there:
            raise _lost(store, attempt.number) from error
        if is_there and not exists:
            raise CheckpointError(
                f"{store.location}/{attempt.folder}{MANIFEST} was created, then the store failed: "
                f"{reason(error.__cause__ or error)}. The save loads, but a failure of the machine may lose it; save "
                "again"
            ) from error
        if not exists:
            raise
        # It exists and is ours: the store asked twice, because the answer to the first time was lost.


def _stands(store: Store, attempt: Attempt) -> bool:
    """Whether the manifest of this very attempt is there. Raises OSError or CheckpointError where it cannot be seen."""
    if attempt.folder + MANIFEST not in store.names(attempt.folder.rstrip("/")):
        return False
    # The id, not the number: the manifest that is there may be that of a faster saver.
    return read_head(store, attempt.number).id == attempt.id


def _lost(store: Store, number: int) -> CheckpointError:
    return CheckpointError(
        f"another program saved to {store.location} at the same time and committed {folder_of(number).rstrip('/')} "
        "first. This save was given up and changed nothing. Save again, or give each program its own folder"
    )


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
            agreement.value = attempt.pack()
    # Nobody looks before it is there: a file system remembers for a while what it did not find.
    (written,) = understood(agreement.values[:1], Attempt.unpack, purpose="a probe of the storage of saves")
    try:
        found = _look(store, written, channel, patience_seconds=min(timeout_seconds, _PATIENCE_SECONDS))
    finally:
        if attempt is not None:
            with contextlib.suppress(OSError):  # the next save removes it with the other rests of torn saves
                store.delete(attempt.folder + attempt.probe_file)
    # Every rank says what it found: the refusal names all that see nothing, and is the same on all ranks.
    facts = json.dumps([found, platform.node(), store.location]).encode()
    purpose = "which ranks see the storage of saves"
    answers = understood(channel.exchange(facts, purpose=purpose), _sight_in, purpose=purpose)
    if any(not_found for not_found, _, _ in answers):
        raise CheckpointError(_refusal(answers))


def _sight_in(packed: bytes) -> tuple[str, str, str]:
    """Why a rank does not see the probe, its host, and where it looks."""
    why, host, place = texts_in(packed)
    return why, host, place


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
    # Two hosts, each with a /tmp of its own, may both have a file of this name from earlier runs; only ours has our id.
    return "" if bytes(seen) == written.id.encode() else "another file is there"


def _refusal(answers: list[tuple[str, str, str]]) -> str:
    """What is wrong, in words that are the same on all ranks."""
    _, own_host, own_location = answers[0]
    blind = {rank: answer for rank, answer in enumerate(answers) if answer[0]}
    first = next(iter(blind.values()))
    named = few_of([f"rank {rank} on {host}" for rank, (_, host, _) in blind.items()], quotes=False)
    text = (
        f"the storage of saves is not shared: rank 0 on {own_host} writes to {own_location}; {named} "
        f"{'does' if len(blind) == 1 else 'do'} not find its file there ({first[0]})"
    )
    # The usual cause, and not seen from rank 0.
    if first[2] != own_location:
        text += f"; the folder is {first[2]} there, since a relative path begins in the working directory of each rank"
    return (
        f"{text}. Every save would be lost. Save to an address such as s3://bucket/run, or to a folder that all hosts "
        "mount (checkpoint.path or train.output)"
    )
