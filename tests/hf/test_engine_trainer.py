"""Trainers beyond the contract of adapters: callbacks, gradients, predictions, classes of others, refusals."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import HfArgumentParser

import shardwise as sw
import shardwise.hf as hf
from shardwise.errors import ConfigError, OptimizerError
from shardwise.hf.rank_batches import BatchesOfRank, shared_rows
from tests.contracts.adapter_cases import refused_on_all
from tests.hf.tiny_trainers import HELD_OUT, PLANS, ROWS, arguments, assert_close, build, plain, simple, trained, under
from tests.properties import tried
from tests.refusals import Refusals

EVENTS = (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end"),
    *("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_evaluate", "on_log", "on_prediction_step"),
    *("on_save", "on_predict"),
)


class Rates(transformers.TrainerCallback):
    """Notes all events, changes the rate before the second update, and ends after the third."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def saw(self, event: str, state: Any, control: Any, **more: Any) -> None:
        self.events.append(event)
        if event == "on_pre_optimizer_step" and state.global_step == 1:
            for group in more["optimizer"].param_groups:
                group["lr"] = 0.3
        if event == "on_step_end":
            control.should_training_stop = state.global_step == 3


def told(event: str) -> Any:
    return lambda self, args, state, control, **more: self.saw(event, state, control, **more)


for _event in EVENTS:
    setattr(Rates, _event, told(_event))


@pytest.mark.parametrize("name", ["stage 3", "pp"])
def test_callbacks_see_the_events_of_the_plain_loop_and_steer_it(name: str) -> None:
    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        size = 2 if ours or PLANS[name][1] == 1 else 4
        args = arguments(folder, 2, num_train_epochs=3, eval_strategy="epoch", per_device_train_batch_size=size)
        given = {"train_dataset": ROWS[:8], "eval_dataset": HELD_OUT[:2], "callbacks": [Rates()]}
        return trainers.Trainer(build(), args, **given, **ours)

    def run(trainer: Any) -> Any:
        found = trained(trainer)
        (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, Rates)]
        return found, callback.events

    wanted, events = plain(make, run)
    for found, seen in under(name, make, run):
        assert_close(found, wanted)
        assert seen == events


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def dropped(model: nn.Module) -> None:
    for name, each in model.named_parameters():
        if "lm_head" in name:
            each.grad = None


def replaced(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad = gradient_of(each) * 0.5


def masked(model: nn.Module) -> None:
    for each in model.parameters():
        gradient_of(each)[:1] = 0


LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "masks": masked,
    "clips": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "replaces": replaced,
    "drops": dropped,
    "zeroes": lambda model: [gradient_of(each).zero_() for each in model.parameters()],
}


@pytest.mark.parametrize(
    ("look", "name"),
    [
        *(("masks", "stage 3"), ("clips", "one process"), ("replaces", "replicas"), ("drops", "pp")),
        *(("drops", "stage 3"), ("zeroes", "stage 2, four ranks"), ("masks", "tp"), ("clips", "pp")),
    ],
)
def test_a_callback_sees_and_changes_the_gradients_of_one_process(look: str, name: str) -> None:
    class Looks(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            LOOKS[look](objects["model"])

    make = simple(given=lambda model: {"callbacks": [Looks()]}, max_steps=3, optim="sgd", learning_rate=1.0)

    def run(trainer: Any) -> Any:
        trainer.train()
        engine = getattr(trainer, "engine", None)
        return trainer.model.state_dict() if engine is None else sw.full_state_dict(engine, rank0_only=False)

    expected = plain(make, run)
    if name in ("tp", "pp") and look != "drops":
        with pytest.raises(OptimizerError, match=r"p\.grad of the model's parameters is whole on no rank"):
            under(name, make, run)
        return
    for found in under(name, make, run):
        torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param("stage 3", marks=pytest.mark.quick), "pp and stage 2"])
