"""`import_hf` and `export_hf`: models of transformers go in, through a rewrite, and come out as they were."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import export_hf, import_hf
from shardwise.rewrite import shipped, shipped_names, shipped_text
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.hugging_face_models import build, loaded, save
from tests.checkpoint.small_states import same
from tests.refusals import Refusals

MODELS = ("llama", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe", "gpt2", "bert", "t5")
SIZES = {"one file": 1 << 30, "shards": 6000}


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [(name, [*SIZES][at % 2], ("float32", "bfloat16")[at // 2 % 2]) for at, name in enumerate(MODELS)],
)
def test_a_model_comes_back_as_it_was(tmp_path: Path, name: str, size: str, dtype: str) -> None:
    model = build(name, getattr(torch, dtype))
    source = save(model, tmp_path / "hf", SIZES[size])
    import_hf(source, tmp_path / "save")
    report = export_hf(tmp_path / "save", tmp_path / "out", max_shard_bytes=SIZES[size])
    assert report.certificate is not None
    assert report.certificate.lossy == ()
    assert same(tensors_of(tmp_path / "out"), tensors_of(source))
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (size == "shards")
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    again = loaded(name, tmp_path / "out")
    assert type(again) is type(model)
    assert same(again.state_dict(), model.state_dict())
    assert dict(again.named_parameters()).keys() == dict(model.named_parameters()).keys()  # tied as before
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())


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
"""The rewrites that come with the library, each with a model."""


def by_hand(name: str, old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What some of them make, by torch: matrices of heads by groups or whole, gate above up, linear layers."""
    if name.startswith("expert-stacking"):  # as the live modules have them
        return dict(build(FOR[name]).state_dict())
    layer, made = "model.layers.1.", {}
    if name in ("llama-qkv", "llama-vllm"):
        for kind in ("weight", "bias"):
            q, k, v = (old[f"{layer}self_attn.{each}_proj.{kind}"] for each in "qkv")
            parts = [q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]] if name == "llama-qkv" else [q, k, v]
            made[f"{layer}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
    if name in ("llama-gate-up", "llama-vllm"):
        made[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(
            [old[f"{layer}mlp.{each}_proj.weight"] for each in ("gate", "up")]
        )
    if name == "gpt2-conv1d":
        turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        made = {key: each.t() if key.endswith(turned) else each for key, each in old.items()}
    return made


@pytest.mark.parametrize("name", FOR)
def test_a_shipped_rewrite_fits_its_model_and_leads_back(tmp_path: Path, name: str) -> None:
    assert shipped_names() == tuple(FOR)
    assert shipped_text(name).startswith("# ")
    assert shipped(name).parameters_needed <= {"num_attention_heads", "num_key_value_heads", "n_head"}
    source = save(build(FOR[name]), tmp_path / "hf", 1 << 30)
    there = shipped(name).inverse() if name.startswith("megatron-") else shipped(name)
    report = import_hf(source, tmp_path / "save", there)
    assert report.certificate is not None
    assert report.certificate.lossy == ()
    made, expected = tensors_of(tmp_path / "save"), by_hand(name, tensors_of(source))
    assert same({key: made[key] for key in expected}, expected)
    checkpoint.convert(tmp_path / "save", tmp_path / "back", to="hf", rewrite=there.inverse())
    assert same(tensors_of(tmp_path / "back"), tensors_of(source))


def test_numbers_of_heads_come_from_the_configuration_and_explicit_ones_win(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "hf", 1 << 30)
    import_hf(tmp_path / "hf", tmp_path / "a", shipped("llama-qkv"))
    given = {"num_attention_heads": 2, "num_key_value_heads": 1}
    import_hf(tmp_path / "hf", tmp_path / "b", shipped("llama-qkv", parameters=given))
    one, other = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    q, k, v = (tensors_of(tmp_path / "hf")[name.replace("qkv", each)] for each in "qkv")
    assert torch.equal(other[name], torch.cat([q, k, v]))
    assert torch.equal(one[name], torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]]))
    # of an export, from what the import has kept
    export_hf(tmp_path / "a", tmp_path / "out", shipped("llama-qkv").inverse())
    assert same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))


def imported(config: str) -> Any:
    """A model whose configuration says this, through a rewrite that needs numbers of heads."""

    def call(folder: Path) -> object:
        save(build("llama"), folder / "hf", 1 << 30)
        (folder / "hf/config.json").write_text(config)
        return import_hf(folder / "hf", folder / "save", shipped("llama-qkv"))

    return call


def exported(config: str, text: str = "{}") -> Any:
    """A save, beside a file of this name."""

    def call(folder: Path) -> object:
        checkpoint.save(folder / "a", {"x": torch.ones(2)})
        (folder / "given").mkdir()
        (folder / "given" / config).write_text(text)
        return export_hf(folder / "a", folder / "out", config=folder / "given" / (config if text != "{}" else ""))

    return call


def import_of_a_save(folder: Path) -> object:
    checkpoint.save(folder / "a", {"x": torch.ones(2)})
    return import_hf(folder / "a", folder / "b")


