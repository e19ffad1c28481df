"""Models that generate, plans for them, and what a plain program gets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.engine.channels import GoesOnAlone
from tests.engine.pipeline.transformers_models import DECODER, sentences
from tests.oracle.program import seeded

SHORT: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 2}


def llama() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    sizes = {**DECODER, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return seeded(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)))().double()


def prompts(seed: int = 0, rows: int = 3) -> dict[str, torch.Tensor]:
    """[rows, 5] tokens, some padded on the left."""
    batch = sentences(seed)
    return {name: batch[name].flip(1)[:rows].contiguous() for name in ("input_ids", "attention_mask")}


def in_one_process(model: nn.Module, inputs: Any, seed: int = 7, **kwargs: Any) -> torch.Tensor:
    """What a plain program gets."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens: torch.Tensor = model.eval().generate(**inputs, **SHORT, **kwargs)  # type: ignore[operator]
        return tokens


def under(plan: sw.Plan, model: nn.Module, channel: sw.Channel) -> sw.Engine:
    return sw.parallelize(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), channel=channel)


def named(value: Any) -> str:
    if isinstance(value, sw.Plan):
        return f"{value.mesh} {value.sharding.stage}"
    if isinstance(value, str):
        return value
    return value.__name__ if callable(value) else " ".join(value) if isinstance(value, tuple) else str(value)


def mesh(text: str, stage: int = 1, *, tp: bool = False) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh.parse(text),
        sharding=sw.Sharding(stage=3, bucket_bytes=4000) if stage == 3 else sw.Sharding(stage=stage),
        tensor=sw.Tensor(rules="auto" if tp else None),
    )


class Apart(GoesOnAlone):
    """No rank can read what another has: all must gather together."""

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return Apart(super().over(ranks))

    def share(self, num_bytes: int) -> None:
        return None
