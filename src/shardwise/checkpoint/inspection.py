"""Inspection: look into a checkpoint of any format and read any part of it, and verify every byte.

Both work in one process. A saver that keeps the newest only may remove a save while it is read. Then missing files are
no damage: the error says so (`was_removed`), or the newer save is taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from shardwise.checkpoint.contents import MAX_INDEX, Contents, StoredPiece, StoredTensor
from shardwise.checkpoint.formats.registry import recognise
from shardwise.checkpoint.formats.torch_files.zip_parts import check_archives, has_archives
from shardwise.checkpoint.manifest import MANIFEST, unpacked
from shardwise.checkpoint.read_plan import StoredSpan, missing, plan_reads
from shardwise.checkpoint.read_rounds import ReadRounds, agree_on_rounds
from shardwise.checkpoint.reading import BatchReader, DataFiles, batches_of, check_files
from shardwise.checkpoint.saves import folder_of, list_saves, read_save, select, strays
from shardwise.checkpoint.sources import read_contents, was_removed, with_contents
from shardwise.checkpoint.stores import Address, OpenFile, Store, is_value, store_of
from shardwise.checkpoint.windows import BATCH_BYTES, ReadTarget
from shardwise.comm import Channel, alone
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import CheckpointError, PlanError, few_of
from shardwise.rewrite.sections import uncollected
from shardwise.space import Box, Piece, check_cover

Index = Box | slice | Sequence[slice]
"""A box of indices: a Box, or slices with step 1; missing ones take whole dims."""


class Catalogue:
    """What a checkpoint holds. Made by `shardwise.checkpoint.open`; nothing but metadata has been read.

    >>> catalogue = open("runs/demo/checkpoints")               # doctest: +SKIP
    >>> catalogue.tensors["embed.weight"].shape                  # doctest: +SKIP
    (32000, 4096)
    >>> catalogue.read("embed.weight", slice(0, 10)).shape       # doctest: +SKIP
    torch.Size([10, 4096])
    """

    def __init__(self, store: Store, contents: Contents) -> None:
        self.contents = contents
        """Everything that the metadata says."""
        self._store = store
        # Reads are those of a load on one rank; they meet no other.
        self._channel: Channel = alone("cpu")

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name: dtype, shape, pieces."""
        return self.contents.tensors

    @property
    def extra(self) -> dict[str, Any]:
        """What the user saved besides the tensors."""
        extra: dict[str, Any] = unpacked(self.contents.extra)
        return extra

    @property
    def step(self) -> int | None:
        """The step at which it was saved."""
        return self.contents.step

    @property
    def location(self) -> str:
        """Path or address of the save."""
        return self.contents.location

    def read(self, name: str, index: Index | None = None, *, verify: bool = True) -> torch.Tensor:
        """A tensor, or the part of it at `index`, on the CPU in the dtype in which it is stored.

        name: as stored, or one that it is tied to. verify: compare the blocks that are touched with their checksums;
        without it exactly the bytes of the part are read.
        Raises CheckpointError for an unknown name, an index outside the tensor, and damage.
        """
        stored = self._stored(name)
        piece = _piece_at(stored, index)
        if lacking := missing(stored.pieces, piece) if piece.num_elements else 0:
            raise CheckpointError(
                f"{self.location}: {lacking} of {piece.num_elements} elements of {piece} are in no file"
            )
        result = torch.empty(piece.shape, dtype=torch_dtype(piece.dtype))
        if not piece.num_elements:
            return result
        try:
            self._fill(result, stored, piece, verify=verify)
        except CheckpointError as error:
            if not was_removed(self._store, self.contents):
                raise
            raise CheckpointError(
                f"{self.location} was removed after it was opened, by prune or by a saver that keeps the newest; open "
                "it again"
            ) from error
        return result

    def _fill(self, result: torch.Tensor, stored: StoredTensor, piece: Piece, *, verify: bool) -> None:
        targets = [ReadTarget(piece, result, (piece.dtype,))]
        contents, channel = self.contents, self._channel
        plan = plan_reads(stored.pieces, [[piece]], 0, block_bytes=contents.block_bytes, readers={0})
        verify = verify and contents.verifiable
        with DataFiles(self._store) as files:
            rounds = ReadRounds(
                channel, files, contents, stored.pieces, plan, targets, verify=verify, may_read_exactly=not verify
            )
            agree_on_rounds(channel, [rounds], [], about=contents.location)
            rounds.fill(twice=False)

    def _stored(self, name: str) -> StoredTensor:
        found = self.tensors.get(name) or self.tensors.get(self.contents.aliases.get(name, name))
        if found is None:
            # Most unknown names lack a prefix such as "model.", or have one too many.
            near = [each for each in self.tensors if name in each or each in name][:5]
            hint = f"; names like it: {', '.join(near)}" if near else ""
            raise CheckpointError(f"{self.location} has no tensor {name!r}{hint}")
        return found


