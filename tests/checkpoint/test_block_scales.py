"""Block-scaled floats: dequantised under any cut, quantised block by block, as transformers and a plain loop do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.rewrite import TensorMeta
from tests.checkpoint.cut_tensors import save_pieces, tensors_of
from tests.checkpoint.rewritten_tensors import CUTS, blank, load_all, same_pieces, shares_of
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import same, same_tensor
from tests.refusals import Refusals

Whole = dict[str, torch.Tensor]


Block = tuple[int, ...]


def grid(shape: Block, block: Block) -> Block:
    return tuple(-(-size // each) for size, each in zip(shape, block, strict=True))


def stored(shape: Block, block: Block, scale_dtype: torch.dtype, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of every bit pattern that is a number, and scales."""
    numbers = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 127, shape, generator=numbers) + 128 * torch.randint(0, 2, shape, generator=numbers)
    elements = patterns.to(torch.uint8).view(torch.float8_e4m3fn)
    if scale_dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = torch.randint(90, 140, grid(shape, block), generator=numbers).to(torch.uint8)
        return elements, exponents.view(scale_dtype)
    return elements, (torch.rand(grid(shape, block), generator=numbers) + 0.01).to(scale_dtype)


def product(elements: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """DeepSeek's `weight_dequant`, for any block: each element times the scale of its block, in float32."""
    powers = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    wide = torch.exp2(scales.view(torch.uint8).float() - 127) if powers else scales.float()
    for dim, (size, each) in enumerate(zip(elements.shape, block, strict=True)):
        wide = wide.repeat_interleave(each, dim).narrow(dim, 0, size)
    return elements.float() * wide


def quantiser(block: Block, scale_dtype: torch.dtype) -> Any:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    scale_fmt = "float32" if scale_dtype == torch.float32 else "ue8m0"
    config = SimpleNamespace(weight_block_size=tuple(block), scale_fmt=scale_fmt)
    return Fp8Quantize(SimpleNamespace(quantization_config=config))  # type: ignore[no-untyped-call]


CASES: Mapping[str, tuple[Block, Block, torch.dtype]] = {
    "even": ((16, 24), (8, 8), torch.float32),
    "uneven edges": ((19, 21), (8, 8), torch.float32),
    "mx": ((7, 70), (1, 32), torch.float8_e8m0fnu),
    "mx in bytes": ((7, 64), (1, 32), torch.uint8),
    "by rows": ((9, 11), (1, 11), torch.bfloat16),
    "experts": ((3, 10, 9), (1, 4, 4), torch.float32),
}


def state_of(name: str) -> tuple[Whole, Whole, str]:
    """What is stored, what a rewrite makes of it (fused along a dim, and transposed), and the rewrite."""
    shape, block, scale_dtype = CASES[name]
    state: Whole = {}
    for seed, each in enumerate(("a", "b")):
        state[each], state[f"{each}.scales"] = stored(shape, block, scale_dtype, seed=seed)
    made = [product(state[each], state[f"{each}.scales"], block).bfloat16() for each in ("a", "b")]
    asked = [-1 if size == each and size > 1 else each for size, each in zip(shape, block, strict=True)]
    text = "".join(f"{each}, {each}.scales -> {each}, dequantise='{asked}', dtype='bfloat16'\n" for each in "ab")
    last = len(shape) - 1
    text += f"a, b -> ab, axis={last}\nab -> ab, permute='[]'"
    return state, {"ab": torch.cat(made, last).permute(*reversed(range(len(shape)))).contiguous()}, text


@pytest.mark.parametrize("name", CASES)
def test_any_cut_of_what_is_stored_is_dequantised_into_any_cut_and_back_in_its_names_shapes_and_dtypes(
    name: str, tmp_path: Path
) -> None:
    at = list(CASES).index(name)
    source, target = CUTS[at % 3]
    state, made, text = state_of(name)
    save_pieces(tmp_path / "a", shares_of(state, source, 2))
    expected = shares_of(made, target, 3)
    got = blank(expected)
    reports = [each.report for each in load_all(tmp_path / "a", got, rewrite=sw.Rewrite(text), verify=at > 2)]
    assert {report.missing + report.unexpected for report in reports} == {()}
    assert all(same_pieces(*pair) for pair in zip(got, expected, strict=True))
    report = checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=sw.Rewrite(text), certify=True)
    assert same(tensors_of(tmp_path / "b"), made)
    assert report.certificate is not None
    assert all(each.why or each.verdict == "equal" for each in report.certificate.tensors)
    back = checkpoint.recorded_rewrite(tmp_path / "b").inverse(lossy="allow")
    checkpoint.convert(tmp_path / "b", tmp_path / "c", rewrite=back)
    again = tensors_of(tmp_path / "c")
    assert forms_of(again) == forms_of(state)
    for each in "ab":  # the error of two roundings, each of 4 bits, in relation to the largest of the block
        old, new = (product(held[each], held[f"{each}.scales"], CASES[name][1]) for held in (state, again))
        assert (old - new).abs().max() <= old.abs().max() / 16


