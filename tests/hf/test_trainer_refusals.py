"""What a trainer cannot do under a plan is refused in words when it is made; and plans come by flags and files."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import HfArgumentParser

import shardwise as sw
import shardwise.hf as hf
from shardwise.errors import ConfigError, OptimizerError, PlanError
from shardwise.hf import packages
from shardwise.hf.rank_batches import BatchesOfRank
from tests.hf.tiny_trainers import HELD_OUT, ROWS, arguments, build, under
from tests.properties import tried


def trainer_on(tmp_path: Path, plan: Any = None, of: Any = hf.Trainer, **asked: Any) -> Any:
    return of(build(), arguments(str(tmp_path), 2, **asked), train_dataset=ROWS, plan=plan)


@pytest.mark.parametrize(
    ("plan", "asked", "words"),
    [
        (sw.Plan(mesh=sw.Mesh(pp=2)), {}, "asks for 2 ranks, but the world has 1"),
        (sw.Plan(merge=sw.Merge(microbatches=4)), {}, "merge.microbatches = 4, and --gradient_accumulation_steps 2"),
        (sw.Plan(merge=sw.Merge(average=False)), {}, "merge.average = false"),
        (
            sw.Plan(clip_grad_norm=0.5),
            {"max_grad_norm": 2.0},
            "clip_grad_norm = 0.5 of the plan and --max_grad_norm 2.0",
        ),
        (sw.Plan(precision=sw.Precision(compute="float16")), {"bf16": True}, "--bf16 and precision.compute"),
        ("no such file.toml", {}, "--shardwise_plan no such file.toml cannot be read"),
        (3, {}, "plan: 3 is neither a Plan nor the path of a TOML file"),
    ],
)
def test_plans_that_say_other_than_the_arguments(plan: Any, asked: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        trainer_on(tmp_path, plan, **asked)


def test_what_arguments_say_of_precision_and_clipping_is_the_plans(tmp_path: Path) -> None:
    plan = trainer_on(tmp_path, bf16=True, max_grad_norm=0.5).plan
    assert (plan.precision.compute, plan.clip_grad_norm) == ("bfloat16", 0.5)
    assert trainer_on(tmp_path, sw.Plan(clip_grad_norm=3.0)).plan.clip_grad_norm == 3.0
    assert trainer_on(tmp_path, max_grad_norm=0.0).plan.clip_grad_norm is None


def test_a_script_gives_its_plan_by_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('sharding.stage = 2\n[precision]\nkeep = ["*norm*"]\n')
    command = ["--output_dir", str(tmp_path), "--shardwise_plan", str(file), "--use_cpu", "--report_to", "none"]
    parser: Any = HfArgumentParser
    (args,) = parser(hf.TrainingArguments).parse_args_into_dataclasses(command)
    trainer: Any = hf.Trainer(build(), args, train_dataset=ROWS)
    assert trainer.plan.sharding.stage == 2
    assert trainer.plan.precision.keep == ("*norm*",)
    with pytest.raises(PlanError, match="two plans"):
        hf.Trainer(build(), args, train_dataset=ROWS, plan=sw.Plan())
    (sequences,) = parser(hf.Seq2SeqTrainingArguments).parse_args_into_dataclasses(command)
    assert sequences.shardwise_plan == str(file)


class OwnStep(hf.Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


class OwnLoop(hf.Trainer):
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        return None


class OwnTrain(hf.Trainer):
    """Names its method, of another object."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        return model.train()


