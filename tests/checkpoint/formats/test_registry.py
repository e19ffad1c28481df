"""Formats of other packages are found by their entry points, read, written, and left out where they are broken."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.formats import registry
from shardwise.cli import main
from shardwise.errors import CheckpointError
from shardwise.testing.formats import Claim, Format, Whole, claims_of

PACKAGE = """
import json

from shardwise.checkpoint import Contents, StoredPiece, StoredTensor
from shardwise.checkpoint.formats.format import FolderPlan, Format
from shardwise.checkpoint.stores import OpenFile, read_json
from shardwise.errors import CheckpointError
from shardwise.space import Piece


def read(store):
    tensors = {}
    for name, shape in read_json(store, "shapes.json").items():
        piece = Piece(name=name, dtype="float32", global_shape=tuple(shape))
        stored = StoredPiece(piece=piece, file=f"{name}.raw", start=0, checksums=None)
        with OpenFile(store, f"{name}.raw") as opened:
            if opened.size != stored.num_bytes:
                raise CheckpointError(f"{opened.place} has {opened.size} bytes, and not {stored.num_bytes}")
        tensors[name] = StoredTensor(name=name, dtype="float32", shape=tuple(shape), pieces=(stored,))
    sizes = {f"{name}.raw": each.num_bytes for name, each in tensors.items()}
    return Contents(format="raw", location=store.location, tensors=tensors, file_sizes=sizes)


class File:
    def __init__(self, piece):
        self.pieces, self.num_bytes = [piece], 4 * piece.num_elements


class Filling:
    def __init__(self, file, writer):
        self.write = writer.write

    def flush(self):
        pass


def plan(outputs, request):
    files = {f"{name}.raw": File(each.whole) for name, each in outputs.tensors.items()}
    shapes = json.dumps({name: each.shape for name, each in outputs.tensors.items()})
    return FolderPlan(files=files, filling=Filling, last={"shapes.json": shapes.encode()})


FORMAT = Format(name="raw", recognises=lambda names: "shapes.json" in names, read=read, targets={"raw-files": plan})
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder where packages are installed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    registry.formats.cache_clear()
    yield folder
    registry.formats.cache_clear()


def install(folder: Path, name: str, code: str) -> None:
    (folder / f"{name}.py").write_text(code)
    sys.modules.pop(name, None)
    (folder / f"{name}-1.dist-info").mkdir()
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {name}:FORMAT\n")


def raw(folder: Path) -> tuple[Path, Whole]:
    """As the package's own program writes it."""
    state = {"w": torch.randn(30, 40), "b": torch.randn(40)}
    for name, each in state.items():
        each.numpy().tofile(folder / f"{name}.raw")
    (folder / "shapes.json").write_text(json.dumps({name: list(each.shape) for name, each in state.items()}))
    return folder, state


def read_raw(folder: Path) -> Whole:
    shapes = json.loads((folder / "shapes.json").read_text())
    arrays = {name: np.fromfile(folder / f"{name}.raw", np.float32) for name in shapes}
    return {name: torch.from_numpy(each).view(shapes[name]) for name, each in arrays.items()}


@pytest.mark.parametrize(
    ("form", "claim"), claims_of([Format(name="raw", kind="raw", made=raw, to="raw-files", read=read_raw)], sw)
)
def test_it_fulfils_the_contract_with_what_it_says_alone(
    packages: Path, tmp_path: Path, form: Format, claim: Claim
) -> None:
    install(packages, "raw_files_of_tests", PACKAGE)
    (tmp_path / "of claim").mkdir()
    claim(form, tmp_path / "of claim")


def test_a_format_of_another_package_is_read_and_written(packages: Path, tmp_path: Path) -> None:
    install(packages, "raw_files_of_tests", PACKAGE)
    state = {"w": torch.randn(3, 4), "b": torch.randn(4)}
    checkpoint.save(tmp_path / "ours", state)
    to: checkpoint.conversion.ConvertTarget = "raw-files"  # type: ignore[assignment]  # of no use to a type checker
    report = checkpoint.convert(tmp_path / "ours", tmp_path / "raw", to=to, certify=True)
    assert report.certificate is not None
    assert report.certificate.lossy == ()
    assert checkpoint.open(tmp_path / "raw").contents.format == "raw"
    target = {name: torch.zeros_like(each) for name, each in state.items()}
    checkpoint.load(tmp_path / "raw", target)
    assert all(torch.equal(target[name], each) for name, each in state.items())
    command = ["ckpt", "convert", str(tmp_path / "ours"), str(tmp_path / "again"), "--to", "raw-files"]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert "'raw-files'" in CliRunner().invoke(main, [*command[:-1], "raw"]).output
    assert checkpoint.diff(tmp_path / "raw", tmp_path / "again").equal
    with pytest.raises(CheckpointError, match=r"goes to pieces, whole, hf, dcp, .*, raw-files"):
        checkpoint.convert(tmp_path / "ours", tmp_path / "x", to="raw")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nothing_that_is_there", "No module named"),
        ("FORMAT = 1", "it is no Format"),
        (PACKAGE.replace('name="raw"', 'name="dcp"'), "or has the name of another one"),
        (PACKAGE.replace('"raw-files"', '"whole"'), "a target is called whole"),
        (PACKAGE.replace('"raw-files"', '"hf"'), "a target is called hf"),
    ],
)
def test_a_broken_package_is_named_and_others_are_read(packages: Path, tmp_path: Path, code: str, why: str) -> None:
    install(packages, "broken_format_of_tests", code)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match=f"the format broken_format_of_tests of .* is left out: .*{why}"):
        assert list(checkpoint.open(tmp_path / "model.pt").tensors) == ["w"]
