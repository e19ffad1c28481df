"""The saves in a store: which are committed, which are torn, the act of commit, and cleaning up.

    save-00000001/manifest.json      committed: the manifest is created last, in one act that fails if there is one
    save-00000002/5e1f-...           no manifest: torn. It never happened; the next successful save removes it

Every saver takes the number after the newest committed save. Two that save at a time therefore meet at one manifest:
one creates it, the other finds it there and says so. Names of files begin with the id of the attempt, so that attempts
which share a folder never mix.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.checkpoint.blocks import checksum
from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.manifest import MANIFEST, FileEntry, Head, contents_of
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError

__all__ = [
    "CERTIFICATE",
    "Listing",
    "clean_up",
    "list_saves",
    "load_contents",
    "read_file",
    "read_head",
    "remove_save",
    "select",
]

_FOLDER = re.compile(r"save-(\d{8,})/")

_ID_DIGITS = 8

_OF_SAVE = re.compile(r"[0-9a-f]{8}-(rank\d+\.safetensors|tensors-\d+\.json)")
"""Names of the files that a manifest lists."""

_OWN_FILE = re.compile(_OF_SAVE.pattern + r"|[0-9a-f]{8}-rank\d+\.report\.json|\..*\.(new|lock)|manifest\.json")
"""Names that savers give, hidden ones while a file is being made among them."""

CERTIFICATE = "round-trip.json"
"""Says what came back of a conversion. It is written beside the files of a committed save, and goes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What lies in a store."""

    location: str
    committed: tuple[int, ...]
    """Numbers of committed saves, oldest first; (0,) where the store itself is the folder of one save."""
    torn: tuple[int, ...]
    """Numbers of saves that were begun and never committed."""
    files: dict[int, tuple[str, ...]]
    """Names of the files of each save."""

    @property
    def next_number(self) -> int:
        """The number that the next save takes."""
        return max(self.committed, default=0) + 1

    def torn_note(self) -> str:
        """A sentence about torn saves; empty where there are none."""
        if not self.torn:
            return ""
        named = ", ".join(f"{folder_of(number).rstrip('/')} ({len(self.files[number])} files)" for number in self.torn)
        return f"; torn and not loadable: {named} - interrupted before the commit; the next successful save removes it"


def folder_of(number: int) -> str:
    """The folder of a save in its store, with the slash; number 0 is the store itself."""
    return f"save-{number:08d}/" if number else ""


def list_saves(store: Store) -> Listing:
    """List the saves in `store`; a store that is the folder of one save has that one, with number 0."""
    files: dict[int, list[str]] = {}
    own: list[str] = []
    for name in store.names():
        if found := _FOLDER.match(name):
            files.setdefault(int(found.group(1)), []).append(name)
        elif "/" not in name:
            own.append(name)
    if MANIFEST in own:
        files = {0: own}
    committed = [number for number, names in sorted(files.items()) if folder_of(number) + MANIFEST in names]
    return Listing(
        location=store.location,
        committed=tuple(committed),
        torn=tuple(number for number in sorted(set(files) - set(committed)) if any(map(_is_ours, files[number]))),
        files={number: tuple(names) for number, names in files.items()},
    )


def select(store: Store, *, step: int | None = None) -> int:
    """The number of the newest committed save, or of the newest at `step`; CheckpointError when there is none.

    Saves whose manifest is damaged are passed over in the search for a step, and named when it is not found.
    """
    listing = list_saves(store)
    if not listing.committed:
        what = "holds no committed save" if listing.files else "holds no checkpoint: it is empty or does not exist"
        raise CheckpointError(f"{store.location} {what}{listing.torn_note()}")
    if step is None:
        return listing.committed[-1]
    steps: list[int | None] = []
    damaged: list[str] = []
    for number in reversed(listing.committed):
        try:
            saved = read_head(store, number).step
        except CheckpointError as error:
            damaged += error.problems
            continue
        if saved == step:
            return number
        steps.append(saved)
    known = ", ".join("none" if each is None else str(each) for each in reversed(steps))
    raise CheckpointError(
        f"{store.location} has no save of step {step}; it has saves of these steps: {known or 'none that is readable'}",
        *damaged,
    )


def read_head(store: Store, number: int) -> Head:
    """The verified head of a committed save."""
    name = folder_of(number) + MANIFEST
    return Head.unpack(read_file(store, name), location=f"{store.location}/{name}")


def read_file(store: Store, name: str) -> bytes:
    """A whole file. Raises CheckpointError, which names it."""
    try:
        reader = store.open(name)
        try:
            buffer = bytearray(reader.size)
            reader.read_into(memoryview(buffer), 0)
        finally:
            reader.close()
    except FileNotFoundError as error:
        raise CheckpointError(f"{store.location}/{name} is missing, though the save names it") from error
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{store.location}/{name} cannot be read: {reason(error)}") from error
    return bytes(buffer)


def read_listed(store: Store, folder: str, entry: FileEntry) -> bytes:
    """A listed table, verified. Raises CheckpointError, which names the file."""
    data = read_file(store, folder + entry.name)
    if len(data) != entry.bytes or checksum(data).hex() != entry.checksum:
        raise CheckpointError(
            f"{store.location}/{folder}{entry.name} is damaged: its {len(data)} bytes are not the {entry.bytes} with "
            f"the checksum that {MANIFEST} states. Take an older save (step=..., --step), or get a good copy"
        )
    return data


def metadata_files(store: Store, number: int) -> list[bytes]:
    """The bytes of the manifest of a save and of its tables, verified."""
    folder = folder_of(number)
    manifest = read_file(store, folder + MANIFEST)
    head = Head.unpack(manifest, location=f"{store.location}/{folder}{MANIFEST}")
    return [manifest, *(read_listed(store, folder, entry) for entry in head.tables)]


def load_contents(metadata: list[bytes], number: int, *, location: str) -> Contents:
    """What `metadata_files` says that a save holds."""
    folder = folder_of(number)
    where = f"{location}/{folder}".rstrip("/")
    head = Head.unpack(metadata[0], location=f"{where}/{MANIFEST}")
    return contents_of(head, metadata[1:], folder=folder, location=where)


def clean_up(store: Store, number: int) -> None:
    """After the commit of save `number`: remove torn saves up to it, and what other attempts left in committed ones.

    Saves with a higher number are left alone: they were begun after this commit and may still be at work.
    """
    listing = list_saves(store)
    for torn in listing.torn:
        if torn <= number:
            _delete_all(store, filter(_goes_with_save, listing.files[torn]))
    for committed in listing.committed:
        if committed <= number:
            with contextlib.suppress(CheckpointError):  # its manifest is damaged: nobody knows what is its own
                _delete_all(store, strays(store, listing, committed))


def remove_save(store: Store, listing: Listing, number: int) -> None:
    """Remove a committed save, its manifest first: at no instant does a save seem whole that is not."""
    manifest = folder_of(number) + MANIFEST
    store.delete(manifest)
    _delete_all(store, (name for name in listing.files[number] if name != manifest and _goes_with_save(name)))


def strays(store: Store, listing: Listing, number: int) -> list[str]:
    """Files that other attempts to save left in the folder of a committed save; what users put there is theirs."""
    folder = folder_of(number)
    ours = [name for name in listing.files[number] if _is_ours(name)]
    of_saves = [name for name in ours if _OF_SAVE.fullmatch(name.removeprefix(folder))]
    if len(of_saves) == len(ours) - 1 and len({name.removeprefix(folder)[:_ID_DIGITS] for name in of_saves}) < 2:
        return []  # a manifest, and files of one attempt, which is the save: its manifest need not be read
    keep = {folder + name for name in _own_files(read_head(store, number))}
    return [name for name in ours if name not in keep]


def reason(error: BaseException) -> str:
    """What an error of the operating system says, without its number and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _own_files(head: Head) -> Iterable[str]:
    return [MANIFEST, *(entry.name for entry in (*head.files, *head.tables))]


def _is_ours(name: str) -> bool:
    """Whether a saver has made a file; what users put beside is theirs."""
    return _OWN_FILE.fullmatch(name.rpartition("/")[2]) is not None


def _goes_with_save(name: str) -> bool:
    """Whether a file is of no use without its save."""
    return _is_ours(name) or name.rpartition("/")[2] == CERTIFICATE


def _delete_all(store: Store, names: Iterable[str]) -> None:
    for name in names:
        store.delete(name)
