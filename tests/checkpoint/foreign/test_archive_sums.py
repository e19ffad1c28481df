"""Verification of other formats: CRC-32 in archives of torch.save, and honest words where there are no checksums."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint.foreign.archive_sums import check_archives
from shardwise.errors import CheckpointError


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(35.0).view(5, 7), "b": torch.ones(3, dtype=torch.bfloat16), "n": torch.tensor(7)}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def places_of_parts(path: Path) -> dict[str, range]:
    """Where the bytes of each part are, by Python's own reader of archives and the headers of parts."""
    data, found = path.read_bytes(), {}
    for info in zipfile.ZipFile(path).infolist():
        head = data[info.header_offset :]
        start = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        found[info.filename] = range(start, start + info.file_size)
    return found


def test_bytes_that_no_archive_has_are_refused() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    one = file.getvalue()

    def parts(data: bytes) -> int:
        return len(list(check_archives(lambda start, count: data[start : start + count], len(data))))

    assert parts(one + one) == 2 * parts(one) > 0
    for data, at in ((one + b"x" + one, len(one) + 1), (one + b"x", len(one) + 1), (b"x" + one, 1)):
        with pytest.raises(CheckpointError, match=f"byte {at:,} is not the end of an archive"):
            parts(data)


def test_a_changed_byte_of_a_pickle_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(state(), path)
    for name, place in places_of_parts(path).items():
        if "/data/" not in name and len(place):
            flip(path, place.start)
            with pytest.raises(CheckpointError):
                raise_findings(path)
            flip(path, place.start)


def raise_findings(path: Path) -> None:
    report = checkpoint.verify(path)
    if not report.good:
        raise CheckpointError(*report.findings)
