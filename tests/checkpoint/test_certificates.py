"""Certificates: every tensor with its digest on both sides, what was lost and why, and payloads of NaNs."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint import (
    Contents,
    LocalStore,
    conversion,
    convert,
    export_hf,
    import_hf,
)
from shardwise.checkpoint.formats.registry import read_foreign
from shardwise.checkpoint.saves import read_save
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite import Rewrite
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.faulty import Counting, FailingAt
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import bits


def digests(state: Any) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest())
        for name, tensor in state.items()
    }


def test_the_certificate_says_what_it_proves_and_compares_with_an_original(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 2), "b": torch.randn(4, 2), "c": torch.ones(3), "d": torch.ones(2).bfloat16()}
    checkpoint.save(tmp_path / "hub", tensors)
    checkpoint.save(tmp_path / "trained", {**tensors, "b": tensors["b"] + 1, "d": torch.ones(2), "e": torch.ones(1)})
    alone = export_hf(tmp_path / "trained", tmp_path / "alone", Rewrite("c -> C")).certificate
    both = export_hf(tmp_path / "trained", tmp_path / "out", Rewrite("c -> C"), original=tmp_path / "hub").certificate
    assert alone is not None
    assert both is not None
    assert str(alone) == "round trip: all 5 tensors come back to the bit; compared with no original"
    assert {each.name: each.verdict for each in both.differing} == {
        "b": "differs",
        "c": "not written",
        "d": "differs",  # in dtype
        "C": "not in the original",
        "e": "not in the original",
    }
    assert str(both).startswith("round trip: all 5 tensors come back to the bit; 1 of 6 are as in ")
    assert str(both).endswith(
        "hub/save-00000001; not: b (differs); c (not written); d (differs); e (not in the original); "
        "C (not in the original)"
    )
    written = json.loads((tmp_path / "out/round-trip.json").read_text())
    digest = {name: of for name, (_, _, of) in digests(tensors).items()}
    rows = {row["name"]: row for row in written["compared"]}
    assert written["original"] == str(tmp_path / "hub/save-00000001")
    assert "as in the original if its verdict in the comparison is equal" in written["proves"]
    assert (rows["a"]["sha256"], rows["a"]["original_sha256"], rows["a"]["verdict"]) == (*[digest["a"]] * 2, "equal")
    assert (rows["c"]["sha256"], rows["c"]["original_sha256"]) == (None, digest["c"])


LOSSES: Mapping[str, Mapping[str, str]] = {
    "x -> x, dtype='bfloat16'; whole -> whole, dtype='bfloat16'; y -> _; z -> z, dtype='float64'": {
        "x": "cast from float32 to bfloat16",
        "whole": "",  # the cast may lose something, but did not
        "y": "dropped",
        "z": "",
    },
    "x -> t, u, axis=0; t -> _": {"x": "a part is dropped"},
    "x -> b, dtype='bfloat16'; b -> c, d, axis=0; c -> _": {"x": "a part is dropped, cast from float32 to bfloat16"},
    "x -> b; x -> t, u, axis=0; b -> _; t -> _": {"x": "a part is dropped"},
    "x -> t, u, axis=0; x -> v; t -> _": {"x": ""},
    "x, y -> t, axis=0; t -> u, v, axis=0, sizes='[8,2]'; v -> _": {
        "x": "a part of the tensor that it is joined with is dropped"
    },
}
"""Of some tensors, why they do not come back; empty where they do."""


@pytest.mark.parametrize("text", LOSSES)
def test_the_certificate_says_what_was_lost(text: str, tmp_path: Path) -> None:
    tensors = {"x": torch.randn(8, 3), "whole": torch.ones(4), "y": torch.randn(2, 3), "z": torch.ones(3)}
    checkpoint.save(tmp_path / "a", tensors)
    certificate = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text), certify=True).certificate
    assert certificate is not None
    rows = {each.name: each for each in certificate.tensors}
    assert {name: rows[name].why for name in LOSSES[text]} == LOSSES[text]
    for row in rows.values():
        assert row.verdict == ("lossy" if row.why else "equal")
        assert (row.returned_sha256 == row.sha256) == (not row.why)
    if "whole" in text:
        assert str(certificate) == (
            "round trip: 2 of 4 tensors come back to the bit; lossy: x (cast from float32 to bfloat16); y (dropped); "
            "compared with no original"
        )
        dropped = json.loads((tmp_path / "b/save-00000001/round-trip.json").read_text())["tensors"][2]
        assert (dropped["name"], dropped["returned_sha256"], dropped["why"]) == ("y", None, "dropped")


def test_what_does_not_come_back_is_an_error_and_leaves_neither_folder_nor_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.arange(6.0), "y": torch.zeros(3)})
    checkpoint.convert(tmp_path / "a", tmp_path / "hf", to="hf")

    def damaged(read: Callable[..., Contents]) -> Callable[..., Contents]:
        """Reads what was written, after its last byte was changed."""

        def reading(store: LocalStore, *others: Any) -> Contents:
            file = max(Path(store.location).rglob("*.safetensors"), key=lambda each: each.stat().st_mtime_ns)
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            return read(store, *others)

        return reading

    monkeypatch.setattr(conversion, "read_foreign", damaged(read_foreign))
    with pytest.raises(CheckpointError, match=r"not to be trusted.*: y \(float32 \[3\]\) does not come back out of"):
        export_hf(tmp_path / "hf", tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "hf"]
    monkeypatch.setattr(conversion, "read_save", damaged(read_save))
    with pytest.raises(CheckpointError, match="damaged"):
        import_hf(tmp_path / "hf", tmp_path / "a")
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["save-00000001"]


def test_a_save_whose_certificate_cannot_be_written_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)})
    checkpoint.convert(tmp_path / "a", tmp_path / "hf", to="hf")
    counting = Counting(LocalStore(tmp_path / "counted"))
    import_hf(tmp_path / "hf", counting)
    writing = max(number for number, each in enumerate(counting.operations, 1) if each.name.endswith("round-trip.json"))
    failing = FailingAt(LocalStore(tmp_path / "b"), writing, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(
        CheckpointError,
        match=r"round-trip\.json cannot be written: No space left on device; without its certificate the save",
    ):
        import_hf(tmp_path / "hf", failing)
    assert not list((tmp_path / "b").rglob("*.json"))


def test_a_certificate_has_a_row_for_each_tensor_and_goes_with_its_save(tmp_path: Path) -> None:
    tensors = {"q": torch.randn(4, 2), "k": torch.randn(4, 2), "norm": torch.ones(3).bfloat16()}
    checkpoint.save(tmp_path / "a", tensors)
    for _ in range(2):
        checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("q, k -> qk, axis=0"), certify=True)
    checkpoint.prune(tmp_path / "b", keep=1)
    assert checkpoint.verify(tmp_path / "b").good
    (file,) = tmp_path.rglob("round-trip.json")
    written = json.loads(file.read_text())
    assert (written["source"], written["destination"]) == (f"{tmp_path}/a/save-00000001", f"{tmp_path}/b/save-00000002")
    for row, (name, (dtype, shape, digest)) in zip(written["tensors"], digests(tensors).items(), strict=True):
        assert (row["name"], f"torch.{row['dtype']}", tuple(row["shape"])) == (name, dtype, shape)
        assert (row["sha256"], row["returned_sha256"], row["verdict"]) == (digest, digest, "equal")


def every_pattern(dtype: str) -> torch.Tensor:
    bits = torch.arange(256, dtype=torch.uint8) if ITEMSIZE_BYTES[dtype] == 1 else torch.arange(65_536).short()
    return bits.view(getattr(torch, dtype))


def payload(dtype: str, *others: float) -> torch.Tensor:
    """Some numbers, and a signaling NaN of which torch makes another when it casts."""
    patterns = {"bfloat16": 0x7F81, "float16": 0x7C01, "float32": 0x7F800001}
    tensor = torch.tensor([1.0, 2.0, *others], dtype=getattr(torch, dtype))
    words_of(tensor)[1] = patterns[dtype]
    return tensor


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # said once in a process, so by the first test
@pytest.mark.parametrize(("dtype", "to"), [("bfloat16", "float32"), ("float32", "float64"), ("float32", "complex64")])
def test_a_payload_that_is_lost_is_a_loss_and_the_save_stays(tmp_path: Path, dtype: str, to: str) -> None:
    tensors = {"a": payload(dtype), "b": torch.ones(3, dtype=getattr(torch, dtype))}
    same = torch.equal(
        words_of(tensors["a"].to(getattr(torch, to)).real.to(tensors["a"].dtype)), words_of(tensors["a"])
    )
    rewrite = Rewrite(f"a -> a, dtype='{to}'; b -> b, dtype='{to}'")
    checkpoint.save(tmp_path / "a", tensors)
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=rewrite, certify=True)
    assert report.certificate is not None
    one, other = report.certificate.tensors
    why = "" if same else f"the payload of NaNs (cast from {dtype} to {to})"
    assert (one.name, one.verdict, one.why) == ("a", "equal" if same else "lossy", why)
    assert (one.sha256 == one.returned_sha256) == same
    assert (other.verdict, other.why) == ("equal", "")
    assert tensors_of(tmp_path / "b")["a"].real.isnan().tolist() == [False, True]


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def test_nans_are_told_apart_from_numbers_across_joins_and_windows(tmp_path: Path) -> None:
    every = every_pattern("bfloat16")[0x7F70:0x7F90].view(8, 4).clone()
    checkpoint.save(tmp_path / "a", {"a": every, "b": torch.ones(8, 2).bfloat16()})
    text = "a, b -> ab, axis=1; ab^T -> ab; ab -> ab, dtype='float32'"
    with small_limits(48):
        report = checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text), certify=True)
    assert report.certificate is not None
    assert [(each.name, each.why) for each in report.certificate.tensors] == [
        ("a", "the payload of NaNs (cast from bfloat16 to float32)"),
        ("b", ""),
    ]