def open(path: Address, *, step: int | None = None) -> Catalogue:  # noqa: A001 - the promised name
    """Look into the checkpoint at `path`: the newest save of a folder, or the newest of `step`. See `load` for paths.

    Raises CheckpointError when there is none or its metadata is damaged.
    """
    store = store_of(path)
    return Catalogue(store, read_contents(store, step=step))


def _piece_at(stored: StoredTensor, index: Index | None) -> Piece:
    """The part of a tensor at an index."""
    whole = stored.whole
    if index is None:
        return whole
    if not isinstance(index, Box):
        slices = (index,) if isinstance(index, slice) else tuple(index)
        if len(slices) > len(stored.shape) or any(not isinstance(each, slice) for each in slices):
            raise CheckpointError(f"{stored.name} has shape {stored.shape}; {index!r} is no index of slices for it")
        # As in numpy and torch: what is left out at the end is everything.
        slices += (slice(None),) * (len(stored.shape) - len(slices))
        bounds = [each.indices(size) for each, size in zip(slices, stored.shape, strict=True)]
        if any(step != 1 for _, _, step in bounds):
            raise CheckpointError(f"{index!r} has a step; parts of tensors are read with step 1")
        index = Box(tuple(start for start, _, _ in bounds), tuple(max(0, stop - start) for start, stop, _ in bounds))
    try:
        return replace(whole, offset=index.offset, shape=index.shape)
    except PlanError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    location: str
    """Path or address of the save."""
    num_files: int
    """Data files of the save."""
    num_tensors: int
    """Tensors of the save; a tied one counts once."""
    verified_bytes: int
    """Bytes that were compared with checksums."""
    unverified_bytes: int = 0
    """Bytes that were read and have no checksum: all of them are there, and no one can tell whether they changed."""
    unverified_files: tuple[str, ...] = ()
    """Files that have such bytes."""
    findings: tuple[str, ...]
    """Everything that is wrong with the save; empty when nothing is."""
    notes: tuple[str, ...]
    """What of the files is in no tensor, or under a guessed name: see `Contents.notes`. And what is in the folder and
    no part of a save: torn saves, files of attempts that were interrupted."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong: all is there, and what has checksums is as it was written."""
        return not self.findings


@uncollected()
def verify(
    path: Address, *, step: int | None = None, progress: Callable[[int], None] = lambda num_bytes: None
) -> VerifyReport:
    """Read every byte of the newest save at `path` (or the newest of `step`) and compare it with what was written.

    Of other formats the archives of torch.save have checksums, of each part. Where there are none, the bytes of all
    tensors are read, and the report counts them apart: `unverified_bytes`.
    progress: called with the number of bytes after each batch. Memory stays bounded.
    Raises CheckpointError when there is no save, or its metadata is damaged.
    """
    store = store_of(path)
    report = with_contents(store, step, lambda contents: _verified(store, contents, progress))
    return _with_notes(report, store)


def verify_all(path: Address, *, progress: Callable[[int], None] = lambda num_bytes: None) -> list[VerifyReport]:
    """Verify every committed save at `path`, oldest first; see `verify`. What cannot be read of one is a finding.

    The notes are in the last report. Saves that are removed meanwhile are left out. Of another format it is the one
    checkpoint that `verify` takes.
    Raises CheckpointError when there is no save.
    """
    store = store_of(path)
    if recognise(store) not in (None, "shardwise"):
        return [verify(path, progress=progress)]
    # For its errors: a folder without a save has words of its own.
    select(store)
    reports = []
    for number in list_saves(store).committed:
        name = folder_of(number) + MANIFEST
        try:
            contents = read_save(store, number)
            reports.append(_verified(store, contents, progress))
        except CheckpointError as error:
            # Else it was removed since it was listed, and is no finding.
            if name in store.names(folder_of(number).rstrip("/")):
                reports.append(_unreadable(f"{store.location}/{folder_of(number)}".rstrip("/"), error))
    if not reports:  # all were removed meanwhile: a saver that keeps the newest only
        return [verify(path, progress=progress)]
    return [*reports[:-1], _with_notes(reports[-1], store)]


def _with_notes(report: VerifyReport, store: Store) -> VerifyReport:
    return replace(report, notes=(*report.notes, *_notes(store)))


def _unreadable(location: str, error: CheckpointError) -> VerifyReport:
    return VerifyReport(
        location=location, num_files=0, num_tensors=0, verified_bytes=0, findings=error.problems, notes=()
    )


