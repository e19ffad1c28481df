"""The examples of rows learn what their rows hold, under one rank and under several."""

import shutil
from pathlib import Path

import pytest

from examples.small_rows import write_rows
from shardwise.train import check_references, read_config
from tests.train.runs import Finished, finished

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    write_rows(made)
    for name in ("small_rows.py", "text_classes.toml", "image_classes.toml"):
        shutil.copy(EXAMPLES / name, made)
    return made


@pytest.mark.parametrize("name", ["text_classes", "image_classes"])
def test_an_example_of_rows_learns_its_classes_under_any_layout(folder: Path, name: str) -> None:
    curves: list[Finished] = []
    for ranks, layout in ((1, []), (2, ["sharding.stage=3"])):
        output = f"train.output={folder / name}-{ranks}"
        config = read_config(folder / f"{name}.toml", overrides=[output, *layout], num_processes=ranks)
        check_references(config)
        curves.append(finished(config))
    one, two = curves
    assert one.curve("held_out_loss")[-1] < 0.5
    assert one.metrics[-1]["held_out"]["accuracy"] > 0.9
    assert two.curve("loss") == pytest.approx(one.curve("loss"), rel=2e-2)
