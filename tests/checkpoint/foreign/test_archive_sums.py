"""Verification of other formats: CRC-32 in archives of torch.save, and honest words where there are no checksums."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint.foreign.archive_sums import check_archives
from shardwise.errors import CheckpointError


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


def test_a_changed_byte_of_any_part_that_is_no_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(35.0), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist() if "/data/" not in name}
    for content in filter(None, parts.values()):
        data = bytearray(whole)
        data[whole.index(content)] ^= 16
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            raise_findings(path)


def raise_findings(path: Path) -> None:
    report = checkpoint.verify(path)
    if not report.good:
        raise CheckpointError(*report.findings)
