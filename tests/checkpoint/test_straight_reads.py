"""Conversions that read files straight into their windows write the bytes of those that read blocks, and read less."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import reading, windows
from shardwise.checkpoint.local import LocalReader, LocalStore
from shardwise.checkpoint.stores import Reader, open_data
from shardwise.space import Piece
from tests.checkpoint.stored_values import save_dcp

ZERO3 = Path(__file__).parent / "deepspeed" / "folders" / "z3-bf16-3"
NEVER, ALWAYS = 1 << 40, 0
"""Ranges that are too short to be read alone: all of them, and none."""


def written(folder: Path) -> tuple[bytes, object]:
    """The tensors, and what the certificate says of each."""
    certificate = json.loads((folder / "round-trip.json").read_text())
    return (folder / "model.safetensors").read_bytes(), [each for each in certificate.values() if type(each) is list]


@pytest.mark.parametrize(
    "rewrite", [None, "embed.weight^T -> embed.weight; shift -> shift, dtype='float64'; frozen.weight -> cold.weight"]
)
def test_zero3_is_the_same_by_ranges_and_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrite: str | None
) -> None:
    monkeypatch.setattr(reading, "_MAX_OPEN_FILES", 1)  # of three
    made: dict[int, tuple[bytes, object]] = {}
    for strip_bytes in (NEVER, ALWAYS):
        monkeypatch.setattr(windows, "_STRIP_BYTES", strip_bytes)
        target = tmp_path / str(strip_bytes)
        report = checkpoint.convert(
            ZERO3, target, to="hf", rewrite=None if rewrite is None else sw.Rewrite(rewrite), certify=True
        )
        made[strip_bytes] = written(target)
        if rewrite is None and strip_bytes == ALWAYS:
            assert report.read_bytes == report.num_bytes
    assert made[NEVER] == made[ALWAYS]
    assert made[ALWAYS][1]


def test_a_file_is_opened_once_where_its_pieces_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def spy(store: LocalStore, name: str) -> Reader:
        opened.append(name)
        return open_data(store, name)

    monkeypatch.setattr(reading, "open_data", spy)
    monkeypatch.setattr(reading, "_MAX_OPEN_FILES", 2)
    for name in "abcd":
        (tmp_path / name).write_bytes(b"0")
    files = reading.OpenFiles(LocalStore(tmp_path))
    for name in "aaabbbcccddd":
        assert files[name].size == 1
        files.trim()
    files.close()
    assert opened == [*"abcd"]


def test_long_ranges_are_read_straight_and_columns_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of fused tensors are stretches of their sources; columns are strips, and go by way of a batch."""
    tensors = {name: torch.randn(256, 128) for name in ("a", "b", "c", "d")}
    save_file(tensors, tmp_path / "model.safetensors")
    straight: list[str] = []
    fill = windows.fill_exactly

    def spy(store: object, stored: object, targets: list[windows.ReadTarget], digests: object = None) -> int:
        straight.extend(target.source.name for target in targets)
        return fill(store, stored, targets, digests)  # type: ignore[arg-type]

    monkeypatch.setattr(windows, "fill_exactly", spy)
    rewrite = sw.Rewrite("a, b -> rows, axis=0; c, d -> columns, axis=1")
    report = checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "hf", to="hf", rewrite=rewrite)
    assert sorted(straight) == ["a", "b"]
    assert report.read_bytes == report.num_bytes
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["rows"], torch.cat([tensors["a"], tensors["b"]]))
    assert torch.equal(found["columns"], torch.cat([tensors["c"], tensors["d"]], dim=1))


def test_a_file_that_ends_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(256, 128)}, path)
    fill = windows.fill_exactly

    def cut(*arguments: object) -> int:
        path.write_bytes(path.read_bytes()[:-1])
        return fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(windows, "fill_exactly", cut)
    with pytest.raises(sw.errors.CheckpointError, match=r"model\.safetensors cannot be read: .*ends"):
        checkpoint.convert(path, tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("way", ["load", "catalogue"])
def test_columns_of_many_rows_are_read_in_few_calls(
    tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(4000, 16)
    path = tmp_path / {"safetensors": "a.safetensors", "torch": "a.pt", "dcp": "a"}[kind]
    if kind == "safetensors":
        save_file({"w": weight}, path)
    elif kind == "torch":
        torch.save({"w": weight}, path)
    else:
        save_dcp(path, {"w": weight})
    calls: list[int] = []
    real = LocalReader.read_into

    def counted(self: LocalReader, buffer: memoryview, start: int) -> None:
        calls.append(len(buffer))
        real(self, buffer, start)

    monkeypatch.setattr(LocalReader, "read_into", counted)
    piece = Piece(name="w", dtype="float32", global_shape=(4000, 16), offset=(0, 4), shape=(4000, 4))
    found = torch.zeros(4000, 4)
    calls.clear()
    if way == "load":
        sw.load(path, {piece: found})
    else:
        found = checkpoint.open(path).read("w", (slice(None), slice(4, 8)))
    assert torch.equal(found, weight[:, 4:8])
    assert len(calls) < 100
    # Few rows, and rows that are long, are read alone: nothing between them.
    calls.clear()
    checkpoint.open(path).read("w", (slice(0, 100), slice(4, 8)))
    assert sum(each for each in calls if each == 16) == 100 * 16