def forms_of(state: Whole) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize(("block", "scale_dtype"), [((128, 128), torch.float32), ((1, 32), torch.float8_e8m0fnu)])
@pytest.mark.parametrize(("to", "window_bytes"), [("whole", None), ("pieces", 300)])
def test_both_directions_have_the_bits_of_transformers_whatever_pieces_and_windows_cut(
    to: Any, window_bytes: int | None, block: Block, scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Values are fused and transposed on the way."""
    torch.manual_seed(1)
    weight = (torch.randn(256, 384) * torch.exp(3 * torch.randn(256, 1))).bfloat16()
    weight[:128, :128] = 0
    weight[200] *= 1e-30
    expected = quantiser(block, scale_dtype)._quantize_one("m.weight", weight)
    parts = {"a": weight.T[:, :100].contiguous(), "b": weight.T[:, 100:].contiguous()}
    save_pieces(tmp_path / "a", shares_of(parts, "runs", 3))
    name = str(scale_dtype).removeprefix("torch.")
    quantise = f"quantise='{list(block)}', scale_dtype='{name}'"
    text = f"a, b -> t, axis=1; t -> m.weight, m.weight_scale_inv, permute='[]', {quantise}"
    with small_limits(window_bytes):
        checkpoint.convert(tmp_path / "a", tmp_path / "b", to=to, rewrite=sw.Rewrite(text))
    assert same(tensors_of(tmp_path / "b"), expected)
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    elements, scales = expected.values()
    wide = Fp8Dequantize(None)._dequantize_one(elements, scales, torch.bfloat16)  # type: ignore[no-untyped-call]
    state = {"m.weight": torch.zeros(256, 384, dtype=torch.bfloat16)}
    sw.load(tmp_path / "b", state, rewrite=checkpoint.dequantising(tmp_path / "b"))
    assert same_tensor(state["m.weight"], wide)


def test_the_certificate_measures_what_is_lost(tmp_path: Path) -> None:
    torch.manual_seed(3)
    weight = torch.randn(64, 64)
    sw.save(tmp_path / "a", {"w": weight})
    text = sw.Rewrite("w -> w, w_scale_inv, quantise='[1,32]', scale_dtype='float8_e8m0fnu'")
    report = checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=text, certify=True)
    made = checkpoint.open(tmp_path / "b")
    wide = product(made.read("w"), made.read("w_scale_inv"), (1, 32))
    assert report.certificate is not None
    (tensor,) = report.certificate.tensors
    assert tensor.max_error == float((weight.double() - wide.double()).abs().max())
    assert tensor.max_relative_error == float(((weight.double() - wide.double()).abs() / weight.double().abs()).max())
    assert tensor.why.startswith("quantised to float8_e4m3fn by blocks of [1, 32]; off by at most ")
    row = json.loads(report.certificate.pack())["tensors"][0]
    assert (row["max_error"], row["verdict"]) == (tensor.max_error, "lossy")


def test_layers_and_experts_that_are_alike_are_one_statement(tmp_path: Path) -> None:
    state: Whole = {}
    for name in [*(f"l.{x}.e.{y}.w" for x in (0, 1, 10) for y in range(2 + x % 2)), "l.0.*", "head2"]:
        state[name], state[f"{name}_scale_inv"] = stored((8, 8), (4, 4), torch.float32, seed=len(state))
    for layer in (0, 1):  # one of them by other blocks
        block = (8, 2) if layer else (4, 4)
        state[f"l.{layer}.q"], state[f"l.{layer}.q_scale_inv"] = stored((8, 8), block, torch.float32)
    state["m.0"], state["m.0_scale"] = stored((8, 8), (4, 4), torch.float32)
    state["m.1"], state["m.1_scale"] = torch.ones(8, 8), torch.ones(2, 2)  # none of them
    sw.save(tmp_path, state)
    rewrite = checkpoint.dequantising(tmp_path, "float32")
    assert sorted(str(rewrite).splitlines()) == [
        '"l.0.\\*", "l.0.\\*_scale_inv" -> "l.0.\\*", dequantise=\'[4,4]\'',
        "head2, head2_scale_inv -> head2, dequantise='[4,4]'",
        "l.$N1.e.$N2.w, l.$N1.e.$N2.w_scale_inv -> l.$N1.e.$N2.w, dequantise='[4,4]'",
        "l.0.q, l.0.q_scale_inv -> l.0.q, dequantise='[4,4]'",
        "l.1.q, l.1.q_scale_inv -> l.1.q, dequantise='[8,2]'",
        "m.0, m.0_scale -> m.0, dequantise='[4,4]'",
    ]
    checkpoint.convert(tmp_path, tmp_path / "out", rewrite=rewrite)
    found = checkpoint.open(tmp_path / "out")
    assert same_tensor(found.read("l.10.e.1.w"), product(state["l.10.e.1.w"], state["l.10.e.1.w_scale_inv"], (4, 4)))
    assert {name for name in found.tensors if name.endswith(("_scale", "_inv"))} == {"m.1_scale"}


@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_a_folder_of_the_hub_is_read_by_the_blocks_of_its_configuration_and_made_again(
    tmp_path: Path, block: Block
) -> None:
    """As DeepSeek publishes them: uneven edges, norms in bfloat16."""
    (tmp_path / "hub").mkdir()
    elements, scales = stored((200, 130), block, torch.float32)
    state = {"m.0.weight": elements, "m.0.weight_scale_inv": scales, "norm": torch.ones(130).bfloat16()}
    save_file(state, tmp_path / "hub/model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": list(block)}
    (tmp_path / "hub/config.json").write_text(json.dumps({"model_type": "x", "quantization_config": said}))
    checkpoint.convert(tmp_path / "hub", tmp_path / "save", rewrite=checkpoint.dequantising(tmp_path / "hub"))
    checkpoint.convert(tmp_path / "save", tmp_path / "wide", to="hf")
    wide = product(elements, scales, block).bfloat16()
    assert same(tensors_of(tmp_path / "wide"), {"m.0.weight": wide, "norm": state["norm"]})
    assert json.loads((tmp_path / "wide/config.json").read_text()) == {"model_type": "x"}
    back = checkpoint.recorded_rewrite(tmp_path / "save").inverse(lossy="allow")
    checkpoint.convert(tmp_path / "save", tmp_path / "again", to="hf", rewrite=back)
    assert forms_of(tensors_of(tmp_path / "again")) == forms_of(state)
    assert "quantization_config" in json.loads((tmp_path / "again/config.json").read_text())


@pytest.mark.parametrize(
    ("shape", "scales"), [((6, 4), ()), ((6, 4), (6,)), ((6, 4), (6, 1)), ((3, 6, 4), (3,)), ((6,), (1,)), ((), ())]
)
def test_scales_may_lack_the_last_dims_where_these_have_one_block(
    shape: tuple[int, ...], scales: tuple[int, ...], tmp_path: Path
) -> None:
    given, weight = torch.rand(scales) + 0.5, torch.randn(shape).to(torch.float8_e4m3fn)
    wide = [*scales, *[1] * (len(shape) - len(scales))]
    sw.save(
        tmp_path / "a",
        {f"{at}.{key}": each.clone() for at in "01" for key, each in (("weight", weight), ("weight_scale", given))},
    )
    rewrite = checkpoint.dequantising(tmp_path / "a")
    expected = (weight.float() * given.reshape(wide)).bfloat16()
    checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=rewrite)
    assert same(tensors_of(tmp_path / "b"), {f"{at}.weight": expected for at in "01"})
    back = rewrite.check(checkpoint.open(tmp_path / "a").tensors).inverse(lossy="allow")
    checkpoint.convert(tmp_path / "b", tmp_path / "c", rewrite=sw.Rewrite(str(back)))
    found = tensors_of(tmp_path / "c")
    assert found["0.weight_scale"].shape == scales
    again = found["0.weight"].float() * found["0.weight_scale"].reshape(wide)
    torch.testing.assert_close(again, expected.float(), rtol=0.07, atol=0.01)  # 3 bits of mantissa


ELEMENTS, SCALES = stored((8, 8), (4, 4), torch.float32)
WIDE = {"w": torch.tensor([[1.0, torch.inf]]), "optimizer/w/exp_avg": torch.zeros(1, 2)}
NARROW = {"w": ELEMENTS, "w_scale_inv": SCALES}
QUANTISE = sw.Rewrite("w -> w, s, quantise='[1,1]'")
DEQUANTISE = sw.Rewrite("w, s -> w, dequantise='[4,4]'")


def saved(state: Whole, call: Callable[[Path], object]) -> Any:
    def calling(folder: Path) -> object:
        sw.save(folder / "a", state)
        try:
            return call(folder / "a")
        finally:
            assert not (folder / "out").exists()

    return calling


REFUSED = Refusals(
    "checkpoint.block_scales",
    {
        "scales that do not go together with elements": saved(
            {
                "a": ELEMENTS,
                "a_scale_inv": SCALES,
                "b": ELEMENTS.clone(),
                "c": ELEMENTS.clone(),
                "c_scale": torch.ones(3, 3),
            },
            checkpoint.dequantising,
        ),
        "nothing to dequantise": saved({"a": torch.ones(2)}, checkpoint.dequantising),
        "state of what is quantised": saved(
            WIDE, lambda a: checkpoint.convert(a, a.with_name("out"), rewrite=QUANTISE)
        ),
        "values that are not finite": saved(
            WIDE, lambda a: checkpoint.convert(a, a.with_name("out"), to="hf", rewrite=QUANTISE)
        ),
        "a load that quantises": saved(WIDE, lambda a: sw.load(a, {"w": ELEMENTS, "s": SCALES}, rewrite=QUANTISE)),
        "a save that quantises": saved(
            WIDE, lambda a: sw.save(a.with_name("out"), {"w": torch.ones(4, 4)}, rewrite=QUANTISE)
        ),
        "a save that dequantises": saved(
            WIDE, lambda a: sw.save(a.with_name("out"), {"w": ELEMENTS, "s": SCALES}, rewrite=DEQUANTISE)
        ),
        "an exact inverse": saved(NARROW, lambda a: checkpoint.dequantising(a).inverse()),
        "scales of fewer dims than blocks": lambda: sw.Rewrite("w, s -> w, dequantise='[1,-1]'").check(
            {"w": TensorMeta((6, 4), "float8_e4m3fn"), "s": TensorMeta((4,), "float32")}
        ),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantised_or_read_is_refused(case: str) -> None:
    REFUSED.check(case)
