"""HubStore: a repository of the Hugging Face hub, read over the network at one commit."""

import errno
from typing import Any, NoReturn

from shardwise.checkpoint.local import checked_name
from shardwise.checkpoint.remote import FsspecStore, RemoteReader
from shardwise.errors import CheckpointError

SCHEME = "hf"


class HubStore(FsspecStore):
    """A `Store` in a repository of the hub: "hf://owner/name", "hf://owner/name@revision", or a folder in one.

    The revision is looked up once, when the store is made, and all is read from its commit, whatever is pushed
    meanwhile. Nothing can be changed. `file_system` is a `HfFileSystem` to use, such as one with a token.

    Raises CheckpointError when the package of the hub is missing, and for a repository or a revision that is not there
    or may not be read.
    """

    __slots__ = ()

    def __init__(self, address: str, *, file_system: Any = None) -> None:
        try:
            from huggingface_hub import HfApi, HfFileSystem
        except ImportError as error:
            raise CheckpointError(f"{address} needs the package of the hub: pip install huggingface_hub") from error
        # One of our own, whose cache holds what one commit has.
        used = HfFileSystem(skip_instance_cache=True) if file_system is None else file_system
        try:
            named: Any = used.resolve_path(address)
            if not hasattr(named, "revision"):
                raise ValueError("a bucket has no commits, and is not read here")
            api = HfApi(endpoint=used.endpoint, token=used.token)
            commit = api.repo_info(named.repo_id, revision=named.revision, repo_type=named.repo_type).sha
        # Missing, private, gated, no network: the hub has a class for each.
        except Exception as error:
            why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            raise CheckpointError(
                f"{address} cannot be read: {why}. An address is hf://owner/name[@revision]; for a private or gated "
                "repository log in (hf auth login), or set HF_TOKEN"
            ) from error
        fixed = type(named)(named.repo_type, named.repo_id, commit, named.path_in_repo)
        super().__init__(fixed.unresolve(), file_system=used)
        self.location = address

    def open(self, name: str) -> RemoteReader:
        """Open a file for reading; raises FileNotFoundError. Its bytes are asked for by range."""
        reader = super().open(name)
        # Without them it would look at the file again for each range, and read further than asked.
        reader.options = {"size": reader.size, "cache_type": "none"}
        return reader

    def write(self, name: str, *, num_bytes: int) -> NoReturn:
        """Refused: the hub is read here."""
        raise self._refusal(name)

    def create(self, name: str, data: bytes) -> NoReturn:
        """Refused: the hub is read here."""
        raise self._refusal(name)

    def check_creation(self, name: str) -> NoReturn:
        """Refused: the hub is read here."""
        raise self._refusal(name)

    def delete(self, name: str) -> NoReturn:
        """Refused: the hub is read here."""
        raise self._refusal(name)

    def _ask_anew(self) -> None:
        """A commit stays as it is."""

    def _refusal(self, name: str) -> OSError:
        text = "the hub is read here, and not written: write to a folder, and upload that (hf upload OWNER/NAME FOLDER)"
        return OSError(errno.EROFS, text, f"{self.location}/{checked_name(name)}")
