"""The calls that the example scripts of transformers make of a Trainer, with tiny models and rows made here.

Each task follows one script: its class of model, collator, metric and arguments, without what reads files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import shardwise as sw
from shardwise import hf

PLANS = {
    "dp_shard=2, stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp=2": sw.Plan(mesh=sw.Mesh(pp=2)),
    "tp=2": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
}
_WORDS = ["[PAD]", "[MASK]", "[EOS]", *(f"w{n}" for n in range(29))]
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
_BERT = _SIZES | {"vocab_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a script gives to its Trainer."""

    build: Callable[[], Any]
    rows: list[dict[str, Any]]
    collator: Callable[[Any], Any]
    """Of the model."""
    metrics: Callable[[Any], dict[str, float]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    preprocess: Callable[[Any, Any], Any] | None = None
    is_seq2seq: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What two runs are compared by."""

    losses: list[float]
    evaluations: list[dict[str, float]]
    predictions: Any
    weights: dict[str, torch.Tensor]


def outcome(
    task: Task, folder: Path, plan: sw.Plan | None = None, channel: sw.Channel | None = None, **changed: Any
) -> Outcome:
    """Train, evaluate in between, predict: on plain transformers, or with the one changed import and a plan.

    changed: of the arguments; `resume` is the checkpoint to go on from.
    """
    library: Any = transformers if plan is None else hf
    ranks = 1 if plan is None else plan.mesh.num_data_ranks
    resume = changed.pop("resume", None)
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        # The microbatches of one process, shared among the data ranks.
        "gradient_accumulation_steps": 2 // ranks,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        # Biases of keys have a gradient of 0 but for rounding, which Adam would make as large as any other.
        "adam_epsilon": 1e-4,
        "disable_tqdm": True,
        **task.arguments,
        **changed,
    }
    arguments = library.Seq2SeqTrainingArguments if task.is_seq2seq else library.TrainingArguments
    model = task.build()
    trainer = (library.Seq2SeqTrainer if task.is_seq2seq else library.Trainer)(
        model=model,
        args=arguments(**settings),
        train_dataset=task.rows[:22],
        eval_dataset=task.rows[22:],
        data_collator=task.collator(model),
        compute_metrics=task.metrics,
        preprocess_logits_for_metrics=task.preprocess,
        **({} if plan is None else {"plan": plan, "channel": channel}),
    )
    trainer.train(resume_from_checkpoint=resume)
    predictions = trainer.predict(task.rows[22:]).predictions
    history = trainer.state.log_history
    return Outcome(
        losses=[each["loss"] for each in history if "loss" in each],
        evaluations=[_metrics_in(each) for each in history if "eval_loss" in each],
        predictions=predictions,
        weights=_weights(trainer, plan),
    )


def _metrics_in(logs: dict[str, float]) -> dict[str, float]:
    return {name: each for name, each in logs.items() if "second" not in name and "runtime" not in name}


def _weights(trainer: Any, plan: sw.Plan | None) -> dict[str, torch.Tensor]:
    if plan is None:
        return dict(trainer.model.state_dict())
    with trainer.engine.whole(optimizer=False):
        return {name: each.clone() for name, each in trainer.model.state_dict().items()}


@cache
def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(_WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]", eos_token="[EOS]"
    )


def _sentences(num: int = 29) -> list[list[int]]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, 32, numbers.integers(3, 9)).tolist() for _ in range(num)]


def _seeded(build: Callable[[], Any]) -> Callable[[], Any]:
    def seeded() -> Any:
        torch.manual_seed(0)
        return build()

    return seeded


def _right(prediction: Any) -> dict[str, float]:
    """The share of right labels, as the scripts count them."""
    found = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    found = found.argmax(-1) if found.ndim > prediction.label_ids.ndim else found
    counts = prediction.label_ids != -100
    return {"accuracy": float((found == prediction.label_ids)[counts].mean())}


def _tokens(prediction: Any) -> dict[str, float]:
    found = np.where(prediction.predictions == -100, 0, prediction.predictions)
    return {"tokens": float((found * np.arange(1, found.shape[1] + 1)).sum())}


def causal_language_model() -> Task:
    """run_clm.py: blocks of one length, argmax before metrics are gathered."""
    config = transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, **_SIZES)
    rows = [{"input_ids": (tokens * 8)[:8], "labels": (tokens * 8)[:8]} for tokens in _sentences()]
    return Task(
        build=_seeded(lambda: transformers.LlamaForCausalLM(config)),
        rows=rows,
        collator=lambda model: transformers.default_data_collator,
        metrics=_right,
        preprocess=lambda logits, labels: logits.argmax(dim=-1),
    )


def masked_language_model() -> Task:
    """run_mlm.py: masks drawn by the collator."""
    config = transformers.BertConfig(max_position_embeddings=16, **_BERT)
    return Task(
        build=_seeded(lambda: transformers.BertForMaskedLM(config)),
        rows=[{"input_ids": tokens} for tokens in _sentences()],
        collator=lambda model: transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.3, seed=5),
        metrics=_right,
        preprocess=lambda logits, labels: logits.argmax(dim=-1),
    )


def sequence_to_sequence() -> Task:
    """run_translation.py: label smoothing, and predictions that the model generates."""
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0, eos_token_id=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Task(
        build=_seeded(lambda: transformers.T5ForConditionalGeneration(config)),
        rows=[{"input_ids": tokens, "labels": tokens[::-1]} for tokens in _sentences()],
        collator=lambda model: transformers.DataCollatorForSeq2Seq(tokenizer(), model=model),
        metrics=_tokens,
        arguments={
            "predict_with_generate": True,
            "generation_max_length": 6,
            "generation_num_beams": 2,
            "label_smoothing_factor": 0.1,
        },
        is_seq2seq=True,
    )


def image_classification() -> Task:
    """run_image_classification.py: rows with columns that the collator reads, and forward does not name."""
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_SIZES
    )
    numbers = torch.Generator().manual_seed(0)
    return Task(
        build=_seeded(lambda: transformers.ViTForImageClassification(config)),
        rows=[{"image": torch.randn(3, 8, 8, generator=numbers) + n % 3, "label": n % 3} for n in range(29)],
        collator=lambda model: (
            lambda rows: {
                "pixel_values": torch.stack([row["image"] for row in rows]),
                "labels": torch.tensor([row["label"] for row in rows]),
            }
        ),
        metrics=_right,
        arguments={"remove_unused_columns": False},
    )


def token_classification() -> Task:
    """run_ner.py: rows of unlike length, whose logits are padded when they are gathered."""
    config = transformers.BertConfig(max_position_embeddings=16, num_labels=3, **_BERT)
    return Task(
        build=_seeded(lambda: transformers.BertForTokenClassification(config)),
        rows=[{"input_ids": tokens, "labels": [token % 3 for token in tokens]} for tokens in _sentences()],
        collator=lambda model: transformers.DataCollatorForTokenClassification(tokenizer()),
        metrics=_right,
    )


TASKS = {
    each.__name__: each
    for each in (
        causal_language_model,
        masked_language_model,
        sequence_to_sequence,
        image_classification,
        token_classification,
    )
}
