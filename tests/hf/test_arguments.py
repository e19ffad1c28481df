"""The table of what a trainer under a plan does with each field of TrainingArguments."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

import shardwise as sw
from shardwise import hf
from shardwise.hf.arguments import ARGUMENTS, KNOWN_CLASSES, check_arguments
from tests.hf.tiny_trainers import ROWS, build
from tests.refusals import Refusals

STAGES = sw.Mesh(pp=2)


def arguments(folder: Path, **given: Any) -> Any:
    made = hf.Seq2SeqTrainingArguments(output_dir=str(folder), use_cpu=True)
    # Some check themselves for what is installed, and for a device.
    for name, value in given.items():
        setattr(made, name, value)
    return made


def check(given: dict[str, Any], folder: Path) -> None:
    check_arguments(arguments(folder, **given), STAGES)


FIELDS: dict[str, Any] = {
    "optim": "lomo",
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "auto_find_batch_size": True,
    "eval_use_gather_object": True,
    "save_on_each_node": True,
    "fsdp": True,
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "parallelism_config": "tp",
    "debug": [transformers.debug_utils.DebugOption.UNDERFLOW_OVERFLOW],
    "accelerator_config": transformers.trainer_pt_utils.AcceleratorConfig(split_batches=True),
}


def when_made(folder: Path) -> None:
    given = arguments(folder, auto_find_batch_size=True, bf16_full_eval=True)
    rows: Any = ROWS
    hf.Trainer(model=build(), args=given, train_dataset=rows)


REFUSED = Refusals(
    "hf.arguments",
    {
        **{name: partial(check, {name: value}) for name, value in FIELDS.items()},
        **{
            f"optim {name}": partial(check, {"optim": name})
            for name in ("adalomo", "apollo_adamw_layerwise", "schedule_free_sgd")
        },
        "no copies": partial(check, {"shardwise_replicas": 0}),
        "all problems at once, when a trainer is made": when_made,
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_has_no_meaning_under_a_plan_is_named_with_the_way_out(case: str) -> None:
    REFUSED.check(case)


def test_the_table_has_every_field_of_transformers_and_all_that_it_refuses_is_tried() -> None:
    assert set(ARGUMENTS) == {each.name for kind in KNOWN_CLASSES for each in dataclasses.fields(kind)}
    assert set(FIELDS) == {name for name, found in ARGUMENTS.items() if any(each.is_refused for each in found)}


def test_defaults_and_fields_of_another_library_are_taken(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Config(hf.TrainingArguments):
        beta: float = 0.1

    for mesh in (sw.Mesh(), STAGES):
        check_arguments(arguments(tmp_path), mesh)
        check_arguments(transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True), mesh)
        check_arguments(Config(output_dir=str(tmp_path), use_cpu=True, beta=0.5), mesh)


def test_a_field_that_a_newer_transformers_adds_is_refused_unless_it_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ARGUMENTS, "dataloader_in_order")
    check_arguments(arguments(tmp_path), STAGES)
    with pytest.raises(sw.ShardwiseError, match="dataloader_in_order False: this shardwise does not know"):
        check_arguments(arguments(tmp_path, dataloader_in_order=False), STAGES)
