"""The models of the folders that Megatron wrote, and the batches that they were trained with."""

from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 13
"""Words there are; Megatron pads the matrix to `PADDED`."""
PADDED = 16
LENGTH = 6
"""Words of a row."""
ROWS = 12
"""Rows of a batch: each number of ranks gets as many."""
STEPS = 3
"""Updates before the save."""
MORE_STEPS = 3
"""Updates after it, whose losses are in the reference."""

LR, DECAY = 1e-2, 0.1

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 12,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "add_qkv_bias": True},
    "qwen3": {**LLAMA, "qk_layernorm": True, "kv_channels": 4},
    "mixtral": {**LLAMA, "num_moe_experts": 4, "moe_router_topk": 2},
    "qwen3_moe": {
        **LLAMA,
        "qk_layernorm": True,
        "kv_channels": 4,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 6,
    },
    "gpt": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "ffn_hidden_size": 20},
}
"""By name: what `TransformerConfig` gets."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a folder is written."""

    model: str
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    bf16: bool = False
    form: str = ""
    """Of the distributed optimizer: `distrib_optim_sharding_type`; "": the optimizer is not distributed."""
    metadata: tuple[str, ...] = ()
    """What else is true in the metadata of the save."""
    tied: bool = False
    kind: str = "torch_dist"
    """`legacy`: as mp_rank_* folders."""
    te_names: bool = False
    """Whether the norm of a layer of experts has the name that it has with Transformer Engine."""
    version: str = "0.16"
    """Of megatron-core; `write` has the calls of 0.16."""


CASES = {
    "gpt-1": Case(model="gpt", tied=True),
    "llama-1": Case(model="llama"),
    "llama-bf16-2-tp": Case(model="llama", ranks=2, tp=2, bf16=True),
    "llama-bf16-2-fully-reshardable": Case(model="llama", ranks=2, bf16=True, form="fully_reshardable"),
    "llama-bf16-3-dp-reshardable": Case(model="llama", ranks=3, bf16=True, form="dp_reshardable"),
    "llama-4-tp-model-space": Case(model="llama", ranks=4, tp=2, form="fully_sharded_model_space", version="0.12"),
    "gpt-bf16-2-model-space": Case(
        model="gpt", ranks=2, bf16=True, form="fully_sharded_model_space", tied=True, version="0.15"
    ),
    "qwen2-2-pp": Case(model="qwen2", ranks=2, pp=2, form="fully_reshardable"),
    "qwen3-4-tp-pp": Case(
        model="qwen3", ranks=4, tp=2, pp=2, form="fully_reshardable", metadata=("singleton_local_shards",)
    ),
    "mixtral-2-ep": Case(model="mixtral", ranks=2, ep=2, te_names=True),
    "qwen3_moe-1": Case(model="qwen3_moe", metadata=("singleton_local_shards",)),
    "legacy-qwen3-4-tp-pp": Case(model="qwen3", ranks=4, tp=2, pp=2, kind="legacy"),
    "legacy-gpt-1": Case(model="gpt", tied=True, kind="legacy"),
}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The whole batch of an update."""
    generator = torch.Generator().manual_seed(100 + step)
    words = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return {"input": words[:, :-1].contiguous(), "target": words[:, 1:].contiguous()}
