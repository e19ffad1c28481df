"""The table of what a trainer under a plan does with each field of TrainingArguments."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import transformers

import shardwise as sw
from shardwise import hf
from shardwise.errors import ConfigError
from shardwise.hf.arguments import ARGUMENTS, KNOWN_CLASSES, check_arguments
from tests.hf.example_tasks import causal_language_model

STAGES = sw.Mesh(pp=2)


def arguments(folder: Path, **given: Any) -> Any:
    made = hf.Seq2SeqTrainingArguments(output_dir=str(folder), use_cpu=True)
    # Some check themselves for what is installed, and for a device.
    for name, value in given.items():
        setattr(made, name, value)
    return made


def test_the_table_has_every_field_of_transformers_and_no_other() -> None:
    known = {each.name for kind in KNOWN_CLASSES for each in dataclasses.fields(kind)}
    assert set(ARGUMENTS) == known


def test_defaults_are_taken(tmp_path: Path) -> None:
    for mesh in (sw.Mesh(), STAGES):
        check_arguments(arguments(tmp_path), mesh)
        check_arguments(transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True), mesh)


REFUSED: dict[str, Any] = {
    "optim": "lomo",
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "torch_compile": True,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "auto_find_batch_size": True,
    "eval_use_gather_object": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "fsdp": True,
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "parallelism_config": object(),
    "debug": [transformers.debug_utils.DebugOption.UNDERFLOW_OVERFLOW],
    "accelerator_config": transformers.trainer_pt_utils.AcceleratorConfig(split_batches=True),
}


def test_every_field_that_the_table_refuses_is_tried_here() -> None:
    assert set(REFUSED) == {name for name, found in ARGUMENTS.items() if any(each.is_refused for each in found)}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_value_is_named_with_the_way_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_arguments(arguments(tmp_path, **{name: REFUSED[name]}), STAGES)
    (problem,) = error.value.problems
    assert problem.startswith(f"--{name} ")
    assert any(treatment.text in problem for treatment in ARGUMENTS[name])


@pytest.mark.parametrize("name", ["adalomo", "apollo_adamw_layerwise", "schedule_free_sgd"])
def test_optimizers_that_update_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--optim {name}: it "):
        check_arguments(arguments(tmp_path, optim=name), STAGES)


def test_all_problems_come_at_once_when_a_trainer_is_made(tmp_path: Path) -> None:
    task = causal_language_model()
    given = arguments(tmp_path, auto_find_batch_size=True, bf16_full_eval=True)
    with pytest.raises(ConfigError) as error:
        hf.Trainer(model=task.build(), args=given, train_dataset=task.rows)
    assert [problem.split()[0] for problem in error.value.problems] == ["--bf16_full_eval", "--auto_find_batch_size"]


def test_a_field_that_a_newer_transformers_adds_is_refused_unless_it_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ARGUMENTS, "dataloader_in_order")
    check_arguments(arguments(tmp_path), STAGES)
    with pytest.raises(ConfigError, match="dataloader_in_order False: this shardwise does not know"):
        check_arguments(arguments(tmp_path, dataloader_in_order=False), STAGES)


def test_fields_of_another_library_are_its_trainers(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Config(hf.TrainingArguments):
        beta: float = 0.1

    check_arguments(Config(output_dir=str(tmp_path), use_cpu=True, beta=0.5), STAGES)
