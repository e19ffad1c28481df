"""The folders that Megatron wrote, in one archive: most of them is zeros, of zip archives with a tensor each."""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ARCHIVE = Path(__file__).with_name("folders.tar.xz")


class _Unpacked:
    """The folders of the archive, as long as this lives."""

    def __init__(self) -> None:
        self._place = TemporaryDirectory(prefix="megatron-")
        self.path = Path(self._place.name)
        if ARCHIVE.exists():
            with tarfile.open(ARCHIVE) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 was the first with it
                archive.extractall(self.path)


@cache
def _unpacked() -> _Unpacked:
    return _Unpacked()


def folders() -> Path:
    """The folders, to be read."""
    return _unpacked().path


@contextmanager
def changed_folders() -> Iterator[Path]:
    """The folders, to be changed: the archive is made anew of them."""
    held = _Unpacked()
    yield held.path
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        for each in sorted(held.path.iterdir()):
            archive.add(each, each.name)
