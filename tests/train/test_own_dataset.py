"""Runs on a dataset that the configuration names: any of `sw.Data`, under any layout, stopped and gone on with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import checkpoint
from shardwise.data import DataPlace
from shardwise.data.permutation import shuffled
from shardwise.errors import ConfigError, DataError
from shardwise.train import RunConfig, check_references, checkpointing
from shardwise.train.held_out_split import HeldOutSamples, TrainingSamples
from shardwise.train.references import resolve
from shardwise.train.run_data import build_data
from tests.properties import tried
from tests.train.runs import Finished, finished, laid_out, small_run, without_times

OWN = """
import threading

import torch
from torch import nn
from torch.utils.data import IterableDataset

seen = {}  # by rank: numbers of each microbatch that was trained on


class Net(nn.Module):
    def __init__(self, width=0):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs)))


def loss(output, batch):
    if output.requires_grad:
        seen.setdefault(threading.get_ident(), []).append(batch["number"].tolist())
    return (output - batch["inputs"][:, :2]).square().mean()


def sample(index):
    return {"inputs": torch.linspace(-1, 1, 4) * (index % 7), "number": index}


class Numbers:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return sample(index)


class Stream:
    def __init__(self, size):
        self.size = size

    def open(self, position):
        return map(sample, range(position, self.size))


class Endless:
    def __init__(self, size):
        pass

    def __getitem__(self, index):
        return sample(index)


class Unopened(IterableDataset):
    def __init__(self, size):
        pass

    def __iter__(self):
        return iter([])


def named(size):
    return {"inputs": torch.linspace(-1, 1, size * 4).view(size, 4), "number": torch.arange(size)}


def failing(size):
    raise OSError("no such share")


def forgotten(size):
    named(size)


def doubled(samples):
    numbers = torch.tensor([each["number"] for each in samples])
    return {"inputs": torch.stack([each["inputs"] for each in samples]) * 2, "number": numbers}
