"""Models of transformers with tiny configs, and adapters of peft on them: programs as their users have them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.engine.adapters import peft_models
from tests.engine.pipeline.transformers_models import DECODER, MAKERS, STAGES, batches_of, case_of, sentences
from tests.oracle.batches import Batch
from tests.oracle.program import Program, adamw, seeded

TIED = ("llama", "gpt2", "falcon", "t5", "bart", "bert", "mamba")
"""Also with a head that has the embedding's weight."""


def made(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """The model, which is built when it is wanted: the package takes seconds."""
    return lambda: case_of(name, **settings).make()


SMALL = {**DECODER, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"moe_intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


def small(kind: str, **settings: Any) -> Program:
    """A decoder whose heads two ranks share, with the plan that it carries; float64."""

    def make() -> nn.Module:
        import transformers as tf

        config = getattr(tf, f"{kind}Config")(**{**SMALL, **settings})
        model = getattr(tf, f"{kind}ForCausalLM")(config)
        if "num_experts" in settings:
            model.set_experts_implementation("eager")  # the other one has no float64
        return model.double().train()  # type: ignore[no-any-return]

    batches = [sentences(seed) for seed in range(2)]
    return Program(make=seeded(make), batches=batches, rules="auto", relative=1e-9)


def adapted(model: str, kind: str) -> Program:
    """With adapters of peft; the loss of transformers is in float32."""
    return Program(
        make=lambda: peft_models.adapted(model, kind).train(),
        batches=[peft_models.batch(model, num_rows=8, seed=seed) for seed in range(2)],
        optimizer=adamw,
        rules="auto",
        relative=1e-5,
    )


def compiled() -> nn.Module:
    """A layer of it is compiled."""
    model: Any = made("qwen3", tied=False)()
    model.model.layers[1].compile(backend="eager")
    return model  # type: ignore[no-any-return]


def telling_all() -> nn.Module:
    """It gives the hidden states and attentions of all layers."""
    everything = {"output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}
    return MAKERS["bert"](tie_word_embeddings=False, **everything)()


def loss_of_every_layer(output: Any, batch: Batch) -> torch.Tensor:
    """The model's own loss, hidden states and attentions of all layers."""
    loss: torch.Tensor = output.loss + 0.01 * output.attentions[1].square().sum()
    for hidden in output.hidden_states:
        loss = loss + 0.01 * hidden.square().mean()
    return loss


def loss_of_a_tuple(output: Any, batch: Batch) -> torch.Tensor:
    """Of an output without names."""
    loss: torch.Tensor = output[0]
    return loss


CARRIED: Mapping[str, Program] = {
    "llama, cut": small("Llama"),
    "llama tied, cut": small("Llama", tie_word_embeddings=True),
    "qwen3, cut": small("Qwen3"),
    "qwen3-moe, cut": small("Qwen3Moe", **EXPERTS),
    "llama with lora": adapted("llama", "lora"),
    "gpt2 with lora everywhere": adapted("gpt2", "everywhere"),
    "llama with dora": adapted("llama", "dora"),
}

TRANSFORMERS: Mapping[str, Program] = {
    **{
        name: Program(
            make=made(name, tied=None if name in ("vit", "t5") else False),
            batches=batches_of(name),
            draws="dropout" in name,
        )
        for name in MAKERS
    },
    **{f"{name} tied": Program(make=made(name, tied=True), batches=batches_of(name)) for name in TIED},
    **{
        f"{name} again": Program(
            make=made(name, tied=False, checkpointing=True), batches=batches_of(name), draws="dropout" in name
        )
        for name in ("llama", "gpt2 with dropout", "bert")
    },
    **{
        f"{cut} by names": Program(make=made(cut.split()[0]), batches=batches_of(cut), stages=stages)
        for cut, stages in STAGES.items()
    },
    "qwen3 in tuples": Program(
        make=made("qwen3", tied=False),
        batches=[{**each, "return_dict": False} for each in batches_of("qwen3")],
        loss=loss_of_a_tuple,
    ),
    "llama of other lengths": Program(
        make=made("llama"), batches=[sentences(seed, length=4 + seed % 3, padded=seed != 1) for seed in range(3)]
    ),
    "qwen3 with a compiled layer": Program(make=compiled, batches=[sentences(seed, padded=False) for seed in range(2)]),
    "bert with all layers": Program(
        make=telling_all, batches=batches_of("llama"), loss=loss_of_every_layer, has_order=False
    ),
}
