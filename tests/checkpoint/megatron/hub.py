"""The models of the folders that Megatron wrote, as transformers has them, and the rewrites between both."""

from typing import Any

from shardwise.rewrite import Rewrite, shipped
from tests.checkpoint.megatron.cases import MODELS, PADDED

REWRITES = {
    "llama": "megatron-llama",
    "qwen2": "megatron-llama",
    "qwen3": "megatron-llama",
    "mixtral": "megatron-mixtral",
    "qwen3_moe": "megatron-qwen-moe",
    "gpt": "megatron-gpt2",
}


def rewrite_of(model: str) -> Rewrite:
    """To the names of transformers."""
    heads = {"n_head": 4} if model == "gpt" else {"num_attention_heads": 4, "num_key_value_heads": 2}
    return shipped(REWRITES[model], parameters=heads)


def configuration(model: str) -> Any:
    """The configuration of transformers for a model of Megatron."""
    import transformers

    of = MODELS[model]
    sizes: dict[str, Any] = {"vocab_size": PADDED}
    if model == "gpt":
        names = {"n_embd": "hidden_size", "n_inner": "ffn_hidden_size", "n_layer": "num_layers"}
        sizes |= {ours: of[theirs] for ours, theirs in names.items()} | {"n_head": 4, "n_positions": 6}
        dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(**sizes, **dropouts, activation_function="gelu")
    sizes |= {"hidden_size": of["hidden_size"], "intermediate_size": of["ffn_hidden_size"]}
    sizes |= {"num_hidden_layers": of["num_layers"], "num_attention_heads": of["num_attention_heads"]}
    sizes |= {"num_key_value_heads": of["num_query_groups"], "head_dim": of.get("kv_channels", 2)}
    experts: dict[str, Any] = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": of.get("moe_ffn_hidden_size")},
            "norm_topk_prob": True,
        },
    }
    more = {**experts.get(model, {}), "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return transformers.AutoConfig.for_model(model, **sizes, **more)


def untrained(model: str) -> Any:
    """A model of transformers."""
    import transformers

    maker: Any = transformers.AutoModelForCausalLM
    return maker.from_config(configuration(model))
