"""The calls that the example scripts of transformers make of a Trainer, with tiny models and rows made here.

Each task follows one script: its class of model, collator, metric and arguments, without what reads files.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from shardwise import hf
from tests.hf.tiny_trainers import Make

_WORDS = ["[PAD]", "[MASK]", "[EOS]", *(f"w{n}" for n in range(29))]
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}


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


def _right(prediction: Any) -> dict[str, float]:
    """The share of right labels, as the scripts count them."""
    found = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    found = found.argmax(-1) if found.ndim > prediction.label_ids.ndim else found
    counts = prediction.label_ids != -100
    return {"accuracy": float((found == prediction.label_ids)[counts].mean())}


def _tokens(prediction: Any) -> dict[str, float]:
    found = np.where(prediction.predictions == -100, 0, prediction.predictions)
    return {"tokens": float((found * np.arange(1, found.shape[1] + 1)).sum())}


def task(
    build: Callable[[], Any],
    rows: list[dict[str, Any]],
    collator: Callable[[Any], Any],
    metrics: Callable[[Any], dict[str, float]],
    **asked: Any,
) -> Make:
    """Trainers of a script. collator: of the model. Others are arguments of the Trainer."""
    kind = "Seq2Seq" if "predict_with_generate" in asked else ""

    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        torch.manual_seed(0)
        model = build()
        settings = {
            **{"use_cpu": True, "max_steps": 4, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no"},
            **{"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "learning_rate": 1e-2},
            **{"gradient_accumulation_steps": microbatches // 2, "eval_strategy": "steps", "eval_steps": 2},
            # Biases of keys have a gradient of 0 but for rounding, which Adam would make as large as any other.
            **{"weight_decay": 0.1, "adam_epsilon": 1e-4, "report_to": "none"},
            **asked,
        }
        library = hf if ours else transformers
        return getattr(trainers, f"{kind}Trainer")(
            model=model,
            args=getattr(library, f"{kind}TrainingArguments")(output_dir=folder, **settings),
            train_dataset=rows[:22],
            eval_dataset=rows[22:],
            data_collator=collator(model),
            compute_metrics=metrics,
            **ours,
        )

    return make


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, **_SIZES))


def sequence_to_sequence() -> Make:
    """run_translation.py: label smoothing, and predictions that the model generates."""
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0, eos_token_id=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return task(
        lambda: transformers.T5ForConditionalGeneration(config),
        [{"input_ids": tokens, "labels": tokens[::-1]} for tokens in _sentences()],
        lambda model: transformers.DataCollatorForSeq2Seq(tokenizer(), model=model),
        _tokens,
        predict_with_generate=True,
        generation_max_length=6,
        generation_num_beams=2,
        label_smoothing_factor=0.1,
    )


def image_classification() -> Make:
    """run_image_classification.py: rows with columns that the collator reads, and forward does not name."""
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_SIZES
    )
    numbers = torch.Generator().manual_seed(0)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([row["label"] for row in rows])
        return {"pixel_values": torch.stack([row["image"] for row in rows]), "labels": labels}

    rows = [{"image": torch.randn(3, 8, 8, generator=numbers) + n % 3, "label": n % 3} for n in range(29)]
    build = lambda: transformers.ViTForImageClassification(config)  # noqa: E731
    return task(build, rows, lambda model: collate, _right, remove_unused_columns=False)


TASKS: dict[str, tuple[Make, str]] = {
    "run_translation.py": (sequence_to_sequence(), "tp"),
    "run_translation.py, cut": (sequence_to_sequence(), "stage 3"),
    "run_image_classification.py": (image_classification(), "pp"),
}
"""Each with the plan under which it is tried."""