class ByName(hf.Trainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        return hf.Trainer.train(self, *args, **kwargs)


class Noting(hf.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        vars(self).setdefault("noted", []).append(float(loss))
        return loss


class Skipping(hf.Trainer):
    """Calls the step of the engine, but not with the last batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.sync_gradients:
            return torch.zeros(())
        return super().training_step(*args, **kwargs)


def test_methods_that_take_the_place_of_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"OwnStep.training_step does not call super\(\).training_step"):
        trainer_on(tmp_path, of=OwnStep)
    with pytest.raises(ConfigError, match=r"OwnTrain.train does not call super\(\).train"):
        trainer_on(tmp_path, of=OwnTrain)
    trainer_on(tmp_path, of=ByName).train()
    with pytest.raises(ConfigError, match=r"OwnLoop._inner_training_loop does not call super"):
        trainer_on(tmp_path, of=OwnLoop)
    with pytest.raises(OptimizerError, match="the engine made no update"):
        trainer_on(tmp_path, of=Skipping).train()


def test_classes_of_other_libraries_share_no_attribute_by_accident(tmp_path: Path) -> None:
    plain = transformers.Trainer(build(), arguments(str(tmp_path), 2), train_dataset=ROWS)
    ours = trainer_on(tmp_path)
    for each in (plain, ours):
        each.train()
    added = {name for name in dir(ours) if not name.startswith(("__", "_sw_"))} - set(dir(plain))
    assert added == {"plan", "channel", "engine"}


class Preparing(hf.Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        vars(self).setdefault("modes", []).append(self.model is not None and self.model.training)
        return super()._prepare_inputs(inputs)


def test_inputs_are_prepared_in_the_mode_of_the_loop(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), 2, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer: Any = Preparing(build(), args, train_dataset=ROWS, eval_dataset=HELD_OUT)
    trainer.train()
    assert trainer.modes == [True, True, False, False, False] * 2


def wrapped(method: Any) -> Any:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return called


def test_a_decorator_hides_no_call_of_super(tmp_path: Path) -> None:
    class Timed(hf.Trainer):
        training_step = wrapped(Noting.training_step)

    with pytest.raises(ConfigError, match="does not call"):
        trainer_on(tmp_path, of=type("Own", (hf.Trainer,), {"training_step": wrapped(OwnStep.training_step)}))
    assert trainer_on(tmp_path, of=Timed)


def test_a_method_that_extends_a_step_sees_the_loss_of_the_update(tmp_path: Path) -> None:
    trainer = trainer_on(tmp_path, of=Noting, max_steps=2)
    trainer.train()
    assert trainer.noted[::2] == [0.0, 0.0]
    assert trainer.noted[1::2] == pytest.approx([each["loss"] for each in trainer.state.log_history[:2]], rel=1e-6)


class OwnLoader(hf.Trainer):
    def get_train_dataloader(self) -> Any:
        rows: Any = ROWS
        return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=self.data_collator)


def test_a_loader_that_gives_all_ranks_the_same_rows() -> None:
    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        return OwnLoader(build(), arguments(folder, microbatches), train_dataset=ROWS, **ours)

    with pytest.raises(ConfigError, match=r"each of 2 data ranks would train on all rows. Return self.accelerator"):
        under("stage 1", make)
    assert under("pp", make)


def test_backward_outside_of_the_engine(tmp_path: Path) -> None:
    trainer = trainer_on(tmp_path)
    with pytest.raises(sw.ShardwiseError, match="would train nothing"):
        trainer.accelerator.backward(torch.ones(()))
    with pytest.raises(sw.ShardwiseError, match="Set --max_grad_norm"):
        trainer.accelerator.clip_grad_norm_([], 1.0)


def test_an_epoch_whose_batches_data_ranks_in_step_cannot_share_evenly(tmp_path: Path) -> None:
    plan = sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=3))

    def losses(of: Any, k: int, **given: Any) -> list[float]:
        args = arguments(str(tmp_path), k, per_device_train_batch_size=4, logging_steps=1)
        trainer = of(build(), args, train_dataset=ROWS, **given)
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    expected = losses(transformers.Trainer, 2)
    for found in sw.simulate(4, lambda channel: losses(hf.Trainer, 1, plan=plan, channel=channel)):
        assert found == pytest.approx(expected, rel=1e-5)


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("no module", name=name)

    monkeypatch.setattr(packages, "import_module", missing)
    with pytest.raises(ConfigError, match=r'needs the package accelerate; pip install "shardwise\[hf\]"'):
        packages.need_packages()

    class Old:
        Trainer = object
        __version__ = "4.0"

    monkeypatch.setattr(packages, "import_module", lambda name: Old)
    with pytest.raises(ConfigError, match=r"extends Trainer._run_epoch, which transformers 4.0 does not have"):
        packages.need_packages()


def test_a_class_of_trainers_is_made_of_any_that_derives_from_the_trainer_of_transformers() -> None:
    assert hf.trainer_class(transformers.Trainer) is hf.Trainer
    assert hf.trainer_class(hf.Seq2SeqTrainer) is hf.Seq2SeqTrainer
    with pytest.raises(
        ConfigError, match=r"derives from transformers.Trainer, such as trl.SFTTrainer, not <class 'dict'"
    ):
        hf.trainer_class(dict)


def test_classes_of_other_libraries_train_under_a_plan(tmp_path: Path) -> None:
    class Other(transformers.Trainer):
        def __init__(self, *, rows: Any, **kwargs: Any) -> None:
            super().__init__(train_dataset=rows, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            return 2 * super().compute_loss(model, inputs, *args, **more)

    @dataclass
    class Arguments(hf.PlanArguments, transformers.TrainingArguments):
        pass

    made: Any = hf.trainer_class(Other)
    args = arguments(str(tmp_path), 2, of=Arguments, max_steps=1, shardwise_plan=None)
    trainer: Any = made(model=build(), args=args, rows=ROWS, plan=sw.Plan(sharding=sw.Sharding(stage=2)))
    trainer.train()
    assert trainer.engine.plan.sharding.stage == 2
    assert isinstance(trainer, Other)
    plain: Any = Other(model=build(), args=arguments(str(tmp_path), 2, max_steps=1), rows=ROWS)
    plain.train()
    loss = trainer.state.log_history[0]["loss"]
    assert loss == pytest.approx(plain.state.log_history[0]["loss"], rel=1e-6)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5), st.booleans())
@tried(60)
def test_data_ranks_share_the_batches_of_one_process(rows: int, size: int, ranks: int, drop_last: bool) -> None:
    batches = torch.utils.data.BatchSampler(range(rows), size, drop_last)
    shares = [BatchesOfRank(batches, ranks, rank) for rank in range(ranks)]
    as_many = [list(share) for share in shares]
    for share in shares:
        share.takes_uneven_rounds = True
    found = [list(share) for share in shares]
    assert {len(share) for share in shares} == {len(each) for each in found} == {len(found[0])}
    taken = [each for together in zip(*found, strict=True) for each in together if each]
    whole = [*batches]
    assert taken == (whole[: len(whole) // ranks * ranks] if drop_last else whole)
    # What `gather_for_metrics` leaves of loops that know no empty batch: the first rows are those of the dataset.
    gathered = [row for together in zip(*as_many, strict=True) for each in together for row in each]
    assert gathered[: sum(map(len, taken))] == [row for each in taken for row in each]


def test_an_evaluation_needs_no_training(tmp_path: Path) -> None:
    trainer = hf.Trainer(build(), arguments(str(tmp_path), 1), eval_dataset={"a": HELD_OUT, "b": HELD_OUT[:1]})
    found = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= found.keys()
