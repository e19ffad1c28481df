"""ObjectStore: S3, GCS and Azure by obstore, whose compiled client repeats what fails and has many requests under way.

open       HEAD                          the size is known, and a missing file fails here
read_into  GETs of ranges, side by side  a large range is cut
write      PUT, or a multipart upload    parts go up while the next ones are put together; it appears at its end
create     HEAD, PUT If-None-Match: *    the service decides who is first
names      LIST                          nothing is kept between two listings
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint.local import checked_name
from shardwise.checkpoint.remote import (
    PARALLEL_REQUESTS,
    REQUEST_BYTES,
    RemoteWriter,
    check_creation_of,
    fill_by_requests,
    translated,
    without_password,
)
from shardwise.errors import CheckpointError

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
"""Of addresses that obstore knows, and in which a service decides who is first."""

_MOST_PARTS = 9_000
"""Of an upload. S3 takes 10,000, so that those of very large files are larger."""


class ObjectStore:
    """A `Store` in a service that obstore reaches: "s3://bucket/folder", "gs://...", "az://...".

    `address` is a URL. Credentials, regions and endpoints come from the environment (AWS_*, GOOGLE_*, AZURE_*), from
    the metadata of the host, and for S3 from boto3 where it is installed, which knows profiles and single sign-on.
    `client` is a store of `obstore.store` to use instead; then the address is for messages.

    `create` asks the service to refuse a name that is in use. When the answer to a put is lost and the repeated one is
    refused, the file is read back. If it holds our bytes, it is ours, so give every creator different bytes. Before the
    first save `check_creation` tries whether the service keeps to this: some that are like S3 do not.

    A file appears when the context of `write` ends. What a killed writer has uploaded stays hidden, and is removed by
    the bucket's rule for incomplete uploads. Raises CheckpointError when obstore is missing or the address is wrong.
    """

    __slots__ = ("_client", "_decides", "location")

    parallel_reads = PARALLEL_REQUESTS
    """See `Store.parallel_reads`: each read is a request with a way there and back."""

    def __init__(self, address: str, *, client: Any = None) -> None:
        self.location = without_password(address.rstrip("/"))
        """The address of the folder, without its password, which does not belong into messages."""
        self._client = _client_of(address, self.location) if client is None else client
        self._decides = False
        """Whether the service was seen to refuse a second creation."""

    def names(self, folder: str = "") -> Iterator[str]:
        """Names of all files at any depth below `folder`, sorted."""
        return iter(sorted(self.sizes(folder)))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Store.sizes`."""
        top = checked_name(folder) if folder else ""
        with translated(self._place(top)):
            found = {each["path"]: each["size"] for batch in self._client.list(top or None) for each in batch}
        # A console marks a folder by an object with its name: here that of the store's own has none.
        return {name: size for name, size in found.items() if name and (not top or name.startswith(f"{top}/"))}

    def folders(self) -> list[str]:
        """See `Store.folders`."""
        with translated(self.location):
            return [each.strip("/") for each in self._client.list_with_delimiter()["common_prefixes"]]

    def open(self, name: str) -> "_ObjectReader":
        """Open a file for reading; raises FileNotFoundError. Its bytes are asked for by range."""
        path = checked_name(name)
        with translated(self._place(name)):
            return _ObjectReader(self._client, path, self._place(name), self._client.head(path)["size"])

    def write(self, name: str, *, num_bytes: int) -> RemoteWriter:
        """Begin a new file, which appears when the context ends; raises FileExistsError when the name is in use.

        Raises ValueError when it was not `num_bytes` long.
        """
        # Looking first and writing then is good enough here: names of data files begin with the id of their attempt,
        # so that no two writers want the same one.
        path = checked_name(name)
        return RemoteWriter(self._place(path), num_bytes, begin=lambda: self._begin(path, num_bytes), end=_Upload.close)

    def create(self, name: str, data: bytes) -> None:
        """Make a whole file in one act; raises FileExistsError, and changes nothing, if there is one."""
        path = checked_name(name)
        self._refuse_existing(path)
        try:
            self._put(path, data)
        except FileExistsError:
            # A client that repeats a put, because the answer was lost, is refused by the file that it made itself.
            with translated(self._place(path)):
                there = bytes(self._client.get(path).bytes())
            if there != data:
                raise

    def check_creation(self, name: str) -> None:
        """See `Store.check_creation`. It is asked once."""
        if not self._decides:
            path = checked_name(name)
            check_creation_of(self._place(name), lambda data: self._put(path, data), lambda: self.delete(name))
            self._decides = True

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens when it is not there."""
        path = checked_name(name)
        with contextlib.suppress(FileNotFoundError), translated(self._place(path)):
            self._client.delete(path)

    def delete_all(self, names: Sequence[str]) -> None:
        """See `Store.delete_all`: a thousand in a request, or several requests at a time."""
        if not names:
            return
        paths = [checked_name(name) for name in names]
        try:
            with translated(self.location):
                self._client.delete(paths)
        except FileNotFoundError:  # some services say so, and stop there
            for path in paths:
                self.delete(path)

    def _refuse_existing(self, path: str) -> None:
        """Raise FileExistsError when there is a file."""
        try:
            with translated(self._place(path)):
                self._client.head(path)
        except FileNotFoundError:
            return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._place(path))

    def _begin(self, path: str, num_bytes: int) -> "_Upload":
        self._refuse_existing(path)
        part_bytes = max(REQUEST_BYTES, -(-num_bytes // _MOST_PARTS))
        return _Upload(self._client, path, part_bytes)

    def _put(self, path: str, data: bytes) -> None:
        with translated(self._place(path)):
            self._client.put(path, data, mode="create")

    def _place(self, name: str) -> str:
        return f"{self.location}/{name}".rstrip("/")


class _Upload:
    """A file that is sent in parts. Who does not close it makes none; obstore has no word to remove its parts."""

    def __init__(self, client: Any, path: str, part_bytes: int) -> None:
        from obstore import open_writer

        self._writer = open_writer(client, path, buffer_size=part_bytes, max_concurrency=PARALLEL_REQUESTS)

    def write(self, data: memoryview) -> None:
        """Append."""
        self._writer.write(bytes(data))  # a copy: it sends the memory that it is given, and later

    def close(self) -> None:
        """Make the file."""
        self._writer.close()


class _ObjectReader:
    """One file, read by ranges."""

    __slots__ = ("_client", "_path", "_place", "size")

    def __init__(self, client: Any, path: str, place: str, size: int) -> None:
        self._client = client
        self._path = path
        self._place = place
        self.size = size
        """Bytes of the file when it was opened."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start` on; raises EOFError when the file ends before."""
        fill_by_requests(self._place, self.size, buffer, start, self._get)

    def close(self) -> None:
        """Nothing is held: every read is a separate request."""

    def _get(self, start: int, stop: int) -> Any:
        with translated(self._place):
            return self._client.get_range(self._path, start=start, end=stop)


