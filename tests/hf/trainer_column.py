"""The column of transformers in the contract of adapters: trainers as scripts make them, plain and under plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import shardwise as sw
from shardwise import hf
from tests.contracts.adapter_cases import PLAIN, Asked, Column, Outcome
from tests.hf.example_tasks import TASKS
from tests.hf.tiny_trainers import HELD_OUT, PLANS, ROWS, Make, arguments, build, logged, simple

MICROBATCHES = 4
"""Of an update, on all data ranks together."""
ASKED: Mapping[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 2, "weight_decay": 0.1, "warmup_steps": 1}


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

    asked: Any = {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "all"}
    args = arguments(folder, microbatches, num_train_epochs=2, eval_strategy="epoch", **asked)

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    given = {"data_collator": collate, "train_dataset": rows, "eval_dataset": rows[:5], "compute_metrics": accuracy}
    return trainers.Trainer(build(), args, **given, **ours)


def spoilt(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    """Losses of single microbatches are not finite, and their gradients are."""
    rows = {ROWS[at]["input_ids"][0].item() for at in (0, 5)}

    class Spoilt(trainers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **more)
            return loss + float("nan") if inputs["input_ids"][0, 0].item() in rows else loss

    args = arguments(folder, microbatches, num_train_epochs=2, logging_steps=2)
    return Spoilt(build(), args, train_dataset=ROWS, **ours)


def gathering(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    """A loss gathers, also where some ranks have no batch."""

    class Gathering(trainers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            size = int(self.accelerator.gather_for_metrics(torch.tensor(len(inputs["labels"]))).sum())
            assert size >= len(inputs["labels"])
            assert self.accelerator.num_processes == 1
            return super().compute_loss(model, inputs, *args, **more)

    args = arguments(folder, microbatches, eval_strategy="epoch", eval_on_start=True)
    return Gathering(build(), args, train_dataset=ROWS[:10], eval_dataset=HELD_OUT[:1], **ours)


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        yield from ROWS


def streamed(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    args = arguments(folder, microbatches, max_steps=4)
    return trainers.Trainer(build(), args, train_dataset=Stream(), eval_dataset=Stream(), **ours)


def streamed_to_ranks(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    """Each data rank has its batches of a stream; the plain one has as many rows in one."""
    size = 2 if ours else 4
    evaluated: Any = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2}
    args = arguments(folder, 2, max_steps=4, per_device_train_batch_size=size, **evaluated)
    return trainers.Trainer(build(), args, train_dataset=Stream(), eval_dataset=Stream(), **ours)


class Hits:
    """Counts from batch to batch."""

    def __init__(self) -> None:
        self._hits = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        self._hits += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        return {"hits": self._hits} if compute_result else {}


def counting(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
    args = arguments(folder, microbatches, max_steps=1, batch_eval_metrics=True, eval_strategy="epoch")
    given = {"train_dataset": ROWS, "eval_dataset": HELD_OUT, "compute_metrics": Hits()}
    return trainers.Trainer(build(), args, **given, **ours)


PLATEAU: Any = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
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
    "a schedule by metrics": (simple(**PLATEAU), "tp"),
    "rmsprop, cosine": (simple(optim="rmsprop", lr_scheduler_type="cosine"), "replicas"),
    "losses that are not finite": (spoilt, "stage 3"),
    "losses that are not finite, under pp": (spoilt, "pp"),
    "a loss that gathers": (gathering, "stage 3"),
    "batches that a stream leaves over": (streamed, "pp"),
    "a stream of data ranks": (streamed_to_ranks, "stage 3"),
    "metrics of batches": (counting, "stage 3"),
    **TASKS,
}
"""Settings, each with the plan under which it is tried."""


def _trained(plan: sw.Plan | None, channel: sw.Channel | None, asked: Asked) -> Outcome:
    folder = asked.folder or Path()
    saving = {"save_strategy": "steps", "save_steps": 3} if asked.saves or asked.resumes else {}
    make = simple(**{**ASKED, **saving}) if asked.setting == PLAIN else KINDS[asked.setting][0]
    output = str(folder / "again" if asked.resumes else folder)
    if plan is None:
        trainer = make(transformers, output, MICROBATCHES)
    else:
        trainer = make(hf, output, MICROBATCHES // plan.mesh.num_data_ranks, plan=plan, channel=channel)
    if asked.device is not None:
        # As transformers has it where its own devices are.
        vars(trainer.args)["_setup_devices"] = asked.device
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if asked.resumes else None)
    if asked.device is not None:
        assert trainer.accelerator.device == asked.device
    return Outcome(figures=[each for each in logged(trainer) if asked.setting != PLAIN or "train_loss" not in each])


COLUMN = Column(
    plans={name: plan for name, (plan, _) in PLANS.items()},
    train=_trained,
    # 11 rows: the last microbatch has one row, and the last round of data ranks has none for some of them.
    cases=[*((name, PLAIN) for name in PLANS), *((name, kind) for kind, (_, name) in KINDS.items())],
    moves=[
        *((PLAIN, "stage 3"), ("stage 3", "pp"), ("pp", PLAIN), ("tp", "one process")),
        ("stage 2, four ranks", PLAIN),
    ],
    on_device=[("stage 3", PLAIN), ("pp", PLAIN), ("tp", PLAIN)],
)
