"""The contract of adapters, on all of them."""

from pathlib import Path

import pytest

from tests.accelerate.accelerate_loops import COLUMN as ACCELERATE
from tests.contracts.adapter_cases import goes_on, trains_as_the_plain_one
from tests.hf.trainer_column import COLUMN as HF
from tests.lightning.lightning_column import COLUMN as LIGHTNING

QUICK = [
    ("hf", "stage 1", "lengths of data ranks"),
    ("accelerate", "one rank", "a batch is dropped"),
    ("lightning", "stage 0", "two_losses"),
    ("lightning", "stage 0", "float64"),
    ("lightning", "stage 2, k = 2", "plain"),
    ("lightning", "one rank", "accumulated and clipped"),
]
COLUMNS = {"hf": HF, "lightning": LIGHTNING, "accelerate": ACCELERATE}


@pytest.mark.filterwarnings("ignore:Detected call of")  # a scheduler steps before its optimizer has
@pytest.mark.parametrize(
    ("adapter", "plan", "setting"),
    [
        pytest.param(name, *case, marks=pytest.mark.quick if (name, *case) in QUICK else ())
        for name, column in COLUMNS.items()
        for case in column.cases
    ],
)
def test_training_is_that_of_the_plain_trainer(adapter: str, plan: str, setting: str, tmp_path: Path) -> None:
    trains_as_the_plain_one(COLUMNS[adapter], plan, setting, tmp_path)


@pytest.mark.parametrize(
    ("adapter", "saved", "resumed"), [(name, *move) for name, column in COLUMNS.items() for move in column.moves]
)
def test_a_run_goes_on_under_another_plan(adapter: str, saved: str, resumed: str, tmp_path: Path) -> None:
    goes_on(COLUMNS[adapter], saved, resumed, tmp_path)


@pytest.mark.parametrize(
    ("adapter", "plan", "setting"), [(name, *case) for name, column in COLUMNS.items() for case in column.on_device]
)
def test_on_devices_training_is_that_of_the_host(
    adapter: str, plan: str, setting: str, fake: str, tmp_path: Path
) -> None:
    trains_as_the_plain_one(COLUMNS[adapter], plan, setting, tmp_path, device=fake)


@pytest.mark.parametrize("adapter", COLUMNS)
def test_on_devices_a_run_goes_on(adapter: str, fake: str, tmp_path: Path) -> None:
    goes_on(COLUMNS[adapter], "stage 3", "tp", tmp_path, device=fake)