NESTED = {"model_type": "both", "text_config": {"num_attention_heads": 4}}
REFUSED = Refusals(
    "checkpoint.import_export",
    {
        "other numbers of heads": imported(json.dumps(NESTED)),
        "no numbers of heads": imported("{}"),
        "a configuration that is not JSON": imported("{"),
        "a folder without a configuration": exported("README.md"),
        "half of a configuration": exported("half", '{"model_type": '),
        "a save": import_of_a_save,
        "nothing": lambda folder: import_hf(folder / "none", folder / "b"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_in_or_out_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_a_configuration_is_looked_into_for_its_text_part(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "hf", 1 << 30)
    nested = {"model_type": "both", "text_config": {"num_attention_heads": 4, "num_key_value_heads": 2}}
    (tmp_path / "hf/config.json").write_text(json.dumps(nested))
    import_hf(tmp_path / "hf", tmp_path / "a", shipped("llama-qkv"))
    assert "model.layers.0.self_attn.qkv_proj.weight" in tensors_of(tmp_path / "a")


@pytest.mark.parametrize("through", ["hf", "save"])
def test_a_configuration_has_the_size_of_the_vocabulary(tmp_path: Path, through: str) -> None:
    (tmp_path / "from").mkdir()
    save_file(
        {"embedding.weight": torch.ones(6, 2), "up.weight": torch.ones(6, 6)}, tmp_path / "from/model.safetensors"
    )
    config = {"vocab_size": 6, "hidden_size": 6, "text_config": {"vocab_size": 6}, "other_vocab_size": 5}
    (tmp_path / "from/config.json").write_text(json.dumps(config))
    pad = sw.Rewrite("embedding.weight -> embedding.weight, pad='[8,-1]'")
    there, source = tmp_path / "there", tmp_path / "from"
    if through == "save":
        sw.checkpoint.convert(source, tmp_path / "save", rewrite=pad)
        sw.checkpoint.convert(tmp_path / "save", there, to="hf")
    else:
        sw.checkpoint.convert(source, there, to="hf", rewrite=pad)
    found = json.loads((there / "config.json").read_text())
    assert found == {"vocab_size": 8, "hidden_size": 6, "text_config": {"vocab_size": 8}, "other_vocab_size": 5}
    crop = sw.Rewrite("embedding.weight -> embedding.weight, crop='[6,-1]', fill=0")
    sw.checkpoint.convert(there, tmp_path / "back", to="hf", rewrite=crop)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config


NEEDED = {
    "modeling_tiny.py": "from .layers_tiny import Layer",
    "layers_tiny.py": "class Layer: ...",
    "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_tiny.Tiny", None]}}),
    "tokenization_tiny.py": "class Tiny: ...",
    "video_preprocessor_config.json": "{}",
    "audio_tokenizer_config.json": "{}",
    "tekken.json": "{}",
    "source.spm": "x",
    "qwen.tiktoken": "x",
    "chat_templates/tool.jinja": "x",
    "additional_chat_templates/rag.jinja": "x",
    "custom_generate/generate.py": "x",
    "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
    "config_sentence_transformers.json": "{}",
    "sentence_bert_config.json": "{}",
    "1_Pooling/config.json": "{}",
    "2_Dense/model.safetensors": "x",
}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    others = {"README.md": "x", "training_args.bin": "x", "runs/events.1": "x"}
    auto = {"AutoModel": "modeling_tiny.Tiny", "AutoConfig": "org/other--configuration_other.Config"}
    for name, text in {**NEEDED, **others, "config.json": json.dumps({"auto_map": auto})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    save_file({"f.weight": torch.ones(2, 2)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def found_in(folder: Path) -> Iterator[str]:
    yield from (str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


@pytest.mark.parametrize("way", ["plain", "like", "config", "save"])
def test_all_that_from_pretrained_needs_goes_along(tmp_path: Path, hub: Path, way: str) -> None:
    source, options = hub, dict[str, Any]()
    if way == "save":
        source = tmp_path / "save"
        checkpoint.convert(hub, source)
    elif way != "plain":
        source = tmp_path / "alone"
        sw.save(source, {"f.weight": torch.ones(2, 2)})
        options = {way: hub}
    report = checkpoint.convert(source, tmp_path / "made", to="hf", **options)
    assert set(found_in(tmp_path / "made")) == {*NEEDED, "config.json", "model.safetensors"}
    assert report.missing == ()


def test_own_code_that_is_not_there_is_named_and_without_any_no_program_is_copied(tmp_path: Path, hub: Path) -> None:
    (hub / "modeling_tiny.py").unlink()
    assert checkpoint.convert(hub, tmp_path / "made", to="hf").missing == ("modeling_tiny.py",)
    for name in ("config.json", "tokenizer_config.json"):
        (hub / name).write_text("{}", encoding="utf-8")
    checkpoint.convert(hub, tmp_path / "plain", to="hf")
    assert not any(name.endswith(".py") and "/" not in name for name in found_in(tmp_path / "plain"))
