"""Plans that models of transformers carry and that do not fit their forwards: right with rules that beat them."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.pipeline.oracle import adamw
from tests.engine.tensor.carried_models import tiny_model

_SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def gemma3n() -> nn.Module:
    """Takes mean and deviation of all hidden values, where the first layers are sparse."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # seconds, which to collect tests does not take

    settings: dict[str, Any] = {
        **{"vocab_size_per_layer_input": 41, "hidden_size_per_layer_input": 8, "num_hidden_layers": 4, "head_dim": 8},
        **{"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 4},
        **{"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "altup_num_inputs": 2},
    }
    config = CONFIG_MAPPING["gemma3n_text"](**{**_SIZES, **settings, "sliding_window": 8})
    model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def esmc() -> nn.Module:
    """Norms query and key over all heads."""
    from transformers import CONFIG_MAPPING, AutoModelForMaskedLM  # seconds, which to collect tests does not take

    config = CONFIG_MAPPING["esmc"](**{**_SIZES, "num_hidden_layers": 2, "num_key_value_heads": 4})
    model: nn.Module = AutoModelForMaskedLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def inkling() -> nn.Module:
    """Its plan is for gates and values that alternate, as in its checkpoints."""
    return tiny_model("inkling_text")


def doge() -> nn.Module:
    """Its plan cuts a map from whole values into heads by rows."""
    return tiny_model("doge")


def train(make: Callable[[], nn.Module], rules: Mapping[str, str], num_ranks: int) -> list[float]:
    torch.manual_seed(0)
    built = make().train()

    def on_rank(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(
            deepcopy(built),
            sw.Plan(mesh=sw.Mesh(tp=num_ranks), tensor=sw.Tensor(rules=rules if num_ranks > 1 else None)),
            optimizer=adamw,
            channel=channel,
        )
        words = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
        return [engine.step({"input_ids": words, "labels": words}).loss for _ in range(2)]

    losses: list[float] = sw.simulate(num_ranks, on_rank)[0]
    return losses


CASES: list[tuple[Callable[[], nn.Module], str, dict[str, str]]] = [
    (
        inkling,
        "'model.layers.0.mlp.experts' (InklingExperts) gives other numbers",
        {"*.gate_up_proj": "packed_colwise"},
    ),
    (gemma3n, "'model.layers.0.mlp' (Gemma3nTextMLP) gives other numbers", {"model.layers.[01].mlp.*": "replicate"}),
    (esmc, "'esmc.layers.0.self_attn' (EsmcAttention) fails when it is cut", {"*.self_attn.[qkvo]*": "replicate"}),
    (doge, "'model.layers.0.self_attn' (DogeAttention) fails when it is cut", {"*.self_attn": "replicate"}),
]


@pytest.mark.parametrize(("make", "said", "cure"), CASES, ids=[make.__name__ for make, _, _ in CASES])
def test_a_carried_plan_that_does_not_fit_is_refused_and_can_be_put_right(
    make: Callable[[], nn.Module], said: str, cure: Mapping[str, str]
) -> None:
    with pytest.raises(ModelError) as caught:
        train(make, {"*": "auto"}, 2)
    assert said in str(caught.value)
    # The norms and the loss of these models are computed in float32.
    assert train(make, {"*": "auto", **cure}, 2) == pytest.approx(train(make, {}, 1), rel=2e-6)


@pytest.mark.parametrize("model_type", ["lfm2", "lfm3"])
def test_a_tie_of_which_a_carried_plan_cuts_one_side_is_cut_on_both(model_type: str) -> None:
    def make() -> nn.Module:
        return tiny_model(model_type)

    assert train(make, {"*": "auto"}, 2) == pytest.approx(train(make, {}, 1), rel=2e-6)
