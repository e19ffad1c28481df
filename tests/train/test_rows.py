"""Runs on rows of files and of Hugging Face datasets, against a plain loop over the same rows."""

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from shardwise.data.permutation import shuffled
from shardwise.errors import ConfigError, DataError
from shardwise.train import RunConfig, check_references, row_files
from shardwise.train.run_build import build_model
from shardwise.train.run_data import build_data
from shardwise.train.run_rows import RunRows, read_rows
from shardwise.train.turns import build_loss
from tests.train.runs import finished, laid_out

NETS = """
import datasets
import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self, width=8, classes=3):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.inner = nn.Linear(width, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return self.head(torch.tanh(self.inner(mean)))


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3 * 4 * 5, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values):
        return self.head(torch.tanh(self.inner(pixel_values.flatten(1))))


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(torch.tanh(self.inner(inputs)))


def label_loss(output, batch, smoothing=0.0):
    return nn.functional.cross_entropy(output, batch["labels"], label_smoothing=smoothing)


def rows(first, last):
    return [{"text": f"row {n} " + "abc" * (n % 5), "stars": n % 3, "features": [n / 9.0, 1.0, n % 4, 0.5]}
            for n in range(first, last)]


def listed(last):
    return datasets.Dataset.from_list(rows(0, last))


def streamed(last, first=0):
    return datasets.IterableDataset.from_generator(lambda: iter(rows(first, last)))


def raw_batch(samples, scale=1.0):
    return {"inputs": torch.tensor([each["features"] for each in samples]) * scale,
            "labels": torch.tensor([each["stars"] for each in samples])}


class Batcher:
    def __init__(self, tokenizer=None, scale=1.0):
        self.scale = scale

    def __call__(self, samples):
        return raw_batch(samples, self.scale)
"""

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


TEXT = ("model.factory=nets.py:Mean", "data.text=text", "data.columns.labels=stars", "data.sequence_length=12")
FEATURES = ("model.factory=nets.py:Numbers", "data.columns={inputs='features', labels='stars'}")
KINDS: dict[str, tuple[Callable[[Path], None] | None, Callable[[Sequence[int]], Any], tuple[str, ...]]] = {
    "jsonl": (
        write_jsonl,
        text_batch,
        (*TEXT, "data.format=jsonl", "data.source=*.jsonl", "data.classes=['a', 'b', 'c']"),
    ),
    "parquet": (write_parquet, number_batch, (*FEATURES, "data.format=parquet", "data.source=.")),
    "images": (
        write_images,
        picture_batch,
        (
            "model.factory=nets.py:Pixels",
            "data.format=images",
            "data.source=pictures",
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
            *FEATURES,
            "data.format=hub",
            "data.source=json",
            "data.dataset_options={data_files=['a.jsonl', 'b.jsonl'], split='train'}",
            "data.classes=['a', 'b', 'c']",
        ),
    ),
    "own": (None, text_batch, (*TEXT, "data.dataset=nets.py:listed", f"data.dataset_options.last={SIZE}")),
    "collator": (
        write_parquet,
        number_batch,
        (
            "model.factory=nets.py:Numbers",
            "data.format=parquet",
            "data.source=.",
            "data.collate=nets.py:Batcher",
            "data.collate_options.scale=1.0",
        ),
    ),
}


def run_of(folder: Path, kind: str, *overrides: str, **more: Any) -> RunConfig:
    write, _, words = KINDS[kind]
    (folder / "nets.py").write_text(NETS)
    if write is not None:
        write(folder)
    given = ("model.config={}", "model.loss=nets.py:label_loss", "model.loss_options.smoothing=0.25")
    of_text = ("data.source=null", "data.sequence_length=null")
    return laid_out(folder, *of_text, *words, *given, "train.decay=constant", *overrides, **more)


def order(num_updates: int, *, size: int = len(TRAINED), seed: int = 5, rows: int = 12) -> list[list[int]]:
    numbers = shuffled(np.arange(num_updates * rows), seed=seed, size=size).tolist()
    return [[TRAINED[at] for at in numbers[start : start + rows]] for start in range(0, len(numbers), rows)]


