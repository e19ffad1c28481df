"""Verification of other formats: CRC-32 in archives of torch.save, and honest words where there are no checksums."""

import io
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardwise import checkpoint
from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.foreign.archive_sums import check_archives
from shardwise.cli import main
from shardwise.errors import CheckpointError

FILES = Path(__file__).parent / "foreign_files"
ZERO3 = Path(__file__).parent / "deepspeed" / "folders" / "z3-bf16-3"


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


def holders_of(contents: Contents, file: str, at: int) -> set[str]:
    return {
        piece.piece.name
        for tensor in contents.tensors.values()
        for piece in tensor.pieces
        if piece.file == file and piece.start <= at < piece.start + piece.num_bytes
    }


def verify(path: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["ckpt", "verify", str(path)])
    return result.exit_code, result.output


def test_every_changed_byte_of_a_storage_is_found_in_its_part_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(state(), path)
    good = path.read_bytes()
    contents = checkpoint.open(path).contents
    report = checkpoint.verify(path)
    assert (report.good, report.unverified_bytes, report.unverified_files) == (True, 0, ())
    assert report.verified_bytes == sum(info.file_size for info in zipfile.ZipFile(path).infolist())
    storages = {name: each for name, each in places_of_parts(path).items() if "/data/" in name}
    assert len(storages) == 3
    for name, place in storages.items():
        for at in place:
            flip(path, at)
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() == name
            (finding,) = checkpoint.verify(path).findings
            (tensor,) = holders_of(contents, "x.pt", at)
            assert f"x.pt is damaged: its part {name.partition('/')[2]}, bytes {place.start} to {place.stop}" in finding
            assert finding.endswith(f"it holds pieces of {tensor}")
            path.write_bytes(good)


def test_a_changed_byte_anywhere_is_never_called_as_written(tmp_path: Path) -> None:
    """Parts, among them the pickle: what Python's reader calls damaged gives exit code 1."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(3.0)}, path)
    good = path.read_bytes()
    for place in places_of_parts(path).values():
        for at in {place.start, place.stop - 1}:
            if at in place:
                flip(path, at)
                assert verify(path)[0] == 1
                path.write_bytes(good)


def test_archives_of_one_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="in a single process"):
        save_dcp(state(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    (path,) = (tmp_path / "dcp").glob("*.distcp")
    contents = checkpoint.open(tmp_path / "dcp").contents
    assert verify(tmp_path / "dcp")[0] == 0
    for tensor in contents.tensors.values():
        at = tensor.pieces[0].start
        flip(path, at)
        (finding,) = checkpoint.verify(tmp_path / "dcp").findings
        assert f"{path.name} is damaged: its part data/0, bytes {at} to" in finding
        assert finding.endswith(f"it holds pieces of {tensor.name}")
        flip(path, at)


@pytest.mark.parametrize("source", [ZERO3, FILES / "accelerate_bin", FILES / "lightning.ckpt"], ids=lambda p: p.name)
def test_damage_in_files_of_other_programs_is_named(tmp_path: Path, source: Path) -> None:
    copy = tmp_path / source.name
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copy)
    assert "is as it was written" in verify(copy)[1]
    path = next(copy.rglob("*rank_1_*optim_states.pt"), copy / "optimizer.bin") if copy.is_dir() else copy
    name, place = max(
        ((name, each) for name, each in places_of_parts(path).items() if "/data/" in name),
        key=lambda each: len(each[1]),
    )
    flip(path, place[len(place) // 2])
    code, shown = verify(copy)
    assert code == 1
    assert f"{path.name} is damaged: its part {name.partition('/')[2]}" in shown


def test_archives_without_checksums_are_read_and_said_to_have_none(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    report = checkpoint.verify(path)
    assert (report.good, report.unverified_files) == (True, ("x.pt",))
    assert report.unverified_bytes >= sum(each.numel() * each.element_size() for each in state().values())
    code, shown = verify(path)
    assert (code, "no one can tell" in shown) == (0, True)


def test_formats_without_checksums_are_complete_or_not(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "x.safetensors")
    num_bytes = sum(each.numel() * each.element_size() for each in state().values())
    report = checkpoint.verify(tmp_path / "x.safetensors")
    assert (report.good, report.verified_bytes, report.unverified_bytes) == (True, 0, num_bytes)
    code, shown = verify(tmp_path / "x.safetensors")
    assert code == 0
    assert f"is complete: 3 tensors, {num_bytes} B in 1 file. {num_bytes} B have no checksums (x.safetensors)" in shown
    assert checkpoint.verify_all(tmp_path / "x.safetensors") == [report]
    for name in ("single/legacy.pth", "small.gguf"):
        code, shown = verify(FILES / name)
        assert (code, "no one can tell" in shown) == (0, True)
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:-1])
    assert verify(tmp_path / "x.safetensors")[0] == 1


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
