"""Tiny models of transformers that carry a plan of tensor parallelism."""

from typing import Any

import torch
from torch import nn

_SMALL = {
    **{"vocab_size": 41, "hidden_size": 32, "num_hidden_layers": 2, "num_layers": 2, "max_position_embeddings": 64},
    **{"intermediate_size": 48, "ffn_hidden_size": 48, "intermediate_size_mlp": 48, "moe_intermediate_size": 12},
    **{"expert_ffn_hidden_size": 12, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "moe_topk": 2, "moe_num_experts": 4, "n_group": 1, "topk_group": 1},
    **{"n_shared_experts": 1, "moe_num_shared_experts": 1, "zero_expert_num": 2, "first_k_dense_replace": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "sliding_window": 8},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "mamba_num_heads": 4, "mamba_head_dim": 16},
    **{"ssm_state_size": 8, "n_groups": 1, "chunk_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Small values of what configurations have; each takes those that it knows."""


def tiny_model(model_type: str) -> nn.Module:
    """A model of this type with two layers, or one of each kind of layer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # seconds, which to collect tests does not take

    kind = CONFIG_MAPPING[model_type]
    standard: Any = kind()
    settings: dict[str, Any] = {key: value for key, value in _SMALL.items() if hasattr(standard, key)}
    if hasattr(standard, "kv_lora_rank"):
        settings["num_key_value_heads"] = 4  # what is compressed is expanded to as many heads as queries have
    for key in ("layer_types", "mlp_layer_types"):
        if listed := getattr(standard, key, None):
            kinds = list(dict.fromkeys(listed))
            settings["num_hidden_layers"] = max(2, len(kinds))
            settings[key] = (kinds * 2)[: settings["num_hidden_layers"]]
    config = kind(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    made: nn.Module = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    return made


def loss_of(model: nn.Module) -> torch.Tensor:
    """The model's own loss on a few tokens."""
    words = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    loss: torch.Tensor = model(input_ids=words, labels=words, use_cache=False).loss
    return loss.reshape(1)
