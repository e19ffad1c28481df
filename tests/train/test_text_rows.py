"""Rows of text and messages with tokenizers and models of transformers, against plain loops."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from shardwise.errors import ConfigError, DataError, ModelError
from shardwise.train import RunConfig, check_references
from shardwise.train.run_build import build_model
from shardwise.train.run_data import build_data
from shardwise.train.verification.program import configured
from shardwise.train.verification.verifier import verify_simulated
from tests.train.runs import finished, laid_out
from tests.train.test_rows import TRAINED, order

SIZE = 50
WORDS = ["<pad>", "</s>", "user", "said", *map(str, range(10)), "even", "odd", "?"]
TEMPLATE = "{% for message in messages %}{{ message['role'] }} said {{ message['content'] }} </s>{% endfor %}"
LLAMA = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def text_of(number: int) -> str:
    return " ".join([*str(number), "even" if number % 2 == 0 else "odd", *str(number * number)])


def tokenizer_folder(folder: Path, *, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = make(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="?")
    if template is not None:
        made.chat_template = template
    made.save_pretrained(folder / "words")
    return made


def pretrained_folder(folder: Path, kind: Any = LlamaForCausalLM) -> None:
    torch.manual_seed(3)
    settings: dict[str, Any] = {**LLAMA, "pad_token_id": 0}
    kind(LlamaConfig(**settings)).save_pretrained(folder / "llama")


def run_of(folder: Path, *overrides: str) -> RunConfig:
    tokenizer_folder(folder)
    lines = [
        json.dumps({"text": text_of(n), "chat": [{"role": "user", "content": text_of(n)}], "is_odd": n % 2})
        for n in range(SIZE)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    data = ("data.format=jsonl", "data.source=rows.jsonl", "data.tokenizer=words", "data.sequence_length=7")
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in LLAMA.items()]
    model = ("model.factory=transformers:LlamaForCausalLM", "model.config={}", "model.loss=null", *settings)
    plain = ("train.decay=constant", "train.warmup_steps=null", "train.weight_decay=0.0", "train.clip_grad_norm=null")
    return laid_out(folder, *data, *model, *plain, *overrides)


def padded(texts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]),
        "attention_mask": torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts]),
        "labels": torch.tensor([[*text, *[-100] * (longest - len(text))] for text in texts]),
    }


def plain_losses(config: RunConfig, batches: Sequence[Any], weight: Any = len) -> list[float]:
    """A loop of a model of transformers; a row is a microbatch, as `padded` makes it."""
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate, weight_decay=0.0)
    losses = []
    for rows in batches:
        optimizer.zero_grad()
        weights = [weight(row) for row in rows]
        total = 0.0
        for row, each in zip(rows, weights, strict=True):
            loss = model(**row).loss * each / sum(weights)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def tokens(number: int, *, most: int = 7) -> list[int]:
    return [WORDS.index(word) for word in text_of(number).split()][:most]


def rows_of(numbers: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    return [padded([tokens(number)]) for number in numbers]


def one(_: Any) -> int:
    return 1


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["mesh.dp_shard=2", "sharding.stage=3", "train.microbatch=2"],
        ["mesh.pp=2"],
        ["mesh.tp=2", "tensor.rules=auto"],
    ],
)
def test_texts_that_are_padded_train_as_in_a_plain_loop(tmp_path: Path, overrides: list[str]) -> None:
    config = run_of(tmp_path, "data.text=text", *overrides)
    check_references(config)
    batches: list[Any] = [rows_of(numbers) for numbers in order(6)]
    if "train.microbatch=2" in overrides:
        batches = [
            [padded([tokens(each) for each in numbers[at : at + 2]]) for at in range(0, 12, 2)] for numbers in order(6)
        ]
    assert finished(config).curve("loss") == pytest.approx(plain_losses(config, batches, one), rel=1e-4)


def test_messages_are_written_by_the_template(tmp_path: Path) -> None:
    config = run_of(tmp_path, "data.messages=chat", "data.sequence_length=32")
    sample = build_data(config).held_out[0]
    assert sample["input_ids"].tolist() == [2, 3, *tokens(TRAINED[3] + 1, most=99), 1]
    assert sample["labels"].tolist() == sample["input_ids"].tolist()
    through = finished(config)
    assert len(through.metrics) == 6
    tokenizer_folder(tmp_path, template=None)
    (tmp_path / "words" / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"data\.messages: the tokenizer of data\.tokenizer has no chat_template"):
        finished(config)


def test_the_weight_of_a_microbatch_is_that_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text("def tokens(batch):\n    return (batch['labels'][:, 1:] != -100).sum()\n")
    config = run_of(tmp_path, "data.text=text", "model.loss_weight=weights.py:tokens", "mesh.dp_shard=2")
    check_references(config)
    expected = plain_losses(
        config, [rows_of(numbers) for numbers in order(6)], lambda row: int((row["labels"][:, 1:] != -100).sum())
    )
    assert finished(config).curve("loss") == pytest.approx(expected, rel=1e-4)


def test_a_collator_of_transformers_gets_the_tokenizer(tmp_path: Path) -> None:
    words = ("data.collate=transformers:DataCollatorForLanguageModeling", "data.collate_options.mlm=false")
    config = run_of(tmp_path, "data.text=text", *words, f"train.output={tmp_path / 'theirs'}")
    check_references(config)
    ours = run_of(tmp_path, "data.text=text")
    assert finished(config).curve("loss") == finished(ours).curve("loss")


def test_rows_are_packed_with_the_end_of_each(tmp_path: Path) -> None:
    words = ("data.text=text", "data.collate=packing", "mesh.dp_shard=2", "checkpoint.every=2")
    config = run_of(tmp_path, *words)
    data = build_data(config)
    assert data.corpus is not None
    everything = [token for number in range(SIZE) for token in [*tokens(number, most=99), 1]]
    assert sorted([*data.corpus.training.tolist(), *data.corpus.held_out.ravel().tolist()]) == sorted(everything)
    assert data.corpus.vocabulary_size == len(WORDS)
    through = finished(config)
    assert (tmp_path / "out" / "checkpoints" / "tokenizer.json").is_file()
    assert "the model goes on:" in through.printed


def test_a_pretrained_model_is_trained_on_from_its_values(tmp_path: Path) -> None:
    pretrained_folder(tmp_path)
    words = ("model.pretrained=llama", "model.config={attn_implementation='eager'}")
    config = run_of(tmp_path, "data.text=text", *words, "mesh.dp_shard=2", "sharding.stage=3")
    check_references(config)
    model: Any = build_model(config)
    assert model.training
    assert model.config._attn_implementation == "eager"
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), saved.parameters(), strict=True))
    expected = plain_losses(config, [rows_of(numbers) for numbers in order(6)], one)
    assert finished(config).curve("loss") == pytest.approx(expected, rel=1e-4)


def test_a_new_head_of_a_pretrained_model_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    pretrained_folder(tmp_path)
    words = ("model.factory=transformers:AutoModelForSequenceClassification", "model.pretrained=llama")
    labels = ("data.text=text", "data.columns.labels=is_odd", "model.config={num_labels=2, pad_token_id=0}")
    groups = "train.groups=[{parameters=['model.*'], frozen=true}, {parameters=['score'], learning_rate=0.1}]"
    config = run_of(tmp_path, *words, *labels, groups, "mesh.dp_shard=2")
    check_references(config)
    model = build_model(config)
    assert isinstance(model, LlamaForSequenceClassification)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["score.weight"]
    assert finished(config).curve("learning_rate") == [0.1] * 6


def test_what_is_no_pretrained_model_is_refused(tmp_path: Path) -> None:
    def problems(*overrides: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            build_model(run_of(tmp_path, "data.text=text", *overrides))
        return caught.value.problems

    assert problems("model.pretrained=nowhere") == (
        f"model.pretrained: no config.json in {tmp_path / 'nowhere'}; give a folder that save_pretrained wrote",
    )
    pretrained_folder(tmp_path)
    own = ("model.factory=net.py:Net", "model.pretrained=llama")
    assert problems(*own, "model.config={}") == (
        "model.pretrained: net.py:Net has no from_pretrained; give a class of transformers",
    )
    assert problems("model.pretrained=llama", "model.config={hiden_size=3}") == (
        "model.config.hiden_size: LlamaConfig has no such setting; did you mean model.config.hidden_size?",
    )
    assert (
        "draws the values that model.pretrained has"
        in problems("model.pretrained=llama", "model.config={}", 'model.initialise="by module"')[0]
    )
    (tmp_path / "llama" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "llama" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.factory: transformers:LlamaForCausalLM raised"):
        build_model(run_of(tmp_path, "data.text=text", "model.pretrained=llama", "model.config={}"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    pretrained_folder(tmp_path)
    config = run_of(tmp_path, "data.text=text")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"data\.tokenizer: .*none holds no tokenizer of transformers"):
        build_data(run_of(tmp_path, "data.text=text", "data.tokenizer=none"))
    assert config.data.tokenizer == "words"


def test_rows_and_groups_hold_in_a_verification(tmp_path: Path) -> None:
    groups = "train.groups=[{parameters=['*norm*'], frozen=true}, {parameters=['lm_head'], learning_rate=0.1}]"
    schedule = ("train.schedule=polynomial", "train.decay=null", "train.warmup_steps=1")
    config = run_of(tmp_path, "data.text=text", groups, *schedule, "mesh.pp=2", "mesh.dp_shard=2")
    assert verify_simulated(configured(config, steps=2)).verdict in ("equal", "rounding")


def test_options_that_a_callable_does_not_take_are_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(output, batch, smoothing=0.0): ...\ndef rows(path, limit=3): ...\n"
        "class Accuracy:\n    def __init__(self, num_classes): ...\n    def __call__(self, output, batch): ...\n"
    )
    words = (
        "model.loss=mine.py:loss",
        "model.loss_options.smothing=0.1",
        "data.dataset=mine.py:rows",
        "data.dataset_options.pth=3",
        "data.format=null",
        "data.source=null",
        "data.text=text",
        "train.optimizer_options.beta=[0.9, 0.9]",
        "train.metrics.accuracy=mine.py:Accuracy",
        "train.metrics.exactness=mine.py:exact",
    )
    with pytest.raises(ConfigError) as caught:
        check_references(run_of(tmp_path, *words))
    assert list(caught.value.problems) == [
        "model.loss_options.smothing: mine.py:loss takes no smothing; did you mean model.loss_options.smoothing?",
        "train.optimizer_options.beta: torch.optim:AdamW takes no beta; did you mean train.optimizer_options.betas?",
        "data.dataset_options.pth: mine.py:rows takes no pth; did you mean data.dataset_options.path?",
        "data.dataset_options.path: missing; mine.py:rows needs it",
        "train.metric_options.accuracy.num_classes: missing; mine.py:Accuracy needs it",
        "train.metrics.exactness: mine.py has no exact",
    ]
