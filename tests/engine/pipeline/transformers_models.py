"""Models of transformers with tiny random configs, otherwise as their users have them."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.oracle.program import Program, seeded

VOCABULARY = 37
ROWS = 8
"""Even microbatches where k divides it: what a stage infers of modules elsewhere, it infers for each shape."""

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def sentences(seed: int, *, padded: bool = True, length: int = 5) -> dict[str, torch.Tensor]:
    """[ROWS, length] tokens; every third sentence is padded, so that only some microbatches have padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[seed % 3 :: 3, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def masked_words(seed: int) -> dict[str, torch.Tensor]:
    """Every second token is to be guessed."""
    batch = sentences(seed)
    labels = batch["labels"].clone()
    labels[:, ::2] = -100
    return {**batch, "labels": labels}


def inputs_and_labels(seed: int) -> dict[str, torch.Tensor]:
    """[ROWS, 8] tokens under the name that Perceiver has for them."""
    batch = sentences(seed, length=8)
    return {"inputs": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": batch["labels"]}


def images(seed: int) -> dict[str, torch.Tensor]:
    """[ROWS, 3, 8, 8] pictures of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator),
        "labels": torch.randint(0, 3, (ROWS,), generator=generator),
    }


def _model(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Copies of one model: to build it, with first values that nobody keeps, takes longer."""
    import transformers as tf  # seconds: neither to collect tests takes them, nor a rank while others wait

    built: nn.Module = seeded(lambda: getattr(tf, kind)(getattr(tf, config)(**settings)).train())()
    return lambda: deepcopy(built)


Maker = Callable[..., Callable[[], nn.Module]]


def _maker(kind: str, config: str, **sizes: Any) -> Maker:
    return lambda **settings: _model(kind, config, **sizes, **settings)


_WORDS: dict[str, Any] = {"vocab_size": VOCABULARY}
_FOUR: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
_ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
_BARE = {name: size for name, size in DECODER.items() if name != "num_key_value_heads"}
_GPT2 = {**_WORDS, **_ENDS, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
_EXPERTS = {"head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
_SIDE = {"layers": 2, "ffn_dim": 24, "attention_heads": 2}
_SIDES = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _SIDE.items()}
_CHANNELS = dict.fromkeys(("d_latents", "d_model", "qk_channels", "v_channels", "max_position_embeddings"), 8)
_CROSS = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "num_self_attends_per_block": 2}

llama = _maker("LlamaForCausalLM", "LlamaConfig", **DECODER)
gpt2 = _maker("GPT2LMHeadModel", "GPT2Config", **_GPT2)
bert = _maker("BertForMaskedLM", "BertConfig", **_BARE)

MAKERS: dict[str, Maker] = {
    "llama": llama,
    "gpt2": _maker(
        "GPT2LMHeadModel", "GPT2Config", **_GPT2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ),
    "gpt2 with dropout": gpt2,
    "qwen3": _maker("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8),
    "gemma3": _maker(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **DECODER,
        **{"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mixtral": _maker("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4, output_router_logits=True),
    "qwen3-moe": _maker("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **DECODER, **_EXPERTS, output_router_logits=True),
    "falcon": _maker("FalconForCausalLM", "FalconConfig", **_WORDS, **_FOUR, **_ENDS),
    "t5": _maker(
        "T5ForConditionalGeneration",
        "T5Config",
        **{**_WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        **{"decoder_start_token_id": 0, "dropout_rate": 0.0},
    ),
    "bart": _maker(
        "BartForConditionalGeneration",
        "BartConfig",
        **{**_WORDS, **_SIDES, "d_model": 16, "max_position_embeddings": 32, "dropout": 0.0},
    ),
    "bert": _maker("BertForMaskedLM", "BertConfig", **_BARE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "bert with dropout": bert,
    "vit": _maker(
        "ViTForImageClassification",
        "ViTConfig",
        **{**_FOUR, "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
    "mamba": _maker("MambaForCausalLM", "MambaConfig", **_WORDS, hidden_size=16, num_hidden_layers=4, state_size=4),
    # Two stacks of layers that take turns, the first turns under `no_grad`.
    "hrm": _maker(
        "HrmTextForCausalLM",
        "HrmTextConfig",
        **{**_WORDS, **_FOUR, "intermediate_size": 32, "head_dim": 8, "num_layers_per_stack": 1, "use_cache": False},
        L_cycles=2,
    ),
    # Its head is a module that is given the embedding, on another stage, and multiplies by its weight.
    "perceiver": _maker(
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        **{**_WORDS, **_CHANNELS, **_CROSS, "num_latents": 4, "num_blocks": 1, "attention_probs_dropout_prob": 0.0},
    ),
}

LLAMA_STAGES = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.layers.2": 2,
    "model.layers.3": 3,
    "model.norm": 3,
    "lm_head": 3,
}

T5_STAGES = {
    "shared": 0,
    "encoder.embed_tokens": 0,
    "decoder.embed_tokens": 0,
    "lm_head": 0,
    "encoder.block.0": 0,
    "encoder.block.1": 1,
    "encoder.final_layer_norm": 1,
    "decoder.block.0": 2,
    "decoder.block.1": 3,
    "decoder.final_layer_norm": 3,
}
"""Embeddings and head are one parameter, which lies on stage 0: the last stage's output goes back there."""

STAGES = {
    "llama": LLAMA_STAGES,
    "t5": T5_STAGES,
    "t5 apart": {**T5_STAGES, "decoder.embed_tokens": 2, "lm_head": 3},
}
"""`t5 apart`: each use of its one embedding is on a stage of its own."""

_BATCHES: dict[str, Any] = {
    "vit": images,
    "bert": masked_words,
    "bert with dropout": masked_words,
    "perceiver": inputs_and_labels,
}


def batches_of(name: str) -> list[dict[str, torch.Tensor]]:
    """Two batches for the model `name`."""
    return [_BATCHES.get(name, sentences)(seed) for seed in range(2)]


@cache
def case_of(name: str, *, tied: bool | None = None, cut: str = "", checkpointing: bool = False) -> Program:
    """The model `name`; `tied`: whether its head has the embedding's weight, None for the config's own answer.

    cut: by which names in `STAGES`; else balanced.
    """
    make = MAKERS[name](**({} if tied is None else {"tie_word_embeddings": tied}))

    def make_checkpointing() -> nn.Module:
        model: Any = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions have a second name for it
            model.gradient_checkpointing_enable()
        return model  # type: ignore[no-any-return]

    return Program(
        make=make_checkpointing if checkpointing else make,
        batches=batches_of(name),
        stages=STAGES[cut] if cut else None,
    )
