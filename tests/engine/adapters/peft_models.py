"""Tiny models of transformers with adapters of peft, their batches, and the plans that they are trained under."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

import shardwise as sw
from tests.oracle.places import data_share
from tests.oracle.program import Program, adamw

WORDS, WIDTH, ROWS = 16, 8, 4
Batch = Mapping[str, torch.Tensor]


def _of_transformers() -> Any:
    return import_module("transformers")  # seconds, which to collect tests does not take


_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": WIDTH, "intermediate_size": 12}


def llama() -> Any:
    return _of_transformers().LlamaForCausalLM(
        _of_transformers().LlamaConfig(**_SIZES, vocab_size=WORDS, num_key_value_heads=2, use_cache=False)
    )


def gpt2() -> Any:
    """Conv1D holds weights the other way round, queries, keys and values in one; the head is tied to the embedding."""
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 16, "n_inner": 12}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _of_transformers().GPT2LMHeadModel(
        _of_transformers().GPT2Config(**sizes, **dropouts, vocab_size=WORDS, use_cache=False)
    )


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 2, "d_ff": 12, "num_layers": 2, "num_heads": 4}
    return _of_transformers().T5ForConditionalGeneration(
        _of_transformers().T5Config(
            **sizes, vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False
        )
    )


def bert() -> Any:
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return _of_transformers().BertForSequenceClassification(
        _of_transformers().BertConfig(**_SIZES, **dropouts, vocab_size=WORDS, max_position_embeddings=16)
    )


BUILDERS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "t5": t5, "bert": bert}

_TASKS = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": "SEQ_CLS"}

_QUERIES = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"], "bert": ["query", "value"]}

_EMBEDDINGS = {"llama": "embed_tokens", "gpt2": "wte", "t5": "shared", "bert": "word_embeddings"}

_WHOLE = {"llama": "lm_head", "gpt2": "wte", "t5": "lm_head", "bert": "pooler"}


def config(model: str, kind: str) -> Any:
    """The configuration of a kind of adapter, whose adapters are not the identity."""
    from peft import IA3Config, LoraConfig, OFTConfig, PromptTuningConfig, VeraConfig

    common: dict[str, Any] = {"r": 3, "target_modules": _QUERIES[model], "init_lora_weights": False}
    common |= {"task_type": _TASKS[model], "fan_in_fan_out": model == "gpt2"}
    match kind:
        case "lora":
            return LoraConfig(**common)
        case "everywhere":
            pattern = {_QUERIES[model][0]: 2}
            return LoraConfig(**{**common, "target_modules": "all-linear"}, use_rslora=True, rank_pattern=pattern)
        case "dora":
            return LoraConfig(**{**common, "target_modules": "all-linear"}, use_dora=True)
        case "bias":
            return LoraConfig(**common, lora_bias=True)
        case "whole":
            return LoraConfig(**common, modules_to_save=[_WHOLE[model]])
        case "tokens":
            return LoraConfig(**common, trainable_token_indices={_EMBEDDINGS[model]: [6, 7]})
        case "embedding":
            return LoraConfig(**{**common, "target_modules": [*_QUERIES[model], _EMBEDDINGS[model]]})
        case "ia3":
            return IA3Config(task_type=_TASKS[model], init_ia3_weights=False)
        case "rotation":  # merged with indices in buffers that are in no file
            return OFTConfig(r=2, oft_block_size=0, target_modules=_QUERIES[model], init_weights=False)
        case "shared":  # one pair of buffers for all modules
            return VeraConfig(r=3, target_modules=[_QUERIES[model][0]], init_weights=False)
        case "prompt":
            return PromptTuningConfig(task_type=_TASKS[model], num_virtual_tokens=2)
    raise AssertionError(kind)


def base(model: str) -> Any:
    """The model without adapters, in double precision: what differs then is wrong, and not rounded."""
    torch.manual_seed(0)
    return BUILDERS[model]().double()


def adapted(model: str, kind: str) -> Any:
    from peft import get_peft_model

    made = base(model)
    torch.manual_seed(1)
    return get_peft_model(made, config(model, kind)).double()


def batch(model: str, *, num_rows: int = ROWS, seed: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(5, WORDS, (num_rows, 5), generator=generator)
    classes = torch.randint(0, 2, (num_rows,), generator=generator)
    return {"input_ids": words, "labels": classes if model == "bert" else words}


AUTO = sw.Tensor(rules="auto")
LAYOUTS = {
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=2)),
    "stage 2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2, partition="whole")),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=AUTO),
    "all": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2, tp=2), merge=sw.Merge(microbatches=2), tensor=AUTO),
}


def program(model: str, kind: str) -> Program:
    """Its loss is in float32, whatever it computes in."""
    return Program(make=lambda: adapted(model, kind).train(), batches=[batch(model)] * 2)


def engine_of(channel: sw.Channel, model: Any, plan: sw.Plan, **settings: Any) -> sw.Engine:
    """Trained by AdamW over all parameters, as most programs do: frozen ones never have a gradient."""
    return sw.parallelize(model.train(), plan, optimizer=adamw, channel=channel, **settings)


def step(engine: sw.Engine, given: Batch, plan: sw.Plan, channel: sw.Channel) -> float:
    """The loss of a step on the share of the rank."""
    return engine.step(data_share(given, plan.mesh, channel.rank)).loss


def logits(model: Any, name: str) -> torch.Tensor:
    """Of the batch, in evaluation."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**batch(name)).logits
    return found
