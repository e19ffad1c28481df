"""Data of runs in every format that a configuration can name: who writes them, and the batches that they are."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shardwise.data.permutation import shuffled
from shardwise.train import RunConfig
from tests.train.runs import laid_out

WORDS = ["<pad>", "</s>", "user", "said", *map(str, range(10)), "even", "odd", "?"]
TEMPLATE = "{% for message in messages %}{{ message['role'] }} said {{ message['content'] }} </s>{% endfor %}"
LLAMA = {
    **{"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False},
}


SIZE = 50
TRAINED = [index for index in range(SIZE) if index % 5 != 4]
"""A fifth is held out: the last of each five."""


def row(number: int) -> dict[str, Any]:
    return {
        "text": f"row {number} " + "abc" * (number % 5),
        "stars": number % 3,
        "features": [number / 9.0, 1.0, number % 4, 0.5],
    }


def write_jsonl(folder: Path) -> None:
    lines = [json.dumps({**row(number), "stars": "abc"[number % 3]}) for number in range(SIZE)]
    # Blank lines are no rows; one file begins with a byte order mark, and one ends without the end of its last line.
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n\n".join([*lines[:30], ""]).encode())
    (folder / "b.jsonl").write_text("\r\n".join(lines[30:]))


def write_fractions(folder: Path) -> None:
    """A number that is a fraction in one row alone: in most batches all are whole."""
    rows = [{"text": row(n)["text"], "stars": n % 3, "weight": 7.5 if n == 7 else n} for n in range(SIZE)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_parquet(folder: Path) -> None:
    for name, numbers in (("a", range(20)), ("b", range(20, SIZE))):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*map(row, numbers)]), folder / f"{name}.parquet")


def picture(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 255, (4, 5, 3), dtype=np.uint8)


def write_images(folder: Path) -> None:
    for number in range(SIZE):
        path = folder / "pictures" / "abc"[number % 3] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number)).save(path)
    (folder / "pictures" / "a" / "notes.txt").write_text("no image")


def write_saved(folder: Path) -> None:
    rows = datasets.Dataset.from_list([*map(row, range(SIZE))])
    datasets.DatasetDict({"train": rows, "test": rows.select(range(6))}).save_to_disk(folder / "saved")


def text_batch(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    texts = [row(number)["text"].encode()[:12] for number in numbers]
    longest = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]),
        "attention_mask": torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts]),
        "labels": torch.tensor([number % 3 for number in numbers]),
    }


def fraction_batch(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    return {**text_batch(numbers), "weights": torch.tensor([7.5 if n == 7 else float(n) for n in numbers])}


def number_batch(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    return {
        "inputs": torch.tensor([row(number)["features"] for number in numbers]),
        "labels": torch.tensor([number % 3 for number in numbers]),
    }


BY_CLASS = sorted(range(SIZE), key=lambda number: (number % 3, number))
"""In this order a folder for each class has the pictures."""


def picture_batch(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    those = [BY_CLASS[number] for number in numbers]
    pixels = torch.tensor(np.stack([picture(each) for each in those])).permute(0, 3, 1, 2)
    return {
        "pixel_values": (pixels / 255 - 0.5) / torch.tensor([0.2, 0.3, 0.4])[:, None, None],
        "labels": torch.tensor([each % 3 for each in those]),
    }


def text_of(number: int) -> str:
    return " ".join([*str(number), "even" if number % 2 == 0 else "odd", *str(number * number)])


def tokenizer_folder(folder: Path) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = make(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="?")
    made.save_pretrained(folder / "plain")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "words")
    return made


def pretrained_folder(folder: Path) -> None:
    torch.manual_seed(3)
    settings: dict[str, Any] = {**LLAMA, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder / "llama")


def padded(texts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]),
        "attention_mask": torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts]),
        "labels": torch.tensor([[*text, *[-100] * (longest - len(text))] for text in texts]),
    }


def tokens(number: int, *, most: int = 7) -> list[int]:
    return [WORDS.index(word) for word in text_of(number).split()][:most]


def write_words(folder: Path) -> None:
    """Texts and talks for the tokenizer of a folder."""
    tokenizer_folder(folder)
    lines = [
        json.dumps({"text": text_of(n), "chat": [{"role": "user", "content": text_of(n)}], "is_odd": n % 2})
        for n in range(SIZE)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))


def word_batch(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    return padded([tokens(number) for number in numbers])


def sized_batch(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    inputs = [torch.linspace(-1, 1, 4) * (number % 7) for number in numbers]
    return {"inputs": torch.stack(inputs), "labels": torch.tensor([number % 3 for number in numbers])}


TEXT = ("model.factory=nets.py:Mean", "data.text=text", "data.columns.labels=stars", "data.sequence_length=12")
NUMBERS = ("model.factory=nets.py:Numbers",)
FEATURES = (*NUMBERS, "data.columns={inputs='features', labels='stars'}")
CLASSES = "data.classes=['a', 'b', 'c']"
OWN = (*NUMBERS, f"data.dataset_options.size={SIZE}")
ALL = ("data.held_out=null", "data.held_out_dataset=nets.py:Sized")
WORDS_OF = (
    *(
        "data.format=jsonl",
        "data.source=rows.jsonl",
        "data.tokenizer=words",
        "data.sequence_length=7",
        "data.text=text",
    ),
    *("model.factory=transformers:LlamaForCausalLM", "model.loss=null", "model.loss_options=null"),
    *(f"model.config.{key}={json.dumps(value)}" for key, value in LLAMA.items()),
)
OF_GAN = ("data.dataset=gan.py:Numbers", "train.microbatch=3", "model.loss_options=null")
TURNS = (
    *("model.factory=gan.py:Gan", "model.loss=gan.py:fools", *OF_GAN),
    "model.groups={generator='generator', critic=['critic.0', 'critic.2']}",
    "train.turns=[{only='critic', loss='gan.py:TellsApart', loss_options={penalty=0.1}, steps=2}, "
    "{only=['generator']}]",
)
FRAMES = (
    *("model.factory=gan.py:Frames", "model.loss=gan.py:halves", *OF_GAN),
    *("data.collate=gan.py:frames", "data.rows={frames=1, table='all'}", "train.evaluate_batches=1"),
)

Written = Callable[[Path], object] | None
Batches = Callable[[Sequence[int]], dict[str, torch.Tensor]] | None
KINDS: dict[str, tuple[Written, Batches, tuple[str, ...]]] = {
    "jsonl": (write_jsonl, text_batch, (*TEXT, "data.format=jsonl", "data.source=*.jsonl", CLASSES)),
    "fractions": (
        write_fractions,
        fraction_batch,
        (*TEXT, "data.format=jsonl", "data.source=a.jsonl", "data.columns.weights=weight"),
    ),
    "parquet": (write_parquet, number_batch, (*FEATURES, "data.format=parquet", "data.source=.")),
    "images": (
        write_images,
        picture_batch,
        (
            *("model.factory=nets.py:Pixels", "data.format=images", "data.source=pictures"),
            "data.images={mean=0.5, std=[0.2, 0.3, 0.4]}",
        ),
    ),
    "saved": (
        write_saved,
        text_batch,
        (*TEXT, "data.format=saved", "data.source=saved", "data.dataset_options.split=train"),
    ),
    "hub": (
        write_jsonl,
        number_batch,
        (
            *(*FEATURES, "data.format=hub", "data.source=json", CLASSES),
            "data.dataset_options={data_files=['a.jsonl', 'b.jsonl'], split='train'}",
        ),
    ),
    "own": (None, text_batch, (*TEXT, "data.dataset=nets.py:listed", f"data.dataset_options.last={SIZE}")),
    "collator": (
        write_parquet,
        number_batch,
        (
            *(*NUMBERS, "data.format=parquet", "data.source=."),
            *("data.collate=nets.py:Batcher", "data.collate_options.scale=1.0"),
        ),
    ),
    "stream": (
        None,
        number_batch,
        (
            *(*FEATURES, "data.dataset=nets.py:streamed", f"data.dataset_options.last={SIZE}"),
            *("data.held_out_options={first=45}", "data.held_out=null"),
        ),
    ),
    "sized": (None, sized_batch, (*OWN, "data.dataset=nets.py:Sized")),
    "opened": (None, sized_batch, (*OWN, *ALL, "data.dataset=nets.py:Stream")),
    "endless": (None, sized_batch, (*OWN, *ALL, "data.dataset=nets.py:Endless")),
    "named": (None, sized_batch, (*OWN, *ALL, "data.dataset=nets.py:named")),
    "words": (write_words, word_batch, WORDS_OF),
    "turns": (None, None, TURNS),
    "frames": (None, None, FRAMES),
}
"""Who writes them, the batches of numbers of rows, and the settings that name them."""

WHOLE = {"stream", "opened", "named"}
"""Kinds of which nothing is held out; "endless" goes on behind the last number as well."""


def run_of(folder: Path, kind: str, *overrides: str) -> RunConfig:
    """A run on rows of this kind."""
    write, _, words = KINDS[kind]
    if write is not None:
        write(folder)
    given = ("model.config={}", "model.loss=nets.py:label_loss", "model.loss_options.smoothing=0.25")
    return laid_out(folder, "data.source=null", "data.sequence_length=null", *given, *words, *overrides)


def order(kind: str, num_updates: int = 6, *, seed: int = 5, rows: int = 12) -> list[list[int]]:
    """The rows of each update, by their definition."""
    numbers = np.arange(num_updates * rows)
    if kind in ("stream", "opened"):
        numbers = numbers % SIZE
    elif kind != "endless":
        size = SIZE if kind in WHOLE else len(TRAINED)
        numbers = shuffled(numbers, seed=seed, size=size)
    chosen = [int(each) if kind in WHOLE | {"endless"} else TRAINED[each] for each in numbers]
    return [chosen[start : start + rows] for start in range(0, len(chosen), rows)]
