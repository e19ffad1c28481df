"""The suite that a format must pass: claims that hold for every format that is read, or written, or both.

def written(folder: Path) -> tuple[Path, Whole]:
    state = {"w": torch.randn(3)}
    torch.save(state, folder / "model.pt")      # by the format's own program
    return folder / "model.pt", state           # what is to be opened, and the tensors that it has

CASES = formats.claims_of([formats.Format(name="mine", kind="torch", made=written)], shardwise)

@pytest.mark.parametrize(("form", "claim"), CASES)
def test_my_format(form: formats.Format, claim: formats.Claim, tmp_path: Path) -> None:
    claim(form, tmp_path)
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

Library: TypeAlias = Any
"""The package `shardwise`, by which formats are read and written. It is given: the suite imports nothing of it."""

Whole = Mapping[str, torch.Tensor]
Made = Callable[[Path], tuple[Path, Whole]]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format, by what its own program writes and reads."""

    name: str
    kind: str
    """What `Contents.format` calls it."""
    made: Made
    """Writes a checkpoint into an empty folder; returns what is to be opened, and the tensors that it has."""
    has_more: bool = False
    """It has tensors that `made` does not tell, such as copies in another dtype."""
    has_checksums: bool = False
    """Verification finds every changed byte of a tensor."""
    knows_every_byte: bool = False
    """A changed bit of any file is found, not of tensors alone."""
    needs_all_files: bool = True
    """That one of several files is missing is known from the others."""
    notes: tuple[str, ...] = ()
    """Patterns of all notes, of what is left out or not sure."""
    step: int | None = None
    to: Any = ""
    """What `convert` calls it; empty: it is not written."""
    read: Callable[[Path], Whole] | None = None
    """What its own program reads of a folder that `convert` made."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Claim:
    """One claim about formats."""

    body: Callable[[Library, Format, Path], None]
    holds_for: Callable[[Format], bool]
    library: Library = None

    def __str__(self) -> str:
        return self.body.__name__

    def __call__(self, form: Format, folder: Path) -> None:
        """folder: an empty one."""
        self.body(self.library, form, folder)


CLAIMS: list[Claim] = []


def claim(
    holds_for: Callable[[Format], bool] = lambda form: True,
) -> Callable[[Callable[[Library, Format, Path], None]], None]:
    """Add a claim to `CLAIMS`, on the formats for which it holds."""
    return lambda body: CLAIMS.append(Claim(body, holds_for))


def claims_of(forms: Sequence[Format], library: Library) -> list[Any]:
    """Every claim that is made about each format, for `parametrize`. library: `shardwise`."""
    given = [Claim(each.body, each.holds_for, library) for each in CLAIMS]
    return [pytest.param(form, each, id=f"{form}-{each}") for form in forms for each in given if each.holds_for(form)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit."""
    plain = [each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for each in (one, other)]
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(*(each.view(torch.uint8) for each in plain))


def made(form: Format, folder: Path) -> tuple[Path, Whole]:
    (folder / "given").mkdir()
    return form.made(folder / "given")


def check_tensors(sw: Library, path: Path, state: Whole, *, has_more: bool = False) -> None:
    found = sw.checkpoint.open(path)
    names = {*found.tensors, *found.contents.aliases}
    assert names >= state.keys() if has_more else names == state.keys()
    assert [name for name, tensor in state.items() if not same(found.read(name), tensor)] == []


