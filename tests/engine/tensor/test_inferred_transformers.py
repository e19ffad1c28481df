"""`rules="auto"` for models of transformers that carry no plan, against one process."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.tensor.rule_inference import sample_for

# The models compute in float32 here and there (norms, softmax, rotations), whatever they are given.
FLOAT32_INSIDE = 2e-6

TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
PARTS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WIDE = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("AutoModelForCausalLM", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "opt": ("AutoModelForCausalLM", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 16}),
    "bloom": ("AutoModelForCausalLM", {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "falcon": ("AutoModelForCausalLM", {**TEXT, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gptj": ("AutoModelForCausalLM", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
    ),
    "bart": ("AutoModelForSeq2SeqLM", {"vocab_size": 40, **WIDE, **PARTS, "max_position_embeddings": 16}),
    "bert": ("AutoModelForMaskedLM", {**TEXT, "intermediate_size": 24, "max_position_embeddings": 16}),
    "vit": ("AutoModel", {**TEXT, "intermediate_size": 24, "image_size": 8, "patch_size": 4}),
    "whisper": (
        "AutoModel",
        {"vocab_size": 40, **WIDE, **PARTS, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
    "wav2vec2": (
        "AutoModel",
        {**TEXT, "intermediate_size": 24, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
        | {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    ),
}


def tiny(kind: str) -> nn.Module:
    """A model of random values, none of which is zero or one for all."""
    import transformers as tf  # seconds, which to collect tests does not take

    torch.manual_seed(0)
    auto, settings = MODELS[kind]
    config = tf.CONFIG_MAPPING[kind](**settings)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    config.apply_spec_augment = False
    model: nn.Module = getattr(tf, auto).from_config(config).double()
    # Newer versions of transformers carry plans for more models. These tests infer them.
    for each_module in model.modules():
        vars(each_module).update(_tp_plan={})
        if (inner := getattr(each_module, "config", None)) is not None:
            inner.base_model_tp_plan = None
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.05)
    return model


def trained(kind: str, num_ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Losses and parameters after two updates; the rules."""
    built = tiny(kind)

    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        model = deepcopy(built)
        batch = sample_for(model)
        assert batch is not None
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=sw.Mesh(tp=num_ranks), tensor=sw.Tensor(rules="auto" if num_ranks > 1 else None)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            loss=lambda output, _: next(iter(output.values())).double().square().mean(),
            channel=channel,
        )
        losses = [engine.step(batch).loss for _ in range(2)]
        values = {name: value.clone() for name, value in sw.full(engine)}
        return values | {"losses": torch.tensor(losses)}, dict(engine.tensor_decision.inferred)

    return sw.simulate(num_ranks, run)[0]


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("gpt2", {"transformer.h.1.attn": "heads(attributes=embed_dim+num_heads+split_size, groups=4)"}),
        ("opt", {"model.decoder.layers.1.self_attn": "heads(attributes=num_heads, groups=4)"}),
        ("bloom", {"transformer.h.1.mlp.dense_4h_to_h": "row(groups=64)"}),
        ("falcon", {"transformer.h.1.self_attention.query_key_value": "column(groups=2)"}),
        ("gptj", {"transformer.h.1.attn.out_proj": "row(groups=4)", "lm_head": "vocab"}),
        ("t5", {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "column(groups=4)"}),
        ("bart", {"model.decoder.layers.0.encoder_attn.out_proj": "row(groups=4)"}),
        ("bert", {"bert.encoder.layer.1.attention.output.dense": "row(groups=4)"}),
        ("vit", {"layers.1.mlp.fc1": "column(groups=24)"}),
        ("whisper", {"encoder.layers.0.self_attn.q_proj": "column(groups=4)"}),
        ("wav2vec2", {"encoder.layers.1.attention.out_proj": "row(groups=4)"}),
    ],
)
def test_an_inferred_plan_gives_what_one_process_gives(kind: str, cut: dict[str, str]) -> None:
    values, rules = trained(kind, 2)
    expected, _ = trained(kind, 1)
    for name, value in expected.items():
        assert torch.allclose(values[name], value, rtol=FLOAT32_INSIDE, atol=FLOAT32_INSIDE), name
    assert cut.items() <= rules.items(), rules
