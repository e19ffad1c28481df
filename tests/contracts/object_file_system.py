"""A file system of fsspec that behaves like an object store: cached listings, buffered uploads, its own exceptions."""

import contextlib
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile


class ServiceError(Exception):
    """What a service's client raises, which is no OSError."""


class ObjectFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    """Objects appear when their upload ends, and `pipe_file(mode="create")` is exclusive."""

    protocol = "objects"
    cachable = False
    async_impl = True  # as the object stores of fsspec are

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects
        self.listings: dict[str, list[dict[str, Any]]] = {}
        self.ranges: list[tuple[int | None, int | None]] = []
        """Of every read."""
        self.breaks: set[str] = set()
        """Names of the calls that fail."""
        self.loses_answers = False
        """Puts are done, but their answers are lost and the repeated ones refused."""

    def _break(self, call: str) -> None:
        if call in self.breaks:
            raise ServiceError("503 slow down")

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listings.clear()

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._break("ls")
        path = self._strip_protocol(path)
        if path not in self.listings:
            below: dict[str, dict[str, Any]] = {}
            for name, data in tuple(self.objects.items()):
                if name.startswith(f"{path}/"):
                    child, slash, _ = name[len(path) + 1 :].partition("/")
                    full = f"{path}/{child}"
                    below[full] = {"name": full, "size": len(data), "type": "directory" if slash else "file"}
            if not below:
                raise FileNotFoundError(path)
            self.listings[path] = list(below.values())
        return self.listings[path] if detail else [entry["name"] for entry in self.listings[path]]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._break("info")
        path = self._strip_protocol(path)
        with contextlib.suppress(FileNotFoundError):
            for entry in self.ls(path.rpartition("/")[0]):
                if entry["name"] == path:
                    return dict(entry)
        raise FileNotFoundError(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._break("cat_file")
        self.ranges.append((start, end))
        return self.objects[self._strip_protocol(path)][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._break("pipe_file")
        assert mode == "create"
        mine = bytes(bytearray(value))  # a new object, also for equal bytes
        if self.objects.setdefault(self._strip_protocol(path), mine) is not mine or self.loses_answers:
            raise FileExistsError("412 PreconditionFailed")

    def rm_file(self, path: str) -> None:
        self._break("rm_file")
        if self.objects.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "_Upload":
        return _Upload(self, path, mode, block_size=16)


class _Upload(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no annotations
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs._break("upload")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
        return True
