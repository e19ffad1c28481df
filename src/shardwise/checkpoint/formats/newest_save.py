"""The newest save of a folder of saves, where a file of another program names it."""

from collections.abc import Callable, Sequence

from shardwise.checkpoint.stores import Store, read_whole
from shardwise.errors import CheckpointError


def newest_save(
    store: Store, names: Sequence[str], latest: str, folder_of: Callable[[str], str] = lambda said: said
) -> str:
    """The folder of the save that the file `latest` names, with "/" at its end. names: of all files in the store.

    folder_of: the folder for what the file says. Raises CheckpointError for a save that is not there.
    """
    # The name of a folder, and whatever else is in a file that has this name by chance.
    said = read_whole(store, latest)[:4096].decode(errors="replace").strip()
    folder = f"{folder_of(said)}/"
    if not any(name.startswith(folder) for name in names):
        raise CheckpointError(
            f"{store.location}/{latest} names the save {said[:100]!r}, which is not there; name the folder of a save"
        )
    return folder
