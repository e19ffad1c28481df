"""The saves in a store: which are committed, which are torn, and how they go away.

    save-00000001/manifest.json      committed: the manifest is created last, in one act that fails if there is one
    save-00000002/5e1f-...           no manifest: torn. It never happened; the next successful save removes it
    best/manifest.json               a save under another name: it loads by its own path, and nothing here removes it

Every saver takes the number after the newest committed save. Two that save at a time therefore meet at one manifest:
one creates it, the other finds it there and says so. Names of files begin with the id of the attempt, so that attempts
which share a folder never mix.

What is removed here cannot be had again. So only files with names and folders of savers go. A README, a copy of a
manifest or a folder of the user stays as it was.
"""

import contextlib
import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.checkpoint.blocks import checksum
from shardwise.checkpoint.contents import Contents, printable
from shardwise.checkpoint.formats.unread import no_checkpoint
from shardwise.checkpoint.manifest import MANIFEST, FileEntry, Head, contents_of
from shardwise.checkpoint.stores import (
    Address,
    OneFile,
    OpenFile,
    Store,
    delete_all,
    read_whole,
    refusals,
    sizes_of,
    store_of,
)
from shardwise.errors import CheckpointError, few_of

CERTIFICATE = "round-trip.json"
"""Says what came back of a conversion. It is written to the folder of a committed save, and removed with it."""


_NUMBER = r"(?!0{8}/)([0-9]{8}|[1-9][0-9]{8,199})/"
_FOLDER = re.compile(f"save-{_NUMBER}")
"""The one name of each number: the name that `folder_of` gives. Every other name is a user's."""

_TAKEN = re.compile("save-0*([0-9]{1,199})", re.IGNORECASE)
"""Names that sort, or on some file systems are, like those of saves: their numbers are not given again."""

_ID_DIGITS = 8

_OF_SAVE = re.compile(r"[0-9a-f]{8}-(rank[0-9]+\.safetensors|tensors-[0-9]+\.json)")
"""Names of the files that a manifest lists."""

_CREATED = r"[0-9a-f]{8}-rank[0-9]+\.report\.json|manifest\.json"
"""Names of the files that appear in one act, by way of a hidden one."""

_HIDDEN = rf"\.({_CREATED}|{re.escape(CERTIFICATE)})\.([0-9a-f]{{16}}\.new|lock)"

_OWN_FILE = re.compile(f"{_OF_SAVE.pattern}|{_CREATED}|{_HIDDEN}")
"""Names that savers give, directly in the folder of a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The saves in a store."""

    location: str
    committed: tuple[int, ...]
    """Numbers of committed saves, oldest first; (0,) where the store itself is the folder of one save."""
    torn: tuple[int, ...]
    """Numbers of saves that were begun and never committed."""
    files: dict[int, tuple[str, ...]]
    """Names of the files in the folder of each save."""
    renamed: tuple[str, ...] = ()
    """Folders with a manifest that savers did not name, or whose manifest has another name now. They stay."""

    @property
    def next_number(self) -> int:
        """The number that the next save takes: no folder with a manifest has it, whatever its exact name."""
        # `Save-00000007` is the folder of save 7 on a file system that does not tell letters apart.
        found = (_TAKEN.fullmatch(name) for name in self.renamed)
        return max([0, *self.committed, *(int(each.group(1)) for each in found if each)]) + 1

    def is_complete(self, number: int, head: Head) -> bool:
        """Whether all files are there that the head of a committed save names."""
        folder = folder_of(number)
        return {folder + name for name in _own_files(head)} <= set(self.files[number])

    def renamed_note(self) -> str:
        """A sentence about saves under other names; empty where there are none."""
        if not self.renamed:
            return ""
        named = few_of([printable(name) for name in self.renamed], quotes=False)
        verb = "holds" if len(self.renamed) == 1 else "hold"
        return f"; {named} {verb} a manifest under a name that no saver gives: load it by its own path"

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
    return listing_of(store.names(), location=store.location)


def listing_of(names: Iterable[str], *, location: str) -> Listing:
    """The saves among the files of a store."""
    files: dict[int, list[str]] = {}
    own: list[str] = []
    manifests: set[str] = set()
    for name in names:
        folder, _, file = name.rpartition("/")
        if found := _FOLDER.match(name):
            files.setdefault(int(found.group(1)), []).append(name)
        elif not folder:
            own.append(name)
        if folder and "/" not in folder and _is_manifest(file):
            manifests.add(folder)
    # The store is the folder of one save; what else it has is none of its saves.
    if MANIFEST in own:
        files, manifests = {0: own}, set()
    committed = {number for number, found in files.items() if folder_of(number) + MANIFEST in found}
    # What is left has a manifest that nothing here made or may remove, such as `manifest.json.bak` by a careful user.
    manifests -= {folder_of(number).rstrip("/") for number in committed}
    torn = [number for number in sorted(files.keys() - committed) if folder_of(number).rstrip("/") not in manifests]
    return Listing(
        location=location,
        committed=tuple(sorted(committed)),
        # Without a file of ours a folder is none of ours, whatever its name.
        torn=tuple(number for number in torn if _own(files[number], number)),
        files={number: tuple(found) for number, found in files.items()},
        renamed=tuple(sorted(manifests)),
    )