def _verified(store: Store, contents: Contents, progress: Callable[[int], None]) -> VerifyReport:
    """The report on one save, without notes on its folder. Raises CheckpointError when it was removed meanwhile."""
    stored = [piece for tensor in contents.tensors.values() for piece in tensor.pieces]
    # Files that are missing or truncated are one finding each, not one for every block in them.
    files = DataFiles(store)
    sound, findings = _sound_files(files, contents)
    # The table may be whole and wrong: pieces that overlap, or leave elements out, are found here.
    findings += check_cover(piece.piece for piece in stored)
    # check_cover sees pieces only, and so no tensor that has none.
    held = {tensor.name for tensor in contents.tensors.values() if tensor.pieces}
    findings += [
        f"{tensor.name}: its {tensor.num_bytes} bytes are in no file"
        for tensor in contents.tensors.values()
        if tensor.name not in held and tensor.num_bytes
    ]
    # Numbers of pickles are stored in names, and were verified with the pickles.
    named = {name for name in sound if not is_value(name)}
    archives = set() if contents.verifiable else {name for name in named if _is_archive(store, name)}
    others = [piece for piece in stored if piece.file in named - archives]
    num_bytes = {True: 0, False: 0}
    unverified = set() if contents.verifiable else {piece.file for piece in others}
    for more, read_bytes, has_sum, name in chain(
        chain.from_iterable(_archive_damage(store, contents, name) for name in sorted(archives)),
        ((*each, contents.verifiable, "") for each in _damage(files, contents, others)),
    ):
        findings += more
        num_bytes[has_sum] += read_bytes
        if name and not has_sum:
            unverified.add(name)
        progress(read_bytes)
    # Only with findings: a save that was removed after its last byte was read has been verified.
    if findings and was_removed(store, contents):
        raise CheckpointError(f"{contents.location} was removed while it was verified")
    return VerifyReport(
        location=contents.location,
        num_files=sum(not is_value(name) for name in contents.file_sizes),
        num_tensors=len(contents.tensors),
        verified_bytes=num_bytes[True],
        unverified_bytes=num_bytes[False],
        unverified_files=tuple(sorted(unverified)),
        findings=tuple(findings),
        notes=contents.notes,
    )


def _sound_files(files: DataFiles, contents: Contents) -> tuple[set[str], list[str]]:
    """Files that are there with the size that they should have; and what is wrong with the others, or with headers."""
    sound: set[str] = set()
    findings = []
    names = contents.file_sizes
    for name, has_its_size, more in check_files(files, contents, names, heads=names):
        if has_its_size:
            sound.add(name)
            findings += more
        else:
            findings += [f"{each}; it holds {_tensors_in(contents, name)}" for each in more]
    return sound, findings


def _tensors_in(contents: Contents, file: str, start: int = 0, stop: int = MAX_INDEX) -> str:
    """Which tensors have pieces in a file, or in these bytes of it, in few words."""
    names = [
        name
        for name, tensor in contents.tensors.items()
        if any(
            piece.file == file and start < piece.start + piece.num_bytes and piece.start < stop
            for piece in tensor.pieces
        )
    ]
    return f"pieces of {few_of(names, quotes=False)}" if names else "no tensor"


def _is_archive(store: Store, name: str) -> bool:
    with OpenFile(store, name) as file:
        return has_archives(file.read, file.size)


def _archive_damage(store: Store, contents: Contents, name: str) -> Iterator[tuple[list[str], int, bool, str]]:
    """Of each part of the archives in a file: damage, bytes, whether it has a checksum, and the name of the file."""
    place = f"{store.location}/{name}"
    try:
        with OpenFile(store, name) as file:
            for part in check_archives(file.read, file.size):
                stop = part.start + part.num_bytes
                found = []
                if part.good is False:
                    held = _tensors_in(contents, name, part.start, stop)
                    found = [
                        f"{place} is damaged: its part {part.name}, bytes {part.start} to {stop}, does not have the "
                        f"checksum recorded when it was written; it holds {held}"
                    ]
                yield found, part.num_bytes, part.good is not None, name
    except CheckpointError as error:
        yield [f"{place} is damaged: {each.removeprefix(f'{place} ')}" for each in error.problems], 0, True, name


def _damage(files: DataFiles, contents: Contents, stored: list[StoredPiece]) -> Iterator[tuple[list[str], int]]:
    """Batch by batch: damage that was found, and the bytes that were read."""
    # In the order of the bytes: a disk, and the kernel that reads ahead, are fastest so.
    stored = sorted(stored, key=lambda piece: (piece.file, piece.start))
    spans = [StoredSpan(ordinal, 0, piece.num_bytes, piece) for ordinal, piece in enumerate(stored)]
    batches = batches_of(spans, block_bytes=contents.block_bytes, max_bytes=BATCH_BYTES)
    with BatchReader(files, contents, verify=True) as reader:
        for begun in reader.ahead((batch, None) for batch in batches):
            before = files.read_bytes
            try:
                reader.finish(begun)
            except CheckpointError as error:
                # Goes on: a verification finds all damage, not the first.
                yield list(error.problems), 0
            else:
                yield [], files.read_bytes - before


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
