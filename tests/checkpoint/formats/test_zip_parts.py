"""Files that torch.save never wrote: each is refused in plain words, in bounded memory, and nothing of it is run."""

import io
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint.formats.torch_files.zip_parts import check_archives
from shardwise.errors import CheckpointError
from tests.contracts.format_cases import bad_findings

MAX_BYTES = 64 << 20


PROTO, STOP, MARK = b"\x80\x02", b".", b"("


ELEMENTS = bytes(range(48))


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def whole(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    code = b"\x8a" + bytes([size]) if size < 256 else b"\x8b" + struct.pack("<I", size)
    return code + value.to_bytes(size, "little", signed=True)


def ints(*values: int) -> bytes:
    return MARK + b"".join(map(whole, values)) + b"t"


def storage(key: str = "0", count: int = 12, kind: str = "FloatStorage") -> bytes:
    return MARK + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + whole(count) + b"tQ"


def tensor(
    shape: bytes = ints(3, 4), strides: bytes = ints(4, 1), offset: bytes = whole(0), held: bytes = storage()
) -> bytes:
    call = b"ctorch._utils\n_rebuild_tensor_v2\n" + MARK
    return call + held + offset + shape + strides + b"\x89" + b"ccollections\nOrderedDict\n)R" + b"tR"


def state_dict(value: bytes) -> bytes:
    return PROTO + b"}" + text("w") + value + b"s" + STOP


def archive(parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, data in parts.items():
            made.writestr(name, data)
    return file.getvalue()


def saved(program: bytes, **more: bytes) -> bytes:
    """An archive as torch.save writes it, with a pickle and a storage of 48 bytes."""
    parts = {"data.pkl": program, "byteorder": b"little", "version": b"3", "data/0": ELEMENTS, **more}
    return archive({f"x/{name}": data for name, data in parts.items()})


def with_info(change: Callable[[zipfile.ZipInfo], object], name: str = "x/data/1") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for each, data in {"x/data.pkl": state_dict(tensor()), "x/data/0": ELEMENTS}.items():
            made.writestr(each, data)
        info = zipfile.ZipInfo(name)
        change(info)
        made.writestr(info, b"x")
    return file.getvalue()


def changed(at_end_record: int, form: str, value: int) -> bytes:
    """A good file whose end record says something else."""
    data = bytearray(saved(state_dict(tensor())))
    struct.pack_into(form, data, data.rindex(b"PK\5\6") + at_end_record, value)
    return bytes(data)


def entry_changed(at: int, form: str, value: int, part: bytes = b"x/data/0") -> bytes:
    """A good file whose directory says something else of a part."""
    data = bytearray(saved(state_dict(tensor())))
    struct.pack_into(form, data, data.rindex(part) - 46 + at, value)
    return bytes(data)


def header_changed(at: int, form: str, value: int) -> bytes:
    data = bytearray(saved(state_dict(tensor())))
    struct.pack_into(form, data, data.index(b"x/data/0") - 30 + at, value)
    return bytes(data)


def overlapping() -> bytes:
    """Two storages that the directory puts into the same bytes."""
    data = bytearray(saved(state_dict(tensor()), **{"data/1": ELEMENTS}))
    first = data.index(b"x/data/0") - 30
    struct.pack_into("<I", data, data.rindex(b"x/data/1") - 46 + 42, first)
    return bytes(data)


def twice() -> bytes:
    data = saved(state_dict(tensor()), **{"data/1": ELEMENTS})
    return data.replace(b"x/data/1", b"x/data/0")


def bomb(depth: int, key: str = "w") -> bytes:
    """Lists of ten times the list before: 10 ** depth values in a few hundred bytes."""
    program = b"]"
    for at in range(depth):
        program += b"r" + struct.pack("<I", at) + b"0" + b"](" + (b"j" + struct.pack("<I", at)) * 10 + b"e"
    return PROTO + b"}" + text(key) + program + b"s" + STOP


def itself() -> bytes:
    return state_dict(b"]r\0\0\0\0j\0\0\0\0a")


def old(value: bytes, count: int = 12, keys: list[str] | None = None, magic: int | None = None) -> bytes:
    """A file as torch wrote it before version 1.6."""
    magic = 0x1950A86A20F9469CFC6C if magic is None else magic
    parts = [magic, 1001, {"little_endian": True, "protocol_version": 1001, "type_sizes": {}}]
    head = b"".join(pickle.dumps(each, 2) for each in parts)
    return head + value + pickle.dumps(["0"] if keys is None else keys, 2) + struct.pack("<q", count) + ELEMENTS


OLD_TENSOR = state_dict(tensor(held=storage()[:-2] + b"NtQ"))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "no file of torch": lambda: b"hello, world" * 100,
    "a pointer of git LFS": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "an archive of something else": lambda: archive({"x/a.npy": b"1"}),
    "a pickle of something else": lambda: pickle.dumps([1, 2], 2),
    "no end": lambda: saved(PROTO + b"]" * 100),
    "old storages that no tensor has": lambda: old(OLD_TENSOR, keys=["0", "1"]),
    "a program of TorchScript": lambda: archive({"x/data.pkl": b"", "x/constants.pkl": b""}),
    "a call by an unknown instruction": lambda: saved(PROTO + b"(cos\nsystem\nX\x04\0\0\0trueo."),
    "an instruction that is none": lambda: saved(PROTO + b"\xff."),
    "a stack that is empty": lambda: saved(PROTO + b"00."),
    "a memo by number and in turn": lambda: saved(PROTO + b"Nr\xff\xff\xff\xff\x94."),
    "a bomb of lists": lambda: saved(state_dict(b"]" * (1 << 19))),
    "a bomb of memos": lambda: saved(state_dict(b"".join(b"Nr" + struct.pack("<I", 7 * at) for at in range(1 << 16)))),
    "a bomb of lists in lists": lambda: saved(bomb(12)),
    "a bomb of settings of an optimizer": lambda: saved(bomb(12, "param_groups")),
    "a list in itself": lambda: saved(itself()),
    "a tuple of tuples as a key": lambda: saved(PROTO + b"}" + b"N" + b"\x85" * 100_000 + b"Ns."),
    "numbers as keys that share a slot": lambda: saved(
        PROTO + b"}(" + b"".join(whole(at * (2**61 - 1)) + b"N" for at in range(1, 1 << 14)) + b"u."
    ),
    "a text beyond the end": lambda: saved(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x."),
    "a name without an end": lambda: saved(PROTO + b"c" + b"x" * (1 << 20)),
    "sizes that overflow": lambda: saved(state_dict(tensor(shape=ints(1 << 40, 1 << 40), strides=ints(0, 0)))),
    "a negative size": lambda: saved(state_dict(tensor(shape=ints(-3, 4)))),
    "very many dims": lambda: saved(state_dict(tensor(shape=ints(*[1] * 5000), strides=ints(*[1] * 5000)))),
    "strides for other dims": lambda: saved(state_dict(tensor(strides=ints(4)))),
    "strides beyond the storage": lambda: saved(state_dict(tensor(strides=ints(4, 2)))),
    "a negative stride": lambda: saved(state_dict(tensor(strides=ints(-4, 1)))),
    "an offset beyond the storage": lambda: saved(state_dict(tensor(offset=whole(1)))),
    "one element as very many": lambda: saved(state_dict(tensor(shape=ints(1 << 16), strides=ints(0)))),
    "elements in very many places": lambda: saved(
        state_dict(tensor(ints(1 << 17), ints(2), held=storage("1", 1 << 18))), **{"data/1": bytes(1 << 20)}
    ),
    "a storage that is not there": lambda: saved(state_dict(tensor(held=storage("7")))),
    "a storage outside of the file": lambda: saved(state_dict(tensor(held=storage("../../etc/passwd")))),
    "a storage of another length": lambda: saved(state_dict(tensor(held=storage(count=13)))),
    "a storage of a length that no text holds": lambda: saved(state_dict(tensor(held=storage(count=1 << 20_000)))),
    "a storage of an unknown kind": lambda: saved(state_dict(tensor(held=storage(kind="PickleStorage")))),
    "a storage that is no storage": lambda: saved(state_dict(tensor(held=text("module") + b"Q"))),
    "elements of another order": lambda: saved(state_dict(tensor()), byteorder=b"big"),
    "a zip bomb": lambda: archive({"x/data.pkl": bytes(64 << 20)}, zipfile.ZIP_DEFLATED),
    "a path to the root": lambda: with_info(lambda info: None, "/etc/passwd"),
    "a path to the parent": lambda: with_info(lambda info: None, "x/../../etc/passwd"),
    "a link": lambda: with_info(lambda info: setattr(info, "external_attr", 0o120777 << 16)),
    "parts in two folders": lambda: with_info(lambda info: None, "y/data/1"),
    "a very long name": lambda: with_info(lambda info: None, "x/" + "y" * 5000),
    "a part twice": twice,
    "two parts in the same bytes": overlapping,
    "an encrypted part": lambda: entry_changed(8, "<H", 1),
    "a part that is compressed by its header alone": lambda: header_changed(8, "<H", 8),
    "a part that is longer by its header": lambda: header_changed(22, "<I", 49),
    "a part longer than the file": lambda: entry_changed(20, "<Q", (1 << 30) << 32 | 1 << 30),
    "a part that begins elsewhere": lambda: entry_changed(42, "<I", 7),
    "a header with a long field": lambda: header_changed(28, "<H", 60_000),
    "a pickle without its checksum": lambda: entry_changed(16, "<I", 1, b"x/data.pkl"),
    "very many parts": lambda: changed(10, "<H", 60_000),
    "a directory longer than the file": lambda: changed(12, "<I", 0xFFFFFFFE),
    "an archive on several disks": lambda: changed(4, "<H", 1),
    "no end of the archive": lambda: saved(state_dict(tensor()))[:-22],
    "half of a file": lambda: saved(state_dict(tensor()))[:200],
    "an old file of another magic": lambda: old(OLD_TENSOR, magic=1),
    "an old storage of another length": lambda: old(OLD_TENSOR, count=11),
    "an old storage of a huge length": lambda: old(
        state_dict(tensor(held=storage(count=1 << 60)[:-2] + b"NtQ")), count=1 << 60
    ),
    "an old storage of a length that no text holds": lambda: old(
        state_dict(tensor(held=storage(count=1 << 20_000)[:-2] + b"NtQ")), count=12
    ),
    "an old view beyond its storage": lambda: old(
        state_dict(tensor(held=storage()[:-2] + ints(0, 6, 12).replace(whole(0), text("v"), 1) + b"tQ"))
    ),
    "an old pickle without end": lambda: old(PROTO + text("x" * (3 << 20))),
}  # fmt: skip


def test_the_frame_of_these_files_is_good(tmp_path: Path) -> None:
    """What is hostile in each is all that is wrong with it."""
    for name, data in {"new": saved(state_dict(tensor())), "old": old(OLD_TENSOR)}.items():
        (tmp_path / f"{name}.pt").write_bytes(data)
        read = checkpoint.open(tmp_path / f"{name}.pt").read("w")
        assert torch.equal(read, torch.frombuffer(bytearray(ELEMENTS), dtype=torch.float32).view(3, 4))
        assert torch.equal(read, torch.load(tmp_path / f"{name}.pt", weights_only=False)["w"])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(HOSTILE[name]())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.open(file)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(file) in message
    assert len(message) < 1000
    assert message.isprintable()


def test_nothing_that_a_file_names_is_made_or_imported(tmp_path: Path) -> None:
    """A class that would write a file is a record with its name and arguments."""
    program = b"cos\nsystem\n" + text(f"touch {tmp_path}/trap") + b"\x85R"
    (tmp_path / "model.pt").write_bytes(saved(PROTO + b"}(" + text("w") + tensor() + text("trap") + program + b"u."))
    catalogue = checkpoint.open(tmp_path / "model.pt")
    assert catalogue.extra["objects"] == {"trap": {"class": "os.system", "args": [f"touch {tmp_path}/trap"]}}
    assert list(catalogue.tensors) == ["w"]
    assert not (tmp_path / "trap").exists()


def test_a_checksum_of_zero_is_none(tmp_path: Path) -> None:
    """`torch.serialization.set_crc32_options(False)` leaves checksums out."""
    (tmp_path / "x.pt").write_bytes(entry_changed(16, "<I", 0, b"x/data.pkl"))
    report = checkpoint.verify(tmp_path / "x.pt")
    assert (report.good, report.unverified_files) == (True, ("x.pt",))


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
            bad_findings(path)
