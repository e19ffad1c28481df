"""The rewrites that come with the library: each is read, fits the models that it is for, and leads back."""

import re
from pathlib import Path

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint import import_hf
from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite
from shardwise.rewrite.rewrites import find_rewrite, shipped, shipped_names, shipped_text
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.hugging_face_models import build, save
from tests.checkpoint.small_states import same

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4}

FOR = {
    "expert-stacking": "qwen3_moe",
    "expert-stacking-w123": "mixtral",
    "gpt2-conv1d": "gpt2",
    "llama-gate-up": "llama",
    "llama-qkv": "qwen2",
    "llama-vllm": "qwen2",
    "megatron-gpt2": "gpt2",
    "megatron-llama": "qwen3",
    "megatron-mixtral": "mixtral",
    "megatron-qwen-moe": "qwen3_moe",
}


def from_hub(name: str) -> Rewrite:
    """A rewrite, in the direction from Hugging Face's names."""
    return shipped(name).inverse() if name.startswith("megatron-") else shipped(name)


def test_every_file_is_one_of_those_that_are_tested_here() -> None:
    assert shipped_names() == tuple(FOR)


@pytest.mark.parametrize("name", FOR)
def test_a_file_begins_with_what_it_is_for_and_needs_only_what_configurations_say(name: str) -> None:
    text = shipped_text(name)
    assert text.startswith("# ")
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 120
    assert shipped(name).parameters_needed <= HEADS.keys()


@pytest.mark.parametrize("name", FOR)
def test_a_rewrite_fits_its_model_and_leads_back(tmp_path: Path, name: str) -> None:
    source = save(build(FOR[name]), tmp_path / "hf", 1 << 30)
    report = import_hf(source, tmp_path / "save", from_hub(name))
    assert report.certificate is not None
    assert report.certificate.lossy == ()
    checkpoint.convert(tmp_path / "save", tmp_path / "back", to="hf", rewrite=from_hub(name).inverse())
    assert same(tensors_of(tmp_path / "back"), tensors_of(source))


@pytest.mark.parametrize("name", ["expert-stacking", "expert-stacking-w123"])
def test_stacked_experts_have_the_names_and_shapes_of_the_live_modules(tmp_path: Path, name: str) -> None:
    model = build(FOR[name])
    import_hf(save(model, tmp_path / "hf", 1 << 30), tmp_path / "save", shipped(name))
    state = model.state_dict()
    assert same(tensors_of(tmp_path / "save"), state)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    checkpoint.load(tmp_path / "hf", target, rewrite=shipped(name))
    assert same(target, state)


def test_conv1d_becomes_linear(tmp_path: Path) -> None:
    model = build("gpt2")
    import_hf(save(model, tmp_path / "hf", 1 << 30), tmp_path / "save", shipped("gpt2-conv1d"))
    found = tensors_of(tmp_path / "save")
    kinds = {
        re.sub(r"\d+", "N", key)
        for key, tensor in model.state_dict().items()
        if same_but_turned(tensor, found.get(key))
    }
    assert kinds == {
        f"transformer.h.N.{each}.weight" for each in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def same_but_turned(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.dim() == 2 and not torch.equal(one, other) and torch.equal(one, other.t())


def test_gate_and_up_are_one_above_the_other_and_heads_lie_by_groups(tmp_path: Path) -> None:
    source = save(build("qwen2"), tmp_path / "hf", 1 << 30)
    import_hf(source, tmp_path / "save", shipped("llama-gate-up") >> shipped("llama-qkv"))
    old, new = tensors_of(source), tensors_of(tmp_path / "save")
    layer = "model.layers.1."
    gate, up = (old[f"{layer}mlp.{each}_proj.weight"] for each in ("gate", "up"))
    assert torch.equal(new[f"{layer}mlp.gate_up_proj.weight"], torch.cat([gate, up]))
    for kind in ("weight", "bias"):
        q, k, v = (old[f"{layer}self_attn.{each}_proj.{kind}"] for each in "qkv")
        fused = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
        assert torch.equal(new[f"{layer}self_attn.qkv_proj.{kind}"], fused)


def test_for_vllm_the_parts_of_fused_matrices_are_whole_one_below_the_other(tmp_path: Path) -> None:
    source = save(build("qwen2"), tmp_path / "hf", 1 << 30)
    import_hf(source, tmp_path / "save", shipped("llama-vllm"))
    old, new = tensors_of(source), tensors_of(tmp_path / "save")
    for kind in ("weight", "bias"):
        parts = [old[f"model.layers.1.self_attn.{each}_proj.{kind}"] for each in "qkv"]
        assert torch.equal(new[f"model.layers.1.self_attn.qkv_proj.{kind}"], torch.cat(parts))
    parts = [old[f"model.layers.0.mlp.{each}_proj.weight"] for each in ("gate", "up")]
    assert torch.equal(new["model.layers.0.mlp.gate_up_proj.weight"], torch.cat(parts))


def test_a_name_or_a_path_finds_a_rewrite(tmp_path: Path) -> None:
    (tmp_path / "mine.rewrite").write_text("a -> b\n")
    assert str(find_rewrite(str(tmp_path / "mine.rewrite"))) == str(Rewrite("a -> b"))
    assert str(find_rewrite("gpt2-conv1d")) == str(shipped("gpt2-conv1d"))
    with pytest.raises(
        RewriteError, match=r"no rewrite named 'lama-qkv' comes with .* \(did you mean llama-qkv\?\); there"
    ):
        shipped("lama-qkv")
    with pytest.raises(RewriteError, match=r"there is no file nothing, and no rewrite named 'nothing'"):
        find_rewrite("nothing")