def has_obstore() -> bool:
    """Whether obstore is installed."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return True


def _client_of(address: str, location: str) -> Any:
    """The client for an address. Raises CheckpointError."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise CheckpointError(f"{location} needs obstore: pip install shardwise[object]") from error
    options: dict[str, Any] = {}
    if address.startswith("s3"):
        # Who names an endpoint without encryption means it.
        endpoints = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
        if any(each.startswith("http://") for each in endpoints):
            options["client_options"] = {"allow_http": True}
        if "AWS_ACCESS_KEY_ID" not in os.environ or "AWS_PROFILE" in os.environ:
            options |= _credentials_of_boto3(location)
    try:
        return from_url(address, **options)
    except Exception as error:  # obstore has many classes of them
        raise CheckpointError(f"{location} cannot be reached: {str(error).partition(chr(10))[0]}") from error


def _credentials_of_boto3(location: str) -> dict[str, Any]:
    """The credentials that boto3 finds, which are more than obstore knows. Raises CheckpointError where it misses."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        # Without it, obstore would ask the metadata service of the host, for minutes where there is none.
        file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
        if Path(file).expanduser().is_file():
            raise CheckpointError(
                f"{location} needs credentials. Those in {file} are read by boto3: pip install boto3, or set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        return {}
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # it finds none, and neither may be needed
        return {}