def plain_losses(config: RunConfig, batches: Sequence[dict[str, torch.Tensor]]) -> list[float]:
    """A loop over whole batches of 12 rows, each row a microbatch."""
    model = build_model(config)
    loss = cast("Callable[..., torch.Tensor]", build_loss(config, model))
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    losses = []
    for update, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (update + 1) / 2)
        optimizer.zero_grad()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        found = loss(model(**inputs), batch)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(found.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_rows_train_as_in_a_plain_loop_over_them(tmp_path: Path, kind: str) -> None:
    config = run_of(tmp_path, kind)
    check_references(config)
    through = finished(config)
    expected = plain_losses(config, [KINDS[kind][1](numbers) for numbers in order(6)])
    assert through.curve("loss") == pytest.approx(expected, rel=1e-5)
    assert "40 samples to train on, 6 updates read 72; an evaluation reads 10" in through.printed
    assert "rows/s" in through.printed


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("jsonl", ["mesh.dp_shard=2", "sharding.stage=3"]),
        ("jsonl", ["mesh.pp=2", "mesh.dp_replicate=3"]),
        ("images", ["mesh.dp_shard=3", "sharding.stage=2", "data.num_workers=1"]),
        ("parquet", ["mesh.tp=2", "tensor.rules={inner='column', head='row'}"]),
        ("saved", ["mesh.dp_shard=4", "train.microbatch=3"]),
    ],
)
def test_every_layout_trains_on_the_same_rows(tmp_path: Path, kind: str, overrides: list[str]) -> None:
    expected = plain_losses(run_of(tmp_path, kind), [KINDS[kind][1](numbers) for numbers in order(6)])
    through = finished(run_of(tmp_path, kind, *overrides))
    assert through.curve("loss") == pytest.approx(expected, rel=1e-5)
    alone = finished(run_of(tmp_path, kind, f"train.output={tmp_path / 'alone'}"))
    assert through.curve("held_out_loss") == pytest.approx(alone.curve("held_out_loss"), rel=1e-5)


@pytest.mark.parametrize("kind", ["jsonl", "images", "own"])
def test_rows_go_on_in_the_middle_of_an_epoch_under_another_layout(tmp_path: Path, kind: str) -> None:
    expected = plain_losses(run_of(tmp_path, kind), [KINDS[kind][1](numbers) for numbers in order(6)])
    words = ("checkpoint.every=3", f"train.output={tmp_path / 'parts'}")
    finished(run_of(tmp_path, kind, *words, "train.steps=3", "mesh.dp_shard=2"))
    then = finished(run_of(tmp_path, kind, *words, "mesh.dp_shard=3", "sharding.stage=3"), resume="auto")
    assert then.curve("loss") == pytest.approx(expected, rel=1e-5)


STREAM = (
    "model.factory=nets.py:Numbers",
    "data.dataset=nets.py:streamed",
    f"data.dataset_options.last={SIZE}",
    "data.held_out_options={first=45}",
    "data.held_out=null",
)


@pytest.mark.parametrize(
    "words", [("data.columns={inputs='features', labels='stars'}",), ("data.collate=nets.py:raw_batch",)]
)
def test_a_stream_of_hugging_face_is_read_and_gone_on_with(tmp_path: Path, words: list[str]) -> None:
    KINDS["stream"] = (None, number_batch, (*STREAM, *words))
    numbers = [[at % SIZE for at in range(start, start + 12)] for start in range(0, 72, 12)]
    expected = plain_losses(run_of(tmp_path, "stream"), [number_batch(each) for each in numbers])
    saves = ("checkpoint.every=5", f"train.output={tmp_path / 'parts'}")
    finished(run_of(tmp_path, "stream", *saves, "train.steps=5", "mesh.dp_shard=2"))
    then = finished(run_of(tmp_path, "stream", *saves, "mesh.dp_shard=3"), resume="auto")
    del KINDS["stream"]
    assert then.curve("loss") == pytest.approx(expected, rel=1e-5)
    assert "samples without a known end" in then.printed


def test_a_stream_is_not_read_by_workers_which_would_get_other_rows(tmp_path: Path) -> None:
    KINDS["stream"] = (None, number_batch, (*STREAM, "data.collate=nets.py:raw_batch"))
    config = run_of(tmp_path, "stream", "data.num_workers=2")
    del KINDS["stream"]
    with pytest.raises(DataError, match=r"set\s+num_workers=0 \(data\.num_workers\)"):
        finished(config)


def test_rows_for_evaluation_may_be_others(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({**row(n), "stars": "a"}) for n in range(4)))
    config = run_of(tmp_path, "jsonl", "data.held_out_source=test.jsonl", "data.held_out=null", "data.source=?.jsonl*")
    data = build_data(config)
    assert (data.data.num_samples, len(data.held_out)) == (SIZE, 4)
    assert [sample["labels"].item() for sample in (data.held_out[at] for at in range(4))] == [0] * 4
    of_split = build_data(run_of(tmp_path, "saved", "data.held_out_options.split=test", "data.held_out=null"))
    assert (of_split.data.num_samples, len(of_split.held_out)) == (SIZE, 6)


