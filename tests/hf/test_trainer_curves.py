"""The loss curve of a trainer under a plan is that of the plain Trainer in one process."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed
from transformers.trainer_callback import TrainerCallback

from tests.hf.tiny_trainers import (
    HELD_OUT,
    PLANS,
    ROWS,
    Make,
    arguments,
    assert_close,
    build,
    plain,
    simple,
    trained,
    under,
)

ASKED: dict[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 2, "weight_decay": 0.1, "warmup_steps": 1}


@cache
def expected() -> Any:
    return plain(simple(**ASKED))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.stress) if name == "pp" else name for name in PLANS]
)
def test_losses_norms_and_rates_are_those_of_one_process(name: str) -> None:
    # 11 rows: the last microbatch has one row, and the last round of data ranks has none for some of them.
    for found in under(name, simple(**ASKED)):
        assert_close(found, expected())


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    targets = labels[:, 1:].reshape(-1)
    logits = outputs.logits[:, :-1].reshape(len(targets), -1)
    total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return total / torch.as_tensor(num_items_in_batch)


def with_loss_function(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    args = arguments(folder, microbatches)
    return trainers.Trainer(build(), args, train_dataset=ROWS, compute_loss_func=own_loss, **ours)


def with_mean_loss(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    class Mean(trainers.Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            targets = inputs["labels"][:, 1:].reshape(-1)
            loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].reshape(len(targets), -1), targets)
            return (loss, outputs) if return_outputs else loss

    args = arguments(folder, microbatches, max_grad_norm=0.0, eval_strategy="epoch")
    return Mean(build(), args, train_dataset=ROWS, eval_dataset=HELD_OUT, **ours)


def with_own_optimizer(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    args = arguments(folder, microbatches)
    return trainers.Trainer(model, args, train_dataset=ROWS, optimizers=(optimizer, scheduler), **ours)


def with_frozen_parameters(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    model = build()
    model.model.embed_tokens.requires_grad_(False)
    args = arguments(folder, microbatches, optim="sgd", learning_rate=0.1)
    return trainers.Trainer(model, args, train_dataset=ROWS, **ours)


def grouped(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    rows = [{name: each[: 4 + number % 4] for name, each in row.items()} for number, row in enumerate(ROWS)]

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        def padded(name: str, value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

        ids = padded("input_ids", 0)
        return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids != 0).long()}

    args = arguments(
        folder,
        microbatches,
        train_sampling_strategy="group_by_length",
        num_train_epochs=2,
        eval_strategy="epoch",
        include_num_input_tokens_seen="all",
    )

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    return trainers.Trainer(
        build(),
        args,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=rows[:5],
        compute_metrics=accuracy,
        **ours,
    )


KINDS: dict[str, tuple[Make, str]] = {
    "compute_loss_func": (with_loss_function, "stage 3"),
    "compute_loss of a mean": (with_mean_loss, "stage 2, four ranks"),
    "compute_loss under pp": (with_mean_loss, "pp"),
    "label smoothing": (simple(label_smoothing_factor=0.1, eval_strategy="epoch"), "pp and stage 2"),
    "optimizers=": (with_own_optimizer, "stage 1"),
    "frozen parameters": (with_frozen_parameters, "stage 3"),
    "lengths": (grouped, "stage 1"),
    "lengths under pp": (grouped, "pp"),
    "recomputed activations": (simple(activation_checkpointing=True), "stage 3"),
    "a schedule by metrics": (
        simple(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1, max_steps=3),
        "tp",
    ),
    "rmsprop, cosine": (simple(optim="rmsprop", lr_scheduler_type="cosine"), "replicas"),
}


WIDE = {"lengths under pp", "rmsprop, cosine"}
"""Kinds whose parts others have."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.stress) if kind in WIDE else kind for kind in KINDS]
)
def test_so_are_those_of_other_losses_optimizers_and_data(kind: str) -> None:
    make, name = KINDS[kind]
    wanted = plain(make)
    for found in under(name, make):
        assert_close(found, wanted)


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_a_loss_may_gather_where_some_ranks_have_no_batch(name: str) -> None:
    gathered: list[int] = []

    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        class Gathering(trainers.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
                size = torch.tensor(len(inputs["labels"]))
                gathered.append(int(self.accelerator.gather_for_metrics(size).sum()))
                assert self.accelerator.num_processes == 1
                return super().compute_loss(model, inputs, *args, **more)

        args = arguments(folder, microbatches, eval_strategy="epoch", eval_on_start=True)
        return Gathering(build(), args, train_dataset=ROWS[:10], eval_dataset=HELD_OUT[:1], **ours)

    wanted = plain(make)
    gathered.clear()
    for found in under(name, make):
        assert_close(found, wanted)
    assert 4 in gathered  # two rows of each


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        yield from ROWS


def streamed(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    args = arguments(folder, microbatches, max_steps=4)
    return trainers.Trainer(build(), args, train_dataset=Stream(), eval_dataset=Stream(), **ours)


@pytest.mark.parametrize("name", ["one process", "pp"])
def test_batches_that_a_stream_leaves_over_count_in_the_next_update(name: str) -> None:
    wanted = plain(streamed)
    for found in under(name, streamed):
        assert_close(found, wanted)


def test_a_stream_gives_each_data_rank_its_batches() -> None:
    def wider(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        args = arguments(folder, 2, max_steps=4, per_device_train_batch_size=2 if ours else 4)
        return trainers.Trainer(build(), args, train_dataset=Stream(), eval_dataset=Stream(), **ours)

    def run(trainer: Any) -> Any:
        return [*trained(trainer), {"held out": trainer.evaluate()["eval_loss"]}]

    wanted = plain(wider, run)
    for found in under("stage 3", wider, run):
        assert_close(found, wanted)


class Rates(TrainerCallback):
    """Notes all events, and changes the rate before the second update."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("on_pre_optimizer_step")
        if state.global_step == 1:
            for group in more["optimizer"].param_groups:
                group["lr"] = 0.3

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("on_step_end")
        control.should_training_stop = state.global_step == 3


for _event in (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end"),
    *("on_optimizer_step", "on_evaluate", "on_log", "on_prediction_step", "on_save", "on_predict"),
):
    setattr(
        Rates,
        _event,
        lambda self, args, state, control, _event=_event, **more: self.events.append(_event),
    )


@pytest.mark.parametrize("name", ["stage 3", "pp"])
def test_callbacks_see_the_events_of_the_plain_loop_and_steer_it(name: str) -> None:
    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        args = arguments(folder, 2, num_train_epochs=3, eval_strategy="epoch")
        return trainers.Trainer(
            build(), args, train_dataset=ROWS[:8], eval_dataset=HELD_OUT[:2], callbacks=[Rates()], **ours
        )

    def wider(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        trainer = make(trainers, folder, microbatches, **ours)
        if not ours and PLANS[name][1] == 2:
            trainer._train_batch_size = trainer.args.per_device_train_batch_size = 4
        return trainer

    def run(trainer: Any) -> Any:
        found = trained(trainer)
        (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, Rates)]
        return found, callback.events

    wanted, events = plain(wider, run)
    for found, seen in under(name, make, run):
        assert_close(found, wanted)
        assert seen == events


@pytest.mark.parametrize("name", ["one process", "stage 3", "pp and stage 2"])
def test_predictions_are_those_of_one_process(name: str) -> None:
    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        args = arguments(folder, microbatches, include_for_metrics=["inputs", "loss"])

        def count(prediction: Any) -> dict[str, float]:
            assert len(prediction.losses) == len(prediction.inputs) == len(prediction.predictions)
            return {
                "right": float((prediction.predictions == prediction.label_ids).sum()),
                "size": len(prediction.losses),
            }

        return trainers.Trainer(
            build(),
            args,
            eval_dataset=HELD_OUT,
            compute_metrics=count,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            **ours,
        )

    def run(trainer: Any) -> Any:
        found = trainer.predict(HELD_OUT)
        return found.predictions, found.label_ids, found.metrics["test_loss"], found.metrics["test_right"]

    wanted = plain(make, run)
    for predictions, labels, loss, right in under(name, make, run):
        assert np.array_equal(predictions, wanted[0])
        assert np.array_equal(labels, wanted[1])
        assert loss == pytest.approx(wanted[2], rel=1e-6)
        assert right == wanted[3]


@pytest.mark.parametrize(
    "name", ["stage 3", "pp", *(pytest.param(each, marks=pytest.mark.stress) for each in ("tp", "stage 2, four ranks"))]
)
def test_logs_leave_out_single_microbatches_that_are_not_finite(name: str) -> None:
    spoilt = {ROWS[at]["input_ids"][0].item() for at in (0, 5)}

    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        class Spoilt(trainers.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
                loss = super().compute_loss(model, inputs, *args, **more)
                # Its gradients stay finite: the plain Trainer would train on others.
                return loss + float("nan") if inputs["input_ids"][0, 0].item() in spoilt else loss

        args = arguments(folder, microbatches, num_train_epochs=2, logging_steps=2)
        return Spoilt(build(), args, train_dataset=ROWS, **ours)

    wanted = plain(make)
    for found in under(name, make):
        assert_close(found, wanted)


class Hits:
    """Counts from batch to batch."""

    def __init__(self) -> None:
        self._hits = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        self._hits += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        return {"hits": self._hits} if compute_result else {}


def test_metrics_of_batches_see_all_rows() -> None:
    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        args = arguments(folder, microbatches, batch_eval_metrics=True)
        return trainers.Trainer(build(), args, eval_dataset=HELD_OUT, compute_metrics=Hits(), **ours)

    def run(trainer: Any) -> Any:
        return trainer.evaluate()["eval_hits"]

    assert set(under("stage 3", make, run)) == {plain(make, run)}


def build_t5() -> T5ForConditionalGeneration:
    set_seed(1)
    sizes: Any = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    tokens: Any = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **sizes, **tokens))


@pytest.mark.parametrize("name", ["stage 3", pytest.param("pp", marks=pytest.mark.stress)])
def test_sequences_are_generated_as_in_one_process(name: str) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][:5]} for row in ROWS]

    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        asked = {"predict_with_generate": True, "generation_max_length": 8, "eval_strategy": "epoch"}
        args = arguments(folder, microbatches, of=Seq2SeqTrainingArguments, **asked)
        return trainers.Seq2SeqTrainer(build_t5(), args, train_dataset=rows, eval_dataset=rows[:5], **ours)

    def run(trainer: Any) -> Any:
        found = trained(trainer)
        return found, trainer.predict(rows[:3], num_beams=2).predictions

    wanted, tokens = plain(make, run)
    for found, predictions in under(name, make, run):
        assert_close(found, wanted)
        assert np.array_equal(predictions, tokens)
