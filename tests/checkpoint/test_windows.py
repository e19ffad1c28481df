"""Windows: neighbours are one target, files are read straight where that is less, certificates read once more."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise import Rewrite, checkpoint
from shardwise.checkpoint import LocalStore
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.cut_tensors import cut, save_pieces, tensors_of
from tests.checkpoint.faulty import Counting, Hooked, Operation
from tests.checkpoint.memory_peaks import peak_of
from tests.checkpoint.stored_values import save_dcp


@pytest.mark.parametrize("width", [1, 3])
def test_a_tensor_of_many_columns_is_split_and_comes_back(tmp_path: Path, width: int) -> None:
    w = torch.randn(701, 300 * width)
    checkpoint.save(tmp_path / "a", {"w": w})
    report = checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("w -> m[0:300], axis=1"), certify=True)
    assert report.certificate is not None
    assert not report.certificate.lossy
    got = tensors_of(tmp_path / "b")
    assert all(torch.equal(got[f"m_{at}"], part) for at, part in enumerate(w.split(width, 1)))


def test_long_ranges_are_read_straight_and_columns_come_by_way_of_a_batch(tmp_path: Path) -> None:
    tensors = {name: torch.randn(256, 128) for name in ("a", "b", "c", "d")}
    save_file(tensors, tmp_path / "model.safetensors")
    rewrite = Rewrite("a, b -> rows, axis=0; c, d -> columns, axis=1")
    report = checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "hf", to="hf", rewrite=rewrite)
    assert report.read_bytes == report.num_bytes
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["rows"], torch.cat([tensors["a"], tensors["b"]]))
    assert torch.equal(found["columns"], torch.cat([tensors["c"], tensors["d"]], dim=1))


def test_a_file_that_ends_meanwhile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(256, 128)}, path)

    def cut_off(operation: Operation) -> None:
        if operation.kind == "read_into" and operation.num_bytes > 1 << 10:
            path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: .*ends"):
        checkpoint.convert(Hooked(LocalStore(tmp_path), cut_off), tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_columns_of_many_rows_are_read_in_few_calls(tmp_path: Path, kind: str) -> None:
    weight = torch.randn(4000, 16)
    if kind == "safetensors":
        save_file({"w": weight}, tmp_path / "a.safetensors")
    else:
        save_dcp(tmp_path, {"w": weight})
    store = Counting(LocalStore(tmp_path))
    piece = Piece(name="w", dtype="float32", global_shape=(4000, 16), offset=(0, 4), shape=(4000, 4))
    found = torch.zeros(4000, 4)
    sw.load(store, {piece: found})
    for got in (found, checkpoint.open(store).read("w", (slice(None), slice(4, 8)))):
        assert torch.equal(got, weight[:, 4:8])
    assert store.num_operations["read_into"] < 200
    # Few rows are read alone, and nothing between them.
    store.operations.clear()
    checkpoint.open(store).read("w", (slice(0, 100), slice(4, 8)))
    assert sum(each.num_bytes == 16 for each in store.operations if each.kind == "read_into") == 100


# Certificates

TENSORS = {name: torch.randn(size, 64) for name, size in (("q", 96), ("k", 48), ("v", 48), ("d", 96))}
NUM_BYTES = sum(each.nbytes for each in TENSORS.values())
FUSE = Rewrite("q, k, v -> qkv, fused_qkv, num_heads=8, num_key_value_groups=4, axis=0; d^T -> d")


def reads_of(source: Path, target: Path, **options: Any) -> tuple[float, checkpoint.Certificate]:
    """How often all data of the source was read, and what was certified."""
    store = Counting(LocalStore(source))
    certificate = checkpoint.convert(store, target, certify=True, **options).certificate
    assert certificate is not None
    large = [each.num_bytes for each in store.operations if each.kind == "read_into" and each.num_bytes >= 1024]
    return sum(large) / NUM_BYTES, certificate


def test_a_certificate_reads_the_source_once_more_only_where_its_digests_did_not_pass_by_in_order(
    tmp_path: Path,
) -> None:
    hub, fused = tmp_path / "hub", tmp_path / "fused"
    hub.mkdir()
    save_file(TENSORS, hub / "model.safetensors")
    assert 1 <= reads_of(hub, tmp_path / "plain")[0] < 1.1
    assert 1 <= reads_of(hub, fused, rewrite=FUSE)[0] < 1.1
    num_reads, certificate = reads_of(fused, tmp_path / "back", to="hf", rewrite=FUSE.inverse(), original=hub)
    assert 1 <= num_reads < 1.1
    assert str(certificate).endswith(f"; all 4 are as in {hub}")
    # A save of two ranks: each has half of the columns of `d`, and half of the rows of the others.
    parts = [cut(name, tensor, "columns" if name == "d" else "rows", 2) for name, tensor in TENSORS.items()]
    save_pieces(tmp_path / "cut", [{p: t for each in parts for p, t in each[rank].items()} for rank in range(2)])
    assert 1 <= reads_of(tmp_path / "cut", tmp_path / "whole", to="hf")[0] < 1.1
    # `d` is a third of the data: its halves of rows come in no order that a sum could take.
    num_reads, certificate = reads_of(tmp_path / "cut", tmp_path / "turned", to="hf", rewrite=FUSE)
    assert 1.3 < num_reads < 1.5
    digests = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in TENSORS.items()}
    assert {each.name: each.sha256 for each in certificate.tensors} == digests
    assert {each.name: each.returned_sha256 for each in certificate.tensors} == digests


# Memory, of all that goes through windows.


def through_windows(source: Path, folder: Path) -> None:
    """Conversions there and back by a rewrite, with a certificate, and to blocks with scales; a mean, a difference."""
    text = "q, k -> qk, axis=1; qk^T -> qk; big^T -> big; wide -> l, r, axis=1; half -> half, dtype='float32'"
    made, narrow = folder / "made", folder / "narrow"
    checkpoint.convert(source, made, to="pieces", rewrite=Rewrite(text))
    checkpoint.convert(made, folder / "back", rewrite=Rewrite(text).inverse(), certify=True)
    checkpoint.convert(made, narrow, to="hf", rewrite=Rewrite("big -> big, big_scale_inv, quantise='[128,128]'"))
    checkpoint.average([source, folder / "back"], folder / "mean", weights=[3, 1])
    assert checkpoint.diff(source, folder / "back").equal


@pytest.mark.slow
def test_memory_stays_below_the_largest_tensor_whatever_is_done_with_it(tmp_path: Path) -> None:
    """100 MB, with one tensor of 48 MiB, transposed, joined and split across rows, in windows of a fourth."""
    sizes = {"big": (2500, 5000), "wide": (500, 10_000), "q": (1250, 1000), "k": (1250, 2000), "half": (1250, 2000)}
    for name, part in (("large", 1), ("small", 50)):
        tensors = {key: torch.randn(rows // part, columns // part) for key, (rows, columns) in sizes.items()}
        checkpoint.save(tmp_path / name, {**tensors, "half": tensors["half"].half()})
    small, large = ((tmp_path / name, tmp_path / f"of the {name} one") for name in ("small", "large"))
    assert 4 < peak_of(through_windows, small, large, window_part=4) < 44
