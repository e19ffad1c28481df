"""Tiny models of transformers with random weights, and what `save_pretrained` writes of them."""

from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
T5: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}


def configs() -> dict[str, Any]:
    """By name: a configuration of each kind."""
    import transformers

    grouped = {**SMALL, **IDS, "num_key_value_heads": 2}
    return {
        "llama": transformers.LlamaConfig(**grouped),
        "qwen2": transformers.Qwen2Config(**grouped),
        "qwen3": transformers.Qwen3Config(**grouped, head_dim=8),
        "gemma": transformers.GemmaConfig(**grouped, head_dim=4),
        "mixtral": transformers.MixtralConfig(**grouped, num_local_experts=11),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **{**grouped, "head_dim": 4, "num_experts": 4, "moe_intermediate_size": 8}
        ),
        "gpt2": transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=16, **IDS),
        "bert": transformers.BertConfig(**SMALL, max_position_embeddings=16),
        "t5": transformers.T5Config(**{**T5, "decoder_start_token_id": 0}),
    }


def model_class(name: str) -> Any:
    """What makes a model of a configuration, and loads it."""
    import transformers

    other: dict[str, Any] = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    return other.get(name, transformers.AutoModelForCausalLM)


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model, all of whose numbers are random, biases and norms as well."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    model = model_class(name).from_config(configs()[name]).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def save(model: Any, folder: Path, max_shard_bytes: int) -> Path:
    """What transformers writes."""
    model.save_pretrained(folder, max_shard_size=max_shard_bytes)
    return folder


def loaded(name: str, folder: Path) -> Any:
    """The model that transformers loads from a folder, which has to have all of it and nothing else."""
    model, found = model_class(name).from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(found.values()), found
    return model
