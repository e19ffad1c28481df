"""Models of transformers on every axis at once, with the plan that they carry: what one process gives.

float64: what is left of a difference is the order of sums (see `test_compose`).
"""

from typing import Any

import pytest
from torch import nn

import shardwise as sw
from tests.engine.expected import seeded
from tests.engine.hybrid_models import assert_close, in_one_process, train
from tests.engine.pipeline.oracle import Case
from tests.engine.pipeline.transformers_models import DECODER, sentences

SMALL = {**DECODER, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"moe_intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


def case_of(kind: str, **settings: Any) -> Case:
    def make() -> nn.Module:
        import transformers as tf  # seconds, which to collect tests does not take

        config = getattr(tf, f"{kind}Config")(**{**SMALL, **settings})
        model = getattr(tf, f"{kind}ForCausalLM")(config)
        if "num_experts" in settings:
            model.set_experts_implementation("eager")  # the other one has no float64
        return model.double().train()  # type: ignore[no-any-return]

    return Case(make=seeded(make), batches=[sentences(seed) for seed in range(2)])


@pytest.mark.parametrize(
    ("case", "mesh", "stage"),
    [
        (case_of("Llama"), "pp=2,dp_shard=2,tp=2", 3),
        (case_of("Llama", tie_word_embeddings=True), "pp=2,tp=2", 1),
        (case_of("Qwen3"), "pp=2,tp=2", 1),
        (case_of("Qwen3Moe", **EXPERTS), "dp_shard=2,tp=2", 3),
    ],
    ids=["llama", "llama tied", "qwen3", "qwen3 moe"],
)
def test_a_model_trains_as_in_one_process(case: Case, mesh: str, stage: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=8000),
        merge=sw.Merge(microbatches=2),
        tensor=sw.Tensor(rules="auto"),
        clip_grad_norm=0.5,
    )
    wanted = in_one_process(case, plan)  # first: it imports the library, and no rank waits
    assert_close(train(case, plan), wanted, relative=1e-9)
