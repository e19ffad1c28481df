"""Certificates read what was written, and what was converted only where its digests did not pass by in order."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise.checkpoint.local import LocalReader

ROWS = 96
TENSORS = {name: torch.randn(size, 64) for name, size in (("q", ROWS), ("k", ROWS // 2), ("v", ROWS // 2), ("d", ROWS))}
NUM_BYTES = sum(each.numel() * 4 for each in TENSORS.values())
FUSE = "q, k, v -> qkv, fused_qkv, num_heads=8, num_key_value_groups=4, axis=0; d^T -> d"


class Counted:
    """Bytes of data that are read from files."""

    num_bytes = 0

    def reads(self) -> float:
        """How often all data was read since the last question."""
        count, self.num_bytes = self.num_bytes / NUM_BYTES, 0
        return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts what is read in pieces of at least a KiB: no manifest and no header."""
    found, read_into = Counted(), LocalReader.read_into

    def counting(self: LocalReader, buffer: memoryview, start: int) -> None:
        read_into(self, buffer, start)
        found.num_bytes += buffer.nbytes if buffer.nbytes >= 1024 else 0

    monkeypatch.setattr(LocalReader, "read_into", counting)
    return found


def cut(folder: Path) -> Path:
    """A save of two ranks: each has half of the columns of `d`, and half of the rows of the others."""

    def run(channel: sw.Channel) -> None:
        pieces = {}
        for name, tensor in TENSORS.items():
            dim, rank = int(name == "d"), channel.rank
            half = [size // 2 if at == dim else size for at, size in enumerate(tensor.shape)]
            offset = tuple(rank * half[at] if at == dim else 0 for at in range(2))
            piece = sw.Piece(
                name=name, dtype="float32", global_shape=tuple(tensor.shape), offset=offset, shape=tuple(half)
            )
            pieces[piece] = tensor[piece.box.slices()].contiguous()
        sw.save(folder, pieces, channel=channel)

    sw.simulate(2, run)
    return folder


def test_a_certificate_costs_one_more_read_of_the_data(tmp_path: Path, counted: Counted) -> None:
    """It cost two, and four with an original."""
    hub = tmp_path / "model.safetensors"
    save_file(TENSORS, hub)
    convert, fuse = sw.checkpoint.convert, sw.Rewrite(FUSE)
    counted.reads()
    convert(hub, tmp_path / "plain", certify=True)
    assert 2 <= counted.reads() < 2.2
    convert(hub, tmp_path / "fused", rewrite=fuse, certify=True)
    assert 2 <= counted.reads() < 2.2
    convert(tmp_path / "fused", tmp_path / "back", to="hf", rewrite=fuse.inverse(), certify=True)
    assert 2 <= counted.reads() < 2.2
    report = convert(
        tmp_path / "fused", tmp_path / "compared", to="hf", rewrite=fuse.inverse(), certify=True, original=hub
    )
    assert 3 <= counted.reads() < 3.2
    assert str(report.certificate).endswith(f"; all 4 are as in {hub}")


def test_what_is_cut_across_its_rows_is_read_once_more_only_if_it_is_made_anew(
    tmp_path: Path, counted: Counted
) -> None:
    source = cut(tmp_path / "cut")
    counted.reads()
    sw.checkpoint.convert(source, tmp_path / "plain", to="hf", certify=True)
    assert 2 <= counted.reads() < 2.2
    # `d` is a third of the data: its halves of rows come in no order that a sum could take.
    sw.checkpoint.convert(source, tmp_path / "turned", to="hf", rewrite=sw.Rewrite(FUSE), certify=True)
    assert 2.3 < counted.reads() < 2.5


def test_the_digests_are_those_of_the_tensors(tmp_path: Path) -> None:
    expected = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in TENSORS.items()}
    for name, rewrite in (("plain", None), ("fused", sw.Rewrite(FUSE))):
        report = sw.checkpoint.convert(cut(tmp_path / name), tmp_path / f"{name} out", rewrite=rewrite, certify=True)
        assert report.certificate is not None
        assert {each.name: each.sha256 for each in report.certificate.tensors} == expected
        assert {each.name: each.returned_sha256 for each in report.certificate.tensors} == expected