"""

SIZE = 50
TRAINED = [index for index in range(SIZE) if index % 5 != 4]
"""A fifth is held out: the last of each five."""


def own_run(folder: Path, *overrides: str, dataset: str = "Numbers") -> RunConfig:
    """A run of 6 updates of 12 rows, more than an epoch, with a save after every second."""
    (folder / "own.py").write_text(OWN)
    data = ("data.source=null", "data.sequence_length=null", f"data.dataset=own.py:{dataset}")
    words = (*data, f"data.dataset_options.size={SIZE}", "model.factory=own.py:Net", "model.loss=own.py:loss")
    return laid_out(folder, *words, "checkpoint.every=2", *overrides)


def trained(config: RunConfig, *, resume: str | None = None) -> tuple[Finished, list[list[int]]]:
    """The run, and the numbers of the samples of each of its updates, in the order of the global batch."""
    loss: Any = resolve("own.py:loss", folder=config.folder, key="loss")
    seen: dict[int, list[list[int]]] = loss.__globals__["seen"]
    seen.clear()
    through = finished(config, resume=resume)
    # Ranks are threads, which see the rows of their microbatches in turn: 1 row each.
    per_update = config.train.global_batch // config.plan.mesh.num_data_ranks
    shares = [[numbers[0] for numbers in each] for each in seen.values()]
    # A set: all ranks of a pipeline call the loss, for the same rows.
    updates = [{tuple(each[at : at + per_update]) for each in shares} for at in range(0, len(shares[0]), per_update)]
    return through, [sorted(number for share in update for number in share) for update in updates]


def order(num_updates: int, *, size: int = len(TRAINED), seed: int = 5, rows: int = 12) -> list[list[int]]:
    """The samples of each update, by their definition."""
    numbers = shuffled(np.arange(num_updates * rows), seed=seed, size=size).tolist()
    return [sorted(TRAINED[at] for at in numbers[start : start + rows]) for start in range(0, len(numbers), rows)]


def test_a_dataset_of_your_own_is_read_in_the_order_of_its_seed(tmp_path: Path) -> None:
    through, numbers = trained(own_run(tmp_path))
    assert numbers == order(6)
    lines = through.printed.splitlines()
    assert "own.py:Numbers: 40 samples to train on, 6 updates read 72; an evaluation reads 10" in lines
    assert lines[-1] == f"held-out loss {through.metrics[-1]['held_out_loss']:.4f}"
    assert "rows/s" in through.printed


@pytest.mark.parametrize(
    "overrides",
    [["mesh.dp_shard=2"], ["mesh.dp_replicate=3"], ["mesh.pp=2", "mesh.dp_shard=2"], ["data.num_workers=2"]],
)
def test_every_layout_reads_the_same_samples_and_evaluates_on_the_same(tmp_path: Path, overrides: list[str]) -> None:
    alone, numbers = trained(own_run(tmp_path))
    other, same = trained(own_run(tmp_path, *overrides, f"train.output={tmp_path / 'other'}"))
    assert same == numbers
    for curve in ("loss", "held_out_loss"):
        assert other.curve(curve) == pytest.approx(alone.curve(curve), rel=1e-5)
    if overrides == ["data.num_workers=2"]:
        assert without_times(other.metrics) == without_times(alone.metrics)


@pytest.mark.parametrize("dataset", ["Numbers", "Stream", "Endless", "named"])
def test_every_kind_of_dataset_goes_on_where_it_was_under_another_layout(tmp_path: Path, dataset: str) -> None:
    held_out = "data.held_out_dataset=own.py:Numbers"
    words = (held_out, "data.collate=own.py:doubled", "data.seed=3", "train.decay=constant", "data.held_out=null")
    expected = trained(own_run(tmp_path, *words, dataset=dataset))[1]
    parts = (*words, f"train.output={tmp_path / 'parts'}")
    first = trained(own_run(tmp_path, *parts, "train.steps=3", dataset=dataset))[1]
    then = trained(own_run(tmp_path, *parts, "mesh.dp_shard=3", dataset=dataset), resume="auto")[1]
    assert [*first, *then] == expected
    cursor = checkpoint.open(tmp_path / "parts" / "checkpoints").extra["sw.Data"]
    size = SIZE if dataset in ("Numbers", "named") else None
    at = (1, 72 - SIZE) if dataset != "Endless" else (0, 72)
    assert cursor == {"epoch": at[0], "position": at[1], "seed": 3, "num_samples": size}


def test_a_resume_on_other_samples_is_refused(tmp_path: Path) -> None:
    finished(own_run(tmp_path, "train.steps=2"))
    changed = own_run(tmp_path, "data.seed=8", "data.dataset_options.size=60")
    with pytest.raises(
        ConfigError, match=r"data\.seed was 5 and is 8; the number of samples to train on was 40 and is 48"
    ):
        finished(changed, resume="auto")
    with pytest.raises(ConfigError, match="it read a dataset of your own, and this one reads a text"):
        finished(small_run(tmp_path, "checkpoint.every=2"), resume="auto")


def test_a_save_of_an_earlier_version_goes_on_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("checkpoint.every=2", "checkpoint.background=false", "train.decay=constant")
    whole = finished(small_run(tmp_path, *words))
    parts = (*words, f"train.output={tmp_path / 'parts'}")
    save = checkpoint.save
    monkeypatch.setattr(checkpointing, "save", lambda *arguments, data, **more: save(*arguments, **more))
    finished(small_run(tmp_path, *parts, "train.steps=2"))
    monkeypatch.undo()
    assert "sw.Data" not in checkpoint.open(tmp_path / "parts" / "checkpoints").extra
    assert finished(small_run(tmp_path, *parts), resume="auto").curve("loss") == whole.curve("loss")
    cursor = checkpoint.open(tmp_path / "parts" / "checkpoints").extra["sw.Data"]
    assert cursor == {"epoch": 0, "position": 72, "seed": 5, "num_samples": None}


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("failing", r"data\.dataset: own\.py:failing raised OSError: no such share"),
        ("Stream", r"a Stream has no __len__ and __getitem__, so no part of it can be held out.*held_out_dataset"),
        ("Unopened", "a Unopened has no __len__"),
        ("forgotten", r"data\.dataset: own\.py:forgotten returned None; it must return the dataset"),
    ],
)
def test_a_dataset_that_cannot_be_had_is_refused(tmp_path: Path, dataset: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        build_data(own_run(tmp_path, dataset=dataset))


def test_a_rank_without_rows_has_the_nesting_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "nest.py").write_text(
        "import collections, torch\nPair = collections.namedtuple('Pair', 'inputs number')\n"
        "def nested(samples):\n"
        "    numbers = torch.tensor([each['number'] for each in samples])\n"
        "    return [Pair({'deep': numbers[:, None]}, numbers), 3, torch.tensor(1.0)]\n"
    )
    data = build_data(own_run(tmp_path, "data.collate=nest.py:nested"))
    last: Any = data.evaluation(DataPlace(data_rank=0, num_data_ranks=12), 9)[-1]
    assert (last[0].inputs["deep"].shape, last[0].number.shape, *last[1:]) == ((0, 1), (0,), 3, 1.0)


def test_too_few_samples_to_hold_some_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"2 samples are too few\. With held_out = 0\.2, 2 are left to train on and 0 for"
    ):
        build_data(own_run(tmp_path, "data.dataset_options.size=2"))


def test_held_out_samples_without_any_are_refused(tmp_path: Path) -> None:
    config = own_run(tmp_path, "data.held_out=null", "data.held_out_dataset=own.py:Unopened")
    with pytest.raises(DataError, match="a Unopened gives no samples to evaluate on"):
        build_data(config)


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        (["data.source=text.txt"], ["data.source: given with data.dataset, which is no text; leave one out"]),
        (["data.held_out_dataset=own.py:named"], ["data.held_out: given with data.held_out_dataset; leave one out"]),
        (
            ["data.dataset=null", "data.collate=own.py:doubled"],
            [
                "data.dataset_options: given without rows; name them by data.format or data.dataset",
                "data.collate: given without rows; name them by data.format or data.dataset",
            ],
        ),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(
    tmp_path: Path, overrides: list[str], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        own_run(tmp_path, *overrides)
    assert list(caught.value.problems) == problems


def test_names_that_cannot_be_imported_are_all_told(tmp_path: Path) -> None:
    config = own_run(tmp_path, "data.collate=own.py:absent", dataset="Absent")
    with pytest.raises(ConfigError) as caught:
        check_references(config)
    assert list(caught.value.problems) == ["data.dataset: own.py has no Absent", "data.collate: own.py has no absent"]


@tried(25)
@given(size=st.integers(2, 200), fraction=st.floats(0.01, 0.5))
def test_each_sample_is_trained_on_or_held_out(size: int, fraction: float) -> None:
    try:
        held_out, training = HeldOutSamples(range(size), fraction), TrainingSamples(range(size), fraction)
    except DataError:
        assert int(size * fraction) < 1
        return
    kept: list[int] = list(held_out)  # type: ignore[call-overload]  # an object with __getitem__ can be iterated
    assert len(kept) == len(held_out) == int(size * fraction)
    assert training.__getitems__(range(len(training))) == [training[at] for at in range(len(training))]
    assert sorted([*kept, *training.__getitems__(range(len(training)))]) == list(range(size))
    # Spread evenly: distances differ by one at most.
    distances = set(np.diff([-1, *kept]).tolist())
    assert max(distances) - min(distances) <= 1
