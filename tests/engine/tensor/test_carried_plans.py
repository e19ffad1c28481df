"""The plans that models of transformers carry: every style that some of them has, against the whole model."""

from collections.abc import Mapping

import pytest

from tests.engine.tensor.carried_models import loss_of, tiny_model
from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole

# The models compute in float32 here and there (norms, softmax, the loss), whatever they are given.
FLOAT32_INSIDE = 2e-6


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen3",  # a norm of each head
        "gemma2",  # an embedding that scales, a tie
        "phi3",  # everything gathered
        "gpt_neox",  # query, key and value of a head side by side
        "glm",
        "olmo2",  # a norm of all heads
        "mixtral",
        "flex_olmo",
        "aria_text",  # experts whose weights are (inputs, outputs)
        "llama4_text",
        "granite_swa",  # a sink per head
        "nemotron_h",
        "deepseek_v3",
        "hy_v4",  # compressed keys, of which every head reads a part
        "longcat_flash",  # experts that do nothing
    ],
)
def test_a_carried_plan_gives_what_the_whole_model_gives(model_type: str) -> None:
    got = compute_cut(lambda: tiny_model(model_type), "auto", 2, loss_of)
    expected = compute_whole(lambda: tiny_model(model_type), loss_of)
    assert_close(got, expected, relative=FLOAT32_INSIDE, floor=1e-3)


@pytest.mark.parametrize(
    ("model_type", "rules"),
    [
        # Activations with parameters between columns and rows: the plan says nothing of them.
        ("apertus", {"*": "auto"}),
        # The plan cuts gates from what they gate.
        ("inkling_text", {"*": "auto", "*.mlp.experts.gate_up_proj": "packed_colwise"}),
        # No plan: projections side by side in one transposed weight, heads counted by attributes, biases of heads.
        (
            "gpt2",
            {
                **{"*.c_attn": "column(parts=3)", "*.attn": "heads(attributes=num_heads+split_size)"},
                **{"*.attn.c_proj": "row", "*.c_fc": "column", "*.mlp.c_proj": "row", "transformer.wte": "vocab"},
                "lm_head": "vocab",
            },
        ),
        ("llama", {"*": "auto", "lm_head": "replicate", "model.embed_tokens": "embedding_colwise"}),
    ],
)
def test_what_a_carried_plan_lacks_is_found_out_or_added(model_type: str, rules: Mapping[str, str]) -> None:
    got = compute_cut(lambda: tiny_model(model_type), rules, 2, loss_of, is_completed=True)
    expected = compute_whole(lambda: tiny_model(model_type), loss_of)
    assert_close(got, expected, relative=FLOAT32_INSIDE, floor=1e-3)