def select(store: Store, *, step: int | None = None) -> int:
    """The number of the newest committed save, or of the newest at `step`; CheckpointError when there is none.

    Saves whose manifest is damaged are passed over in the search for a step, and named when it is not found.
    """
    listing = list_saves(store)
    # A manifest that is named as a file is no save: its tables are other files, which this store does not show.
    if not listing.committed or isinstance(store, OneFile):
        if isinstance(store, OneFile) or not (listing.files or listing.renamed):
            raise CheckpointError(no_checkpoint(store))
        notes = f"{listing.torn_note()}{listing.renamed_note()}"
        raise CheckpointError(f"{store.location} holds no committed save{notes}")
    if step is None:
        return listing.committed[-1]
    # The step is in the head only, so each head is read until one fits.
    steps: list[int | None] = []
    damaged: list[str] = []
    # The newest first: a run that resumed from an older save may have saved a step twice, and the later one counts.
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
    return Head.unpack(read_whole(store, name), location=f"{store.location}/{name}")


def read_listed(store: Store, folder: str, entry: FileEntry) -> bytes:
    """A listed table, verified. Raises CheckpointError, which names the file."""
    # The size first: reading is bounded by it, and a table that has grown is damaged in any case.
    with OpenFile(store, folder + entry.name) as file:
        data = file.whole() if file.size == entry.bytes else b""
    if len(data) != entry.bytes or checksum(data).hex() != entry.checksum:
        raise CheckpointError(
            f"{store.location}/{folder}{entry.name} is damaged: its bytes are not the {entry.bytes} with the checksum "
            f"that {MANIFEST} states. Take an older save (step=..., --step), or get a good copy"
        )
    return data


def read_save(store: Store, number: int) -> Contents:
    """What a committed save holds, from its manifest and its tables, which are verified. Raises CheckpointError."""
    head, folder = read_head(store, number), folder_of(number)
    tables = [read_listed(store, folder, entry) for entry in head.tables]
    return contents_of(head, tables, folder=folder, location=f"{store.location}/{folder}".rstrip("/"))


def newest_after(store: Store, number: int) -> int:
    """The newest committed save with a higher number; 0 where there is none. Other saves are not looked into."""
    if (folders := getattr(store, "folders", None)) is None:
        newest = max(list_saves(store).committed, default=0)
        return newest if newest > number else 0
    found = (_FOLDER.fullmatch(f"{name}/") for name in folders())
    newer = sorted((int(each.group(1)) for each in found if each and int(each.group(1)) > number), reverse=True)
    return next((each for each in newer if f"{folder_of(each)}{MANIFEST}" in store.names(folder_of(each)[:-1])), 0)


def clean_up(store: Store, listing: Listing, number: int) -> None:
    """After the commit of save `number`: remove torn saves up to it, and what other attempts left in committed ones.

    listing: of when its attempt was begun, and with its own files. What is torn and older has lost by now.
    Saves with a higher number are left alone: they were begun after this commit and may still be at work.
    Only files with names that savers give go, out of folders whose names savers give, where no manifest names them.
    """
    for torn in listing.torn:
        if torn <= number:
            delete_all(store, _own(listing.files[torn], torn))
    for committed in listing.committed:
        # A save after ours was committed by another program, which cleans up by itself.
        if committed <= number:
            with contextlib.suppress(CheckpointError):  # its manifest is damaged: what is its own is unknown
                delete_all(store, strays(store, listing, committed))


def remove_save(store: Store, listing: Listing, number: int) -> None:
    """Remove a committed save, its manifest first: at no instant does a save seem whole that is not."""
    folder = folder_of(number)
    # A crash behind this line leaves a torn save, which the next save removes.
    store.delete(folder + MANIFEST)
    # The certificate is written by `convert` after the commit, so no manifest lists it.
    ours = [*_own(listing.files[number], number), folder + CERTIFICATE]
    delete_all(store, [name for name in ours if name in listing.files[number] and name != folder + MANIFEST])


