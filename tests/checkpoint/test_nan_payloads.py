"""NaNs that are cast: they stay NaN, and a certificate says that their payload did not come back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from shardwise import checkpoint
from shardwise.checkpoint import certificates, convert, elements, import_hf
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES, is_complex
from shardwise.rewrite import Rewrite
from shardwise.rewrite.metas import holds_nans, keeps_values
from tests.checkpoint.cut_tensors import tensors_of

NARROW = [dtype for dtype, size in ITEMSIZE_BYTES.items() if size <= 2 and holds_nans(dtype)]
CASTS = [(source, to) for source in NARROW for to in ITEMSIZE_BYTES if source != to and keeps_values(source, to)]


def every_pattern(dtype: str) -> torch.Tensor:
    bits = torch.arange(256, dtype=torch.uint8) if ITEMSIZE_BYTES[dtype] == 1 else torch.arange(65_536).short()
    return bits.view(getattr(torch, dtype))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def payload(dtype: str, *others: float) -> torch.Tensor:
    """Some numbers, and a signaling NaN of which torch makes another when it casts."""
    patterns = {"bfloat16": 0x7F81, "float16": 0x7C01, "float32": 0x7F800001}
    tensor = torch.tensor([1.0, 2.0, *others], dtype=getattr(torch, dtype))
    bits(tensor)[1] = patterns[dtype]
    return tensor


@pytest.mark.filterwarnings("ignore:Casting complex values to real", "ignore:ComplexHalf support")
@pytest.mark.parametrize(("source", "to"), CASTS)
def test_casts_that_keep_values_keep_all_but_which_nan_it_is(source: str, to: str) -> None:
    before = every_pattern(source)
    wide = before.to(getattr(torch, to))
    after = wide.to(before.dtype)
    nan = before.float().isnan()
    assert nan.any()
    assert torch.equal(after.float().isnan(), nan)
    assert torch.equal(bits(after)[~nan], bits(before)[~nan])
    numbers = torch.view_as_real(wide.to(torch.complex128))[:, 0] if is_complex(to) else wide.double()
    assert torch.equal(numbers[~nan], before.double()[~nan])


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # said once in a process, so by the first test
@pytest.mark.parametrize(
    ("dtype", "to"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"), ("float32", "complex64")],
)
def test_a_payload_that_is_lost_is_a_loss_and_the_save_stays(tmp_path: Path, dtype: str, to: str) -> None:
    tensors = {"a": payload(dtype), "b": torch.ones(3, dtype=getattr(torch, dtype))}
    same = torch.equal(bits(tensors["a"].to(getattr(torch, to)).real.to(tensors["a"].dtype)), bits(tensors["a"]))
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


def test_import_hf_keeps_a_save_whose_nans_lose_their_payload(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file({"a": payload("bfloat16"), "b": torch.ones(2)}, tmp_path / "hf/model.safetensors")
    report = import_hf(tmp_path / "hf", tmp_path / "out", Rewrite("a -> x.a, dtype='float32'"))
    assert str(report.certificate) == (
        "round trip: 1 of 2 tensors come back to the bit; "
        "lossy: a (the payload of NaNs (cast from bfloat16 to float32))"
    )
    assert checkpoint.verify(tmp_path / "out").good
    assert (tmp_path / "out/save-00000001/round-trip.json").exists()


def test_nans_are_told_apart_from_numbers_across_joins_and_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("outputs", "windows"):
        monkeypatch.setattr(f"shardwise.checkpoint.{module}.WINDOW_BYTES", 48)
    monkeypatch.setattr(elements, "_NANS_AT_ONCE", 5)
    every = every_pattern("bfloat16")[0x7F70:0x7F90].view(8, 4).clone()
    checkpoint.save(tmp_path / "a", {"a": every, "b": torch.ones(8, 2).bfloat16()})
    text = "a, b -> ab, axis=1; ab^T -> ab; ab -> ab, dtype='float32'"
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text), certify=True)
    assert report.certificate is not None
    assert [(each.name, each.why) for each in report.certificate.tensors] == [
        ("a", "the payload of NaNs (cast from bfloat16 to float32)"),
        ("b", ""),
    ]


@pytest.mark.parametrize("fault", ["a number", "a NaN for a number", "a number for a NaN"])
def test_another_difference_beside_nans_is_still_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    checkpoint.save(tmp_path / "a", {"a": payload("bfloat16", 3.0, 4.0)})
    at, value = {"a number": (2, 5.0), "a NaN for a number": (3, float("nan")), "a number for a NaN": (1, 1.0)}[fault]
    read = certificates._elements

    def changed(store: Store, outputs: Outputs, *others: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, some in read(store, outputs, *others):
            if outputs.view is not None:  # what came back
                some[at] = value
            yield name, some

    monkeypatch.setattr(certificates, "_elements", changed)
    with pytest.raises(CheckpointError, match=r"not to be trusted.*: a \(bfloat16 \[4\]\) does not come back"):
        convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("a -> a, dtype='float32'"), certify=True)
    assert not (tmp_path / "b").exists()


def test_a_payload_without_a_cast_comes_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"a": payload("bfloat16")})
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("a -> b"), certify=True)
    assert report.certificate is not None
    assert not report.certificate.lossy


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [each for each in ITEMSIZE_BYTES if holds_nans(each)])
def test_every_dtype_of_floats_gets_one_nan(dtype: str) -> None:
    numbers = torch.tensor([0.5, 1.0, float("nan"), 2.0]).to(getattr(torch, dtype))
    (made,) = elements.with_one_nan(numbers)
    assert made.view(torch.uint8).tolist() == numbers.view(torch.uint8).tolist()
