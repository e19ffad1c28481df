"""Verification: every byte of a checkpoint against its checksum, and everything that is not as it was written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwise.checkpoint.addresses import Address, store_of
from shardwise.checkpoint.blocks import num_blocks
from shardwise.checkpoint.contents import Contents, StoredPiece
from shardwise.checkpoint.foreign import recognise
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.read_plan import BlockSpan
from shardwise.checkpoint.reading import BatchReader, batches_of, check_file
from shardwise.checkpoint.saves import folder_of, list_saves, load_contents, metadata_files, select, strays
from shardwise.checkpoint.sources import read_contents, was_removed, with_contents
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError
from shardwise.space import check_cover

__all__ = ["VerifyReport", "verify", "verify_all"]

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    location: str
    """Path or address of the save."""
    num_files: int
    num_tensors: int
    verified_bytes: int
    """Bytes that were compared with checksums."""
    findings: tuple[str, ...]
    """Everything that is wrong with the save; empty when it is whole."""
    notes: tuple[str, ...]
    """What lies in the folder and is no part of a save: torn saves, files of attempts that were interrupted."""

    @property
    def good(self) -> bool:
        """Whether the save is as it was written."""
        return not self.findings


def verify(
    path: Address, *, step: int | None = None, progress: Callable[[int], None] = lambda num_bytes: None
) -> VerifyReport:
    """Read every byte of the newest save at `path` (or the newest of `step`) and compare it with what was written.

    progress: called with the number of bytes after each batch. Memory stays bounded.
    Raises CheckpointError when there is no save, its manifest is damaged, or it is of a format without checksums.
    """
    store = store_of(path)
    report = with_contents(store, step, lambda contents: _verified(store, contents, progress))
    return replace(report, notes=tuple(_notes(store)))


def verify_all(path: Address, *, progress: Callable[[int], None] = lambda num_bytes: None) -> list[VerifyReport]:
    """Verify every committed save at `path`, oldest first; see `verify`. What cannot be read of one is a finding.

    The notes are in the last report. Saves that are removed meanwhile are left out.
    Raises CheckpointError when there is no save, or `path` holds a checkpoint of a format without checksums.
    """
    store = store_of(path)
    if recognise(store) not in (None, "shardwise"):
        _check_verifiable(read_contents(store))
    select(store)
    reports = []
    for number in list_saves(store).committed:
        name = folder_of(number) + MANIFEST
        try:
            contents = load_contents(metadata_files(store, number), number, location=store.location)
            reports.append(_verified(store, contents, progress))
        except CheckpointError as error:
            if name in store.names(folder_of(number).rstrip("/")):
                reports.append(_unreadable(f"{store.location}/{folder_of(number)}".rstrip("/"), error))
    if not reports:  # all were removed meanwhile: a saver that keeps the newest only
        return [verify(path, progress=progress)]
    return [*reports[:-1], replace(reports[-1], notes=tuple(_notes(store)))]


def _unreadable(location: str, error: CheckpointError) -> VerifyReport:
    return VerifyReport(
        location=location, num_files=0, num_tensors=0, verified_bytes=0, findings=error.problems, notes=()
    )


def _check_verifiable(contents: Contents) -> None:
    if not contents.verifiable:
        raise CheckpointError(
            f"{contents.location} is a {contents.format} checkpoint, which carries no checksums; convert it "
            "(shardwise ckpt convert) to have them from then on"
        )


def _verified(store: Store, contents: Contents, progress: Callable[[int], None]) -> VerifyReport:
    """The report on one save, without notes. Raises CheckpointError when it was removed meanwhile."""
    _check_verifiable(contents)
    stored = [piece for tensor in contents.tensors.values() for piece in tensor.pieces]
    sound, findings = _sound_files(store, contents)
    findings += check_cover(piece.piece for piece in stored)
    held = {tensor.name for tensor in contents.tensors.values() if tensor.pieces}
    findings += [
        f"{tensor.name}: its {tensor.num_bytes} bytes are in no file"
        for tensor in contents.tensors.values()
        if tensor.name not in held and tensor.num_bytes
    ]
    verified_bytes = 0
    for more, num_bytes in _damage(store, contents, [piece for piece in stored if piece.file in sound]):
        findings += more
        verified_bytes += num_bytes
        progress(num_bytes)
    if findings and was_removed(store, contents):
        raise CheckpointError(f"{contents.location} was removed while it was verified")
    return VerifyReport(
        location=contents.location,
        num_files=len(contents.file_sizes),
        num_tensors=len(contents.tensors),
        verified_bytes=verified_bytes,
        findings=tuple(findings),
        notes=(),
    )


def _sound_files(store: Store, contents: Contents) -> tuple[set[str], list[str]]:
    """Files that are there with the size that they should have; and what is wrong with the others, or with headers."""
    sound: set[str] = set()
    findings = []
    for name in contents.file_sizes:
        has_its_size, more = check_file(store, contents, name, head=True)
        if has_its_size:
            sound.add(name)
            findings += more
        else:
            findings += [f"{each}; it holds {_tensors_in(contents, name)}" for each in more]
    return sound, findings


def _tensors_in(contents: Contents, file: str) -> str:
    """Which tensors have pieces in a file, in few words."""
    names = [name for name, tensor in contents.tensors.items() if any(piece.file == file for piece in tensor.pieces)]
    shown = ", ".join(names[:3])
    return f"pieces of {shown}" + (f" and {len(names) - 3} other tensors" if len(names) > 3 else "")


def _damage(store: Store, contents: Contents, stored: list[StoredPiece]) -> Iterator[tuple[list[str], int]]:
    """Batch by batch: damage that was found, and the bytes that were read."""
    size = contents.block_bytes
    stored = sorted(stored, key=lambda piece: (piece.file, piece.start))
    spans = [BlockSpan(ordinal, 0, num_blocks(piece.num_bytes, size)) for ordinal, piece in enumerate(stored)]
    reader = BatchReader(store, contents, stored, verify=True)
    try:
        for batch in batches_of(spans, stored, block_bytes=size, max_bytes=_BATCH_BYTES):
            before = reader.read_bytes
            try:
                reader.read(batch)
            except CheckpointError as error:
                yield list(error.problems), 0
            else:
                yield [], reader.read_bytes - before
    finally:
        reader.close()


def _notes(store: Store) -> Iterator[str]:
    listing = list_saves(store)
    if listing.renamed:
        yield listing.renamed_note().removeprefix("; ")
    for number in listing.torn:
        yield f"save-{number:08d} is torn: {len(listing.files[number])} files of a save that was never committed"
    for number in listing.committed:
        try:
            others = strays(store, listing, number)
        except CheckpointError as error:
            if folder_of(number) + MANIFEST in store.names(folder_of(number).rstrip("/")):
                yield str(error)
            continue
        if others:
            yield f"{', '.join(others)}: left by an attempt that was interrupted; no part of a save"
