"""Windows: neighbours are one target, files are read straight where that is less, certificates read once more."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise import Rewrite, checkpoint
from shardwise.checkpoint import LocalStore
from shardwise.checkpoint.reading import GrowingBuffer, OpenFiles
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.cut_tensors import cut, save_pieces, tensors_of
from tests.checkpoint.faulty import Counting, Hooked, Operation
from tests.checkpoint.stored_values import save_dcp

ZERO3 = Path(__file__).parent / "deepspeed" / "folders" / "z3-bf16-3"


@pytest.mark.parametrize("width", [1, 3])
def test_a_tensor_of_many_columns_is_split_and_comes_back(tmp_path: Path, width: int) -> None:
    w = torch.randn(701, 300 * width)
    checkpoint.save(tmp_path / "a", {"w": w})
    report = checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("w -> m[0:300], axis=1"), certify=True)
    assert report.certificate is not None
    assert not report.certificate.lossy
    got = tensors_of(tmp_path / "b")
    assert all(torch.equal(got[f"m_{at}"], part) for at, part in enumerate(w.split(width, 1)))


REWRITES = [None, "embed.weight^T -> embed.weight; shift -> shift, dtype='float64'; frozen.weight -> cold.weight"]


@pytest.mark.parametrize("rewrite", REWRITES)
def test_what_is_read_by_ranges_is_what_is_read_by_blocks(tmp_path: Path, rewrite: str | None) -> None:
    """A folder of ZeRO 3 has no checksums, and is read straight; a save of the same has, and is read in blocks."""
    checkpoint.convert(ZERO3, tmp_path / "save")
    made = []
    for source in (ZERO3, tmp_path / "save"):
        target = tmp_path / f"{source.name} out"
        options: dict[str, Any] = {} if rewrite is None else {"rewrite": Rewrite(rewrite)}
        report = checkpoint.convert(source, target, to="hf", certify=True, **options)
        if rewrite is None:
            assert report.read_bytes == report.num_bytes or source != ZERO3
        certificate = json.loads((target / "round-trip.json").read_text())
        certified = [each for each in certificate.values() if type(each) is list]
        assert certified
        made.append((load_file(target / "model.safetensors"), certified))
    (one, of_one), (other, of_other) = made
    assert of_one == of_other
    assert one.keys() == other.keys()
    assert all(torch.equal(each, other[name]) for name, each in one.items())


def test_a_file_is_opened_once_where_its_pieces_follow_one_another(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(b"0")
    store = Counting(LocalStore(tmp_path))
    files = OpenFiles(store)
    for name in "aaabbbcccddd":
        assert files[name].size == 1
        files.trim()
    files.close()
    assert [each.name for each in store.operations if each.kind == "open"] == [*"abcd"]


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


# Buffers: one memory for all uses, given back as a whole.


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def test_a_buffer_is_kept_grows_where_more_is_needed_and_takes_memory_only_while_it_is_used() -> None:
    buffer = GrowingBuffer(1000)
    first = buffer.room(10)
    assert (first.dtype, first.numel()) == (torch.uint8, 1000)
    assert buffer.room(1000).data_ptr() == first.data_ptr()
    assert buffer.room(5000).numel() == 5000
    first.fill_(7)  # views hold what they view
    assert int(first.sum()) == 7000
    before = resident()
    large = GrowingBuffer(64 << 20)
    memory = large.room(1)
    assert resident() - before < 8 << 20
    memory.fill_(1)
    assert resident() - before >= 60 << 20
    between = [torch.ones(100) for _ in range(100)]  # would keep the end of the heap where it is
    del large, memory
    assert resident() - before < 8 << 20
    assert len(between) == 100