def files_of(sw: Library, form: Format, path: Path) -> list[Path]:
    """All whose every byte is known; else a few that have tensors. Values computed at the opening are in none."""
    if form.knows_every_byte:
        return [each for each in path.rglob("*") if each.is_file()]
    base = path if path.is_dir() else path.parent
    files = [base / name for name in sw.checkpoint.open(path).contents.file_sizes if (base / name).exists()]
    return files[:: max(1, len(files) // 2)]


@contextmanager
def changed(file: Path, data: bytes | None) -> Iterator[None]:
    """The file with other bytes, or without it; afterwards it is as it was."""
    good = file.read_bytes()
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    yield
    file.write_bytes(good)


def ways_of(sw: Library, path: Path, state: Whole, into: Path) -> list[Callable[[], object]]:
    """All that reads a checkpoint; a load and the verification come last."""
    return [
        lambda: [sw.checkpoint.open(path).read(name) for name in state],
        lambda: sw.checkpoint.convert(path, into),
        lambda: sw.load(path, {name: torch.zeros_like(each) for name, each in state.items()}, strict=False),
        lambda: bad_findings(sw, path),
    ]


def bad_findings(sw: Library, path: Path) -> None:
    """Verification, whose findings are raised."""
    report = sw.checkpoint.verify(path)
    if not report.good:
        raise sw.errors.CheckpointError(*report.findings)


@claim()
def it_is_recognised_and_read_to_the_bit_with_notes_of_what_is_left_out(
    sw: Library, form: Format, folder: Path
) -> None:
    path, state = made(form, folder)
    contents = sw.checkpoint.open(path).contents
    assert (contents.format, contents.step) == (form.kind, form.step)
    assert len(contents.notes) == len(form.notes), contents.notes
    for pattern in form.notes:
        assert any(re.search(pattern, note) for note in contents.notes), (pattern, contents.notes)
    check_tensors(sw, path, state, has_more=form.has_more)
    for stored in contents.tensors.values():
        assert sw.space.check_cover(each.piece for each in stored.pieces) == []
        assert all(each.file in contents.file_sizes for each in stored.pieces)
    base = path if path.is_dir() else path.parent
    assert all(
        (base / name).stat().st_size == size for name, size in contents.file_sizes.items() if (base / name).exists()
    )


@claim()
def ranks_read_any_parts_of_it(sw: Library, form: Format, folder: Path) -> None:
    path, state = made(form, folder)
    owned = {name: each for name, each in state.items() if name in sw.checkpoint.open(path).tensors}

    def run(channel: Any) -> list[str]:
        wanted, target = {}, {}
        for name, tensor in owned.items():
            piece = sw.Piece(
                name=name, dtype=str(tensor.dtype).removeprefix("torch."), global_shape=tuple(tensor.shape)
            )
            whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
            if tensor.numel() > 1:
                first, stop = (tensor.numel() * at // channel.size for at in (channel.rank, channel.rank + 1))
                piece = sw.Piece(name=name, dtype=piece.dtype, global_shape=tuple(tensor.shape), run=(first, stop))
                whole = whole.reshape(-1)[first:stop]
            wanted[piece], target[piece] = whole, torch.zeros_like(whole)
        sw.load(path, target, strict=False, channel=channel)
        return [piece.name for piece, tensor in wanted.items() if not same(target[piece], tensor)]

    assert sw.simulate(2, run) == [[], []]


@claim()
def it_becomes_a_save_with_all_that_it_has(sw: Library, form: Format, folder: Path) -> None:
    path, state = made(form, folder)
    source = sw.checkpoint.open(path)
    report = sw.checkpoint.convert(path, folder / "save")
    assert sw.checkpoint.diff(path, folder / "save").equal
    assert sw.checkpoint.verify(folder / "save").good
    check_tensors(sw, folder / "save", state, has_more=form.has_more)
    save = sw.checkpoint.open(folder / "save")
    assert save.tensors.keys() == source.tensors.keys()
    assert (save.step, save.contents.aliases) == (source.step, source.contents.aliases)
    assert (save.contents.settings, save.extra) == (source.contents.settings, source.extra)
    assert (report.num_tensors, report.num_bytes) == (len(source.tensors), source.contents.num_bytes)
    assert report.destination == save.location


@claim(lambda form: bool(form.to))
def what_is_converted_to_it_is_read_by_its_own_program_and_comes_back(sw: Library, form: Format, folder: Path) -> None:
    _, state = made(form, folder)
    sw.checkpoint.save(folder / "ours", {name: each.detach() for name, each in state.items()})
    report = sw.checkpoint.convert(folder / "ours", folder / "out", to=form.to, certify=True)
    assert report.certificate is not None
    assert report.certificate.lossy == ()
    assert sw.checkpoint.open(folder / "out").contents.format == form.kind
    assert form.read is not None
    read = form.read(folder / "out")
    assert read.keys() == state.keys()
    assert [name for name, tensor in state.items() if not same(read[name], tensor)] == []
    assert sw.checkpoint.diff(folder / "ours", folder / "out", model_only=True).equal
    sw.checkpoint.convert(folder / "out", folder / "back")
    check_tensors(sw, folder / "back", state)


@claim()
def files_that_are_missing_or_were_cut_are_told_by_every_way(sw: Library, form: Format, folder: Path) -> None:
    path, state = made(form, folder)
    turn = 0
    for file in files_of(sw, form, path):
        data = file.read_bytes()
        longer = [data[:-1], data + b"\n"] if form.knows_every_byte else []
        for left in (None, data[: len(data) // 2], b"", *longer):
            if left is None and not form.needs_all_files:
                continue
            said = (file.name, file.parent.name, "missing", "no checkpoint") if left is None else (file.name,)
            with changed(file, left):
                ways = ways_of(sw, path, state, folder / "made")
                for way in ways[2:] if left in longer else ways[turn % 2 :: 2]:  # a read needs no byte behind the last
                    with pytest.raises(sw.errors.CheckpointError) as caught:
                        way()
                    assert any(each in str(caught.value) for each in said), str(caught.value)
            assert not (folder / "made").exists()
            turn += 1
        with changed(file, data[:-1]), suppress(sw.errors.CheckpointError):
            check_tensors(sw, path, state, has_more=form.has_more)  # some formats are padded at their end


@claim()
def flipped_bits_are_refused_or_change_values_alone(sw: Library, form: Format, folder: Path) -> None:
    path, state = made(form, folder)
    numbers = random.Random(form.name)
    files = sorted(each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file())
    most = sum(each.stat().st_size for each in files)
    for _ in range(40):
        file = numbers.choice(files)
        data = bytearray(file.read_bytes())
        if not data:
            continue
        data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        if form.knows_every_byte:
            with changed(file, bytes(data)):
                for way in ways_of(sw, path, state, folder / "made")[2:]:
                    with pytest.raises(sw.errors.CheckpointError, match=re.escape(file.name)):
                        way()
            continue
        with changed(file, bytes(data)), suppress(sw.errors.CheckpointError):
            found = sw.checkpoint.open(path)
            assert found.contents.num_bytes <= 2 * most  # tensors may share their bytes
            for name in list(found.tensors)[:3]:
                with suppress(sw.errors.CheckpointError):
                    assert found.read(name).shape == found.tensors[name].shape


@claim()
def verification_tells_what_has_checksums(sw: Library, form: Format, folder: Path) -> None:
    path, _ = made(form, folder)
    report = sw.checkpoint.verify(path)
    assert report.good
    assert sw.checkpoint.verify_all(path) == [report]
    num_bytes = sw.checkpoint.open(path).contents.num_bytes
    if form.has_checksums:
        assert (report.unverified_bytes, report.unverified_files) == (0, ())
        assert report.verified_bytes >= num_bytes
    else:
        assert report.verified_bytes == 0 < report.unverified_bytes <= num_bytes
        assert report.unverified_files


@claim(lambda form: form.has_checksums)
def a_changed_byte_of_any_tensor_is_found_with_its_name(sw: Library, form: Format, folder: Path) -> None:
    path, _ = made(form, folder)
    base = path if path.is_dir() else path.parent
    stored_at = [
        (name, each) for name, stored in sw.checkpoint.open(path).tensors.items() for each in stored.pieces[:2]
    ]
    in_files = [(name, piece, base / piece.file) for name, piece in stored_at if (base / piece.file).exists()]
    for name, piece, file in in_files[:: max(1, len(in_files) // 4)]:
        for at in {piece.start, piece.start + piece.num_bytes - 1}:
            data = bytearray(file.read_bytes())
            data[at] ^= 16
            with changed(file, bytes(data)):
                findings = sw.checkpoint.verify(path).findings
            assert any(file.name in each and (name in each or " more" in each) for each in findings), (name, findings)