def strays(store: Store, listing: Listing, number: int) -> list[str]:
    """Files that other attempts to save left in the folder of a committed save; what users put there is theirs."""
    folder = folder_of(number)
    if any(_is_manifest(name.removeprefix(folder)) for name in listing.files[number] if name != folder + MANIFEST):
        return []  # a second manifest, which may name them
    ours = _own(listing.files[number], number)
    of_saves = [name for name in ours if _OF_SAVE.fullmatch(name.removeprefix(folder))]
    if len(of_saves) == len(ours) - 1 and len({name.removeprefix(folder)[:_ID_DIGITS] for name in of_saves}) < 2:
        return []  # a manifest, and files of one attempt, which is the save: its manifest need not be read
    keep = {folder + name for name in _own_files(read_head(store, number))}
    return [name for name in ours if name not in keep]


def storing(store: Store, name: str, done: str) -> contextlib.AbstractContextManager[None]:
    """Say in our words what the store refuses while `name` is being `done` ("written", "created")."""
    return refusals(f"{store.location}/{name}".rstrip("/") + f" cannot be {done}", _kept)


def _kept(error: OSError | EOFError) -> str:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = ". Keep fewer saves, make room, or save elsewhere" if is_full else ""
    return f"; nothing was committed, and older saves are as they were{advice}"


def _own_files(head: Head) -> Iterable[str]:
    return [MANIFEST, *(entry.name for entry in (*head.files, *head.tables))]


def _own(names: Iterable[str], number: int) -> list[str]:
    """Files that a saver has made in the folder of a save. What users put there, folders among it, is theirs."""
    folder = folder_of(number)
    return [name for name in names if _OWN_FILE.fullmatch(name.removeprefix(folder))]


def _is_manifest(file: str) -> bool:
    """Whether a file may be a manifest, maybe set aside (`manifest.json.bak`) or in other letters (`Manifest.json`)."""
    return "/" not in file and file.lower().startswith(MANIFEST)


def prune(path: Address, *, keep: int, keep_every: int | None = None) -> list[str]:
    """Remove all committed saves at `path` but the newest `keep`; returns the folders that were removed.

    keep_every: saves whose step is a multiple of it stay as well.

    A save loses its manifest first, so that at no instant it seems whole and is not. In a run of many ranks one calls
    it. Saves with a damaged manifest or missing files do not count, and stay. So do saves under other names than savers
    give, and files that no saver has made. Nothing is removed unless a save that stays has all bytes of its files.
    Raises CheckpointError when something cannot be removed.
    """
    check_retention(keep, keep_every)
    store = store_of(path)
    with storing(store, "", "listed"):
        listing = list_saves(store)
    return remove_older(store, listing, keep=keep, keep_every=keep_every)


def remove_older(store: Store, listing: Listing, *, keep: int, keep_every: int | None) -> list[str]:
    """As `prune`, of the saves that are listed."""
    # Otherwise a damaged save would count as the one to keep, and the last that loads would go.
    good = [number for number in listing.committed if _is_good(store, listing, number)]
    staying = _staying(store, good, keep)
    # Oldest first: where it stops at an error, the newest saves are the ones that are left.
    removed = []
    for number in good[: max(0, len(good) - staying)]:
        if keep_every is not None and (step := read_head(store, number).step) is not None and step % keep_every == 0:
            continue
        with refusals(f"{store.location}/{folder_of(number)} cannot be removed"):
            remove_save(store, listing, number)
        removed.append(folder_of(number).rstrip("/"))
    return removed


def check_retention(keep: int, keep_every: int | None) -> None:
    """Raise CheckpointError for numbers by which no saves can be kept."""
    for name, given in (("keep", keep), ("keep_every", keep_every)):
        # True is an int of Python, and would keep one save.
        if given is not None and type(given) is not int:
            raise CheckpointError(f"{name} is {given!r}, a {type(given).__name__}; give a whole number")
    if keep is None or keep < 1:
        raise CheckpointError(f"keep is {keep}, which leaves no save; keep 1 or more")
    if keep_every is not None and keep_every < 1:
        raise CheckpointError(f"keep_every is {keep_every}; give a number of steps, 1 or more, or leave it out")


def _staying(store: Store, good: list[int], keep: int) -> int:
    """How many of the newest saves stay: `keep`, or so many that one of them has all bytes of its files."""
    for age, number in enumerate(reversed(good), 1):
        if _has_all_bytes(store, number):
            return max(keep, age)
    return len(good)


def _has_all_bytes(store: Store, number: int) -> bool:
    """Whether the files of a save are as long as its manifest says."""
    head, folder = read_head(store, number), folder_of(number)
    wanted = {folder + entry.name: entry.bytes for entry in (*head.files, *head.tables)}
    return sizes_of(store, wanted, folder=folder) == wanted


def _is_good(store: Store, listing: Listing, number: int) -> bool:
    """Whether a save may stand for older ones: it can be read, as far as its manifest and names of files say."""
    try:
        return listing.is_complete(number, read_head(store, number))
    except CheckpointError:
        return False