def test_rows_are_packed_into_one_text(tmp_path: Path) -> None:
    words = ("model.factory=net.py:Net", "model.config={width=8}", "model.loss=net.py:next_token")
    packed = ("data.collate=packing", "data.columns=null", "data.classes=null", "model.loss_options=null")
    config = run_of(tmp_path, "jsonl", *words, *packed)
    (tmp_path / "all.txt").write_text("".join(f"{row(number)['text']}\n" for number in range(SIZE)))
    of_text = laid_out(
        tmp_path,
        "data.source=all.txt",
        "data.sequence_length=12",
        "train.decay=constant",
        f"train.output={tmp_path / 'b'}",
    )
    assert finished(config).metrics[-1]["held_out_loss"] == finished(of_text).metrics[-1]["held_out_loss"]


GOOD = json.dumps({"text": "good", "stars": "a"}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "data.source: 'broken.jsonl' has no rows"),
        ("\n \n", "data.source: 'broken.jsonl' has no rows"),
        (
            GOOD * 2 + '{"text": "go',
            "broken.jsonl line 3: it is not JSON: Unterminated string starting at at column 10",
        ),
        (GOOD + "\n[1]\n" + GOOD, "broken.jsonl line 3: it is a list, not an object with columns"),
        (GOOD.encode() + b'{"text": "\xff"}', "broken.jsonl line 2: it is not UTF-8 (byte 10)"),
        (GOOD + "[" * 100_000, "broken.jsonl line 2: its JSON is nested too deeply"),
        ('{"txt": "good", "stars": "a"}', 'data.text: there is no column "text"; did you mean "txt"?'),
        (GOOD + '{"text": "good"}', "broken.jsonl line 2: there is no column \"stars\"; there are 'text'"),
        (GOOD + '{"text": 3, "stars": "a"}', 'broken.jsonl line 2: column "text" is a int, not a text'),
        (
            GOOD + '{"text": "", "stars": "d"}',
            "line 2: column \"stars\" is the text 'd'; data.classes has 'a', 'b', 'c'",
        ),
        (
            GOOD + '{"text": "\\ud800", "stars": "a"}',
            'line 2: column "text" has half of a character (a surrogate alone)',
        ),
        (GOOD + '{"text": "", "stars": null}', 'broken.jsonl line 2: column "stars" is null; labels takes numbers'),
        (GOOD + "x\n" * 9, "broken.jsonl line 4: it is not JSON: Expecting value at column 1; 6 more lines are wrong"),
    ],
)
def test_a_file_of_lines_that_cannot_be_read_is_refused_by_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    (tmp_path / "broken.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ConfigError, DataError)) as caught:
        finished(run_of(tmp_path, "jsonl", "data.source=broken.jsonl", "mesh.dp_shard=2"))
    assert message in str(caught.value)


def test_what_the_first_rows_show_is_known_before_anything_starts(tmp_path: Path) -> None:
    def problems(kind: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            run_of(tmp_path, kind, *overrides)
        return list(caught.value.problems)

    assert problems("jsonl", "data.columns.labels=starz", "data.text=tex") == [
        'data.source: data.text: there is no column "tex"; did you mean "text"?',
        'data.source: data.columns.labels: there is no column "starz"; did you mean "stars"?',
    ]
    assert problems("parquet", "data.columns.labels=score") == [
        "data.source: data.columns.labels: there is no column \"score\"; there are 'features', 'stars', 'text'"
    ]
    (tmp_path / "empty").mkdir()
    assert problems("images", "data.source=empty") == [
        f"data.source: {tmp_path / 'empty'} has no folders; images are in a folder for each class"
    ]
    (tmp_path / "empty" / "cats").mkdir()
    assert "has no images in its folders" in problems("images", "data.source=empty")[0]
    assert problems("parquet", "data.source=empty") == ["data.source: empty has no files of rows (*.parquet)"]
    assert problems("saved", "data.source=empty") == [
        f"data.source: {tmp_path / 'empty'} is no folder of save_to_disk: it has no dataset_info.json"
    ]
    assert problems("jsonl", "data.source=nowhere.jsonl") == [
        f"data.source: no file or directory {tmp_path / 'nowhere.jsonl'}"
    ]
    (tmp_path / "c.parquet").write_bytes(b"PAR1 not really")
    assert "'a.parquet', 'b.parquet', 'c.parquet'" in problems("parquet")[0]


@pytest.mark.parametrize(
    ("kind", "overrides", "problem"),
    [
        ("jsonl", ["data.text=null"], "data.sequence_length: given without data.text or data.messages"),
        ("jsonl", ["data.source=null"], "data.source: missing; data.format jsonl reads what it names"),
        ("jsonl", ["data.messages=chat"], "data.text: given with data.messages; leave one out"),
        ("jsonl", ["data.collate=packing"], 'data.columns: given with data.collate = "packing"; leave one out'),
        ("images", ["data.collate=packing"], 'data.collate: "packing" packs tokens; name their column by data.text or'),
        ("jsonl", ["data.columns.input_ids=stars"], "data.columns.input_ids: data.text or data.messages makes it"),
        ("jsonl", ["data.held_out_source=a.jsonl"], "data.held_out: given with data.held_out_source; leave one out"),
        (
            "jsonl",
            ["data.dataset_options.split=train"],
            "data.dataset_options: given with data.format jsonl, which has",
        ),
        ("jsonl", ["data.collate_options.scale=2"], "data.collate_options: given without a callable as data.collate"),
        ("own", ["data.format=jsonl"], "data.format: given with data.dataset, which is no text; leave one out"),
        ("images", ["data.images.sizes=[3, 3]"], "data.images.sizes: unknown setting; did you mean data.images.size?"),
        ("images", ["data.images.size=[3]"], "data.images.size: [3] given; it must be"),
        ("jsonl", ["data.format=csv"], "data.format: 'csv' given; it must be 'text', 'jsonl', 'parquet', 'images', "),
    ],
)
def test_settings_of_rows_that_mean_nothing_are_refused(
    tmp_path: Path, kind: str, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(tmp_path, kind, *overrides)
    assert any(each.startswith(problem) for each in caught.value.problems), caught.value.problems


def test_images_that_cannot_be_read_or_stacked_are_named(tmp_path: Path) -> None:
    config = run_of(tmp_path, "images")
    large, torn, empty = (tmp_path / "pictures" / "a" / name for name in ("large.png", "torn.png", "void.png"))
    Image.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(large)
    data = build_data(config)
    with pytest.raises(DataError, match=r"pixel_values has the shapes \[\(3, 4, 5\), \(3, 9, 9\)\] in one batch.*size"):
        data.collate([data.held_out[0], {**data.held_out[1], "pixel_values": torch.zeros(3, 9, 9)}])
    scaled = build_data(
        run_of(tmp_path, "images", "data.images.size=[6, 7]", "data.images.mode=L", "data.images.std=1.0")
    )
    assert {tuple(scaled.held_out[at]["pixel_values"].shape) for at in range(len(scaled.held_out))} == {(1, 6, 7)}
    with pytest.raises(DataError, match=r"data\.images\.std: 3 numbers for 1 channels"):
        finished(run_of(tmp_path, "images", "data.images.size=[6, 7]", "data.images.mode=L"))
    stream = io.BytesIO()
    Image.fromarray(picture(1)).save(stream, format="PNG")
    torn.write_bytes(stream.getvalue()[:50])
    with pytest.raises(DataError, match=r"torn\.png is no image that can be read"):
        finished(run_of(tmp_path, "images", "mesh.dp_shard=2", "train.evaluate_batches=9", "data.images.size=[4, 5]"))
    torn.unlink()
    (tmp_path / "pictures" / "d").mkdir()
    with pytest.raises(DataError, match=r"data\.source: .* has the folder d, which is no class; the classes are"):
        build_data(run_of(tmp_path, "images", "data.classes=['a', 'b', 'c']"))
    (tmp_path / "pictures" / "d").rmdir()
    empty.touch()
    with pytest.raises(DataError, match=r"data\.source: .*void\.png is empty"):
        finished(run_of(tmp_path, "images", "mesh.dp_shard=2"))


def test_columns_and_splits_that_are_not_there_and_code_of_datasets_are_refused(tmp_path: Path) -> None:
    def refusal(kind: str, *overrides: str) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            finished(run_of(tmp_path, kind, "mesh.dp_shard=2", *overrides))
        return str(caught.value)

    assert 'data.columns.labels: there is no column "star"; did you mean "stars"?' in refusal(
        "own", "data.columns.labels=star"
    )
    assert "has the splits train, test; name one" in refusal("saved", "data.dataset_options=null")
    assert "the format saved takes split alone" in refusal("saved", "data.dataset_options.name=x")
    assert "no code of a dataset is run, and no pickle is read" in refusal("hub", "data.source=pandas")
    assert "no code of a dataset is run" in refusal("hub", "data.dataset_options.trust_remote_code=true")
    pyarrow.parquet.write_table(pyarrow.table({"features": [None, [1.0] * 4], "stars": [0, 1]}), tmp_path / "n.parquet")
    assert 'column "features" has 1 values that are null, the first in row 0' in refusal(
        "parquet", "data.source=n.parquet"
    )


def test_numbers_that_make_no_tensor_are_named_by_line(tmp_path: Path) -> None:
    lines = [json.dumps({"stars": 2**70 if n == 4 else n, "features": [1.0] * 4}) for n in range(10)]
    (tmp_path / "large.jsonl").write_text("\n".join(lines))
    KINDS["large"] = (None, number_batch, (*FEATURES, "data.format=jsonl", "data.source=large.jsonl"))
    config = run_of(tmp_path, "large", "mesh.dp_shard=2")
    del KINDS["large"]
    with pytest.raises(DataError, match=r"data: large\.jsonl line 5: labels: int becomes no tensor"):
        finished(config)


def test_a_row_without_tokens_has_one_that_is_no_label(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ["", "abc"] * 5))
    words = ("data.source=few.jsonl", "data.columns=null", "data.classes=null", "data.held_out=0.5")
    data = build_data(run_of(tmp_path, "jsonl", *words))
    batch = data.collate([data.held_out[0], {name: value[:0] for name, value in data.held_out[0].items()}])
    assert batch["input_ids"].tolist() == [[97, 98, 99], [0, 0, 0]]
    assert batch["labels"].tolist() == [[97, 98, 99], [-100] * 3]
    training = build_data(run_of(tmp_path, "jsonl", *words)).data
    assert training.num_samples == 5


def test_a_column_of_floats_has_one_dtype_although_json_writes_some_as_integers(tmp_path: Path) -> None:
    """A batch whose rows are all written without a point would be of integers, which no layer takes."""
    rows = [{"stars": n % 3, "features": [1, 2, n, 0.5 if n == 29 else 0]} for n in range(30)]
    (tmp_path / "whole.jsonl").write_text("\n".join(map(json.dumps, rows)))
    KINDS["whole"] = (None, number_batch, (*FEATURES, "data.format=jsonl", "data.source=whole.jsonl"))
    config = run_of(tmp_path, "whole", "mesh.dp_shard=2")
    del KINDS["whole"]
    data = build_data(config)
    dtypes = [{name: value.dtype for name, value in data.held_out[at].items()} for at in range(len(data.held_out))]
    assert dtypes == [{"inputs": torch.float32, "labels": torch.int64}] * len(dtypes)
    assert len(finished(config).curve("loss")) == config.train.steps


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_share_the_parsing_of_rows_and_know_the_same(
    tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"stars": n % 3, "features": [1, 2, n, 0.5 if n == 29 else 0]}) for n in range(30)]
    (tmp_path / "whole.jsonl").write_text("\n\n".join(rows))
    KINDS["whole"] = (None, number_batch, (*FEATURES, "data.format=jsonl", "data.source=whole.jsonl"))
    config = run_of(tmp_path, "whole")
    del KINDS["whole"]
    parsed: list[bytes] = []
    original = row_files._object_in

    def noted(line: bytes) -> dict[str, Any]:
        parsed.append(line)
        return original(line)

    monkeypatch.setattr(row_files, "_object_in", noted)

    def together() -> list[RunRows]:
        found = [read_rows(config, (rank, num_ranks)) for rank in range(num_ranks)]
        told = [each.told() for each in found]
        for each in found:
            each.take(told, config.data)
        return found

    ranks = together()
    assert len(parsed) == len(rows)
    for each in ranks:
        assert [each.training[at] for at in range(30)] == [json.loads(row) for row in rows]
        assert {each.samples(each.training)[at]["inputs"].dtype for at in (0, 29)} == {torch.float32}
    bad = {3: "x", 4: "[1]", 17: '{"stars": 0}', 29: "", 28: "{"}
    (tmp_path / "whole.jsonl").write_text("\n".join(bad.get(at, row) for at, row in enumerate(rows)))
    with pytest.raises(DataError) as raised:
        together()
    lines = [int(each) for each in re.findall(r"line (\d+)", str(raised.value))]
    assert (lines, "1 more lines are wrong" in str(raised.value)) == ([4, 5, 18], True)
    assert str(raised.value).startswith("data.source: whole.jsonl line 4: it is not JSON")