def test_predictions_are_those_of_one_process(name: str) -> None:
    def count(prediction: Any) -> dict[str, float]:
        assert len(prediction.losses) == len(prediction.inputs) == len(prediction.predictions)
        right = float((prediction.predictions == prediction.label_ids).sum())
        return {"right": right, "size": len(prediction.losses)}

    given = {"compute_metrics": count, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    make = simple(given=lambda model: given, include_for_metrics=["inputs", "loss"])

    def run(trainer: Any) -> Any:
        found = trainer.predict(HELD_OUT)
        return found.predictions, found.label_ids, found.metrics["test_loss"], found.metrics["test_right"]

    wanted = plain(make, run)
    for predictions, labels, loss, right in under(name, make, run):
        assert np.array_equal(predictions, wanted[0])
        assert np.array_equal(labels, wanted[1])
        assert (loss, right) == (pytest.approx(wanted[2], rel=1e-6), wanted[3])


class Stream(torch.utils.data.IterableDataset[Any]):
    """Five rows, and no length: two microbatches leave one over in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS[:5])


def test_batches_that_are_left_over_where_a_stream_ends_count_in_the_next_update_as_in_the_plain_trainer() -> None:
    make = simple(rows=Stream(), max_steps=4, per_device_train_batch_size=1)

    def run(trainer: Any) -> Any:
        trainer.model_accepts_loss_kwargs = False  # else losses are divided by items, and not by batches
        return trained(trainer)

    wanted = plain(make, run, microbatches=2)
    for found in under("one process", make, run, microbatches=2):
        assert_close(found, wanted)


def test_a_step_whose_loss_is_not_finite_is_skipped_and_left_out_of_the_log() -> None:
    class Spoilt(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            loss: Any = super().compute_loss(model, inputs, *args, **more)
            return loss * float("nan") if self.state.global_step == 1 else loss

    make = simple(lambda trainers: Spoilt, rows=ROWS[:8], max_steps=3, logging_steps=3)

    def run(trainer: Any) -> Any:
        trainer.train()
        return trainer.engine.counters.skipped, trainer.engine.counters.updates, trainer.state.log_history[0]["loss"]

    for skipped, updates, loss in under("stage 3", make, run, microbatches=2):
        assert (skipped, updates) == (1, 2)
        assert np.isfinite(loss)


# What is refused, and what may be extended --------------------------------------------------------------------------


def trainer_on(folder: Path | str, plan: Any = None, of: Any = hf.Trainer, **asked: Any) -> Any:
    return of(build(), arguments(str(folder), 2, **asked), train_dataset=ROWS, plan=plan)


def trains(folder: Path, of: Any) -> None:
    trainer_on(folder, of=of).train()


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


class AsksForAnother(hf.Trainer):
    """Names its method, and calls another one above."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        super().log({})
        model: Any = self.model
        return model.train()


class Above(hf.Trainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        above: Any = super()
        return above.train(*args, **kwargs)


class ByName(hf.Trainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        return hf.Trainer.train(self, *args, **kwargs)


class Noting(hf.Trainer):
    """Extends the step, and the preparation of inputs."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        vars(self).setdefault("noted", []).append(float(loss))
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        vars(self).setdefault("modes", []).append(self.model is not None and self.model.training)
        return super()._prepare_inputs(inputs)


class WithoutBlocks(nn.Module):
    """Three layers that are no list, to be compiled."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(1, 1), nn.LayerNorm(1), nn.Embedding(1, 1)
        hf.Trainer(self, arguments(str(folder), 1, torch_compile=True), train_dataset=ROWS).train()


class Skipping(hf.Trainer):
    """Calls the step of the engine, but not with the last batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.sync_gradients:
            return torch.zeros(())
        return super().training_step(*args, **kwargs)


class OwnLoader(hf.Trainer):
    """Gives all ranks the same rows."""

    def get_train_dataloader(self) -> Any:
        rows: Any = ROWS
        return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=self.data_collator)


def wrapped(method: Any) -> Any:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return called


Wrapped = type("Wrapped", (hf.Trainer,), {"training_step": wrapped(OwnStep.training_step)})


def same_rows_for_all(folder: Path) -> None:
    plan = PLANS["stage 1"][0]

    def on(channel: sw.Channel) -> None:
        args = arguments(str(folder), 2)
        OwnLoader(build(), args, train_dataset=ROWS, plan=plan, channel=channel).train()

    refused_on_all(plan, on)


def script(folder: Path, plan: sw.Plan | None = None, of: Any = hf.TrainingArguments) -> Any:
    """A trainer of a script that is given its plan by a flag."""
    file = folder / "plan.toml"
    file.write_text('sharding.stage = 2\n[precision]\nkeep = ["*norm*"]\n')
    command = ["--output_dir", str(folder), "--shardwise_plan", str(file), "--use_cpu", "--report_to", "none"]
    parser: Any = HfArgumentParser
    (args,) = parser(of).parse_args_into_dataclasses(command)
    rows: Any = ROWS
    return hf.Trainer(build(), args, train_dataset=rows, plan=plan)


REFUSED = Refusals(
    "hf.engine_trainer",
    {
        "more ranks than the world": lambda folder: trainer_on(folder, sw.Plan(mesh=sw.Mesh(pp=2))),
        "microbatches": lambda folder: trainer_on(folder, sw.Plan(merge=sw.Merge(microbatches=4))),
        "sums": lambda folder: trainer_on(folder, sw.Plan(merge=sw.Merge(average=False))),
        "two clips": lambda folder: trainer_on(folder, sw.Plan(clip_grad_norm=0.5), max_grad_norm=2.0),
        "two dtypes": lambda folder: trainer_on(folder, sw.Plan(precision=sw.Precision(compute="float16")), bf16=True),
        "a compiler and no blocks": WithoutBlocks,
        "a plan that is no file": lambda folder: trainer_on(folder, "no such file.toml"),
        "a plan that is none": lambda folder: trainer_on(folder, 3),
        "two plans": lambda folder: script(folder, sw.Plan()),
        "a step of its own": lambda folder: trainer_on(folder, of=OwnStep),
        "a train of its own": lambda folder: trainer_on(folder, of=OwnTrain),
        "a train of its own beside another call": lambda folder: trainer_on(folder, of=AsksForAnother),
        "a loop of its own": lambda folder: trainer_on(folder, of=OwnLoop),
        "a decorated step of its own": lambda folder: trainer_on(folder, of=Wrapped),
        "a step left out": lambda folder: trains(folder, Skipping),
        "the same rows for all": same_rows_for_all,
        "backward": lambda folder: trainer_on(folder).accelerator.backward(torch.ones(())),
        "a clip": lambda folder: trainer_on(folder).accelerator.clip_grad_norm_([], 1.0),
        "no trainer": lambda: hf.trainer_class(dict),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_trainer_cannot_do_under_a_plan_is_refused_in_words(case: str) -> None:
    REFUSED.check(case)


def test_what_arguments_and_flags_say_is_the_plans(tmp_path: Path) -> None:
    plan = trainer_on(tmp_path, bf16=True, max_grad_norm=0.5).plan
    assert (plan.precision.compute, plan.clip_grad_norm) == ("bfloat16", 0.5)
    assert trainer_on(tmp_path, sw.Plan(clip_grad_norm=3.0)).plan.clip_grad_norm == 3.0
    assert trainer_on(tmp_path, max_grad_norm=0.0).plan.clip_grad_norm is None
    for of in (hf.TrainingArguments, hf.Seq2SeqTrainingArguments):
        given = script(tmp_path, of=of).plan
        assert (given.sharding.stage, given.precision.keep) == (2, ("*norm*",))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by the compiler, of what it traces
@pytest.mark.parametrize(
    ("name", "num_compiled"),
    [("one process", 2 * (6 + 3)), ("stage 3", 2 * (6 + 4)), ("pp and stage 2", 2 * (6 + 3)), ("tp", 2 * 2 * (2 + 3))],
)
def test_blocks_that_the_arguments_ask_to_compile_run_compiled_to_the_same_losses(name: str, num_compiled: int) -> None:
    """Two blocks, six microbatches of two updates, three batches of an evaluation: in which ranks take turns evenly.

    Trials of shapes run blocks as they are, and so does the proof of tp in the four microbatches of the first update.
    """
    torch.compiler.reset()  # it compiles the code of a block a few times, and no more
    calls = {True: torch.zeros(()), False: torch.zeros(())}
    """How often blocks ran, compiled and not: added up by what runs, so that a fall-back is seen too."""

    class Counted(nn.SiLU):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            calls[torch.compiler.is_compiling()].add_(1)
            return super().forward(given)

    def given(model: Any) -> Mapping[str, Any]:
        for layer in model.model.layers:
            layer.mlp.act_fn = Counted()
        return {}

    asked: Any = {"given": given, "max_steps": 2, "eval_strategy": "epoch"}
    eager = under(name, simple(**asked))
    num_calls = int(calls[False])
    for found, other in zip(under(name, simple(**asked, torch_compile_backend="eager")), eager, strict=True):
        assert_close(found, other)
    assert (int(calls[True]), int(calls[False])) == (num_compiled, 2 * num_calls - num_compiled)


def test_methods_that_call_those_of_the_trainer_extend_it(tmp_path: Path) -> None:
    trains(tmp_path, ByName)
    trains(tmp_path, Above)
    assert trainer_on(tmp_path, of=type("Timed", (hf.Trainer,), {"training_step": wrapped(Noting.training_step)}))
    args = arguments(str(tmp_path), 2, max_steps=2, eval_strategy="steps", eval_steps=1)
    rows: Any = ROWS
    trainer: Any = Noting(build(), args, train_dataset=rows, eval_dataset=HELD_OUT)
    trainer.train()
    assert trainer.noted[::2] == [0.0, 0.0]
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert trainer.noted[1::2] == pytest.approx(losses, rel=1e-6)
    assert trainer.modes == [True, True, False, False, False] * 2


def test_classes_of_other_libraries_train_under_a_plan(tmp_path: Path) -> None:
    class Other(transformers.Trainer):
        def __init__(self, *, rows: Any, **kwargs: Any) -> None:
            super().__init__(train_dataset=rows, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            return 2 * super().compute_loss(model, inputs, *args, **more)

    @dataclass
    class Arguments(hf.PlanArguments, transformers.TrainingArguments):
        pass

    assert hf.trainer_class(transformers.Trainer) is hf.Trainer
    assert hf.trainer_class(hf.Seq2SeqTrainer) is hf.Seq2SeqTrainer
    made: Any = hf.trainer_class(Other)
    args = arguments(str(tmp_path), 2, of=Arguments, max_steps=1, shardwise_plan=None)
    trainer: Any = made(model=build(), args=args, rows=ROWS, plan=sw.Plan(sharding=sw.Sharding(stage=2)))
    trainer.train()
    assert trainer.engine.plan.sharding.stage == 2
    assert isinstance(trainer, Other)
    other: Any = Other(model=build(), args=arguments(str(tmp_path), 2, max_steps=1), rows=ROWS)
    other.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(other.state.log_history[0]["loss"], rel=1e-6)


def test_a_missing_or_old_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.hf.packages import need_packages

    with monkeypatch.context() as patch:
        patch.delattr(transformers.Trainer, "_run_epoch")
        with pytest.raises(ConfigError, match=r"extends Trainer._run_epoch, which transformers [\d.]+ does not have"):
            need_packages()
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r'needs the package accelerate; pip install "shardwise\[hf\]"'):
        need_packages()


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


def test_ranks_share_the_rows_of_a_last_round_evenly() -> None:
    first = list(range(4))
    assert [shared_rows([8, 9, 10, 11], first, 2, own) for own in range(2)] == [[8, 9], [10, 11]]
    # Not evenly: the first ones come again, until the round is full.
    shares = [shared_rows([8, 9, 10, 11], first, 3, own) for own in range(3)]
    assert shares == [[8, 9, 10, 11], [0, 1, 2, 3], [0, 1, 2, 3]]
