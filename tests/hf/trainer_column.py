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


def of_means(trainers: Any) -> Any:
    class Mean(trainers.Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            targets = inputs["labels"][:, 1:].reshape(-1)
            loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].reshape(len(targets), -1), targets)
            return (loss, outputs) if return_outputs else loss

    return Mean


def spoilt(trainers: Any) -> Any:
    """Losses of single microbatches are not finite, and their gradients are."""
    rows = {ROWS[at]["input_ids"][0].item() for at in (0, 5)}

    class Spoilt(trainers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **more)
            return loss + float("nan") if inputs["input_ids"][0, 0].item() in rows else loss

    return Spoilt


def gathering(trainers: Any) -> Any:
    """A loss gathers, also where some ranks have no batch."""

    class Gathering(trainers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            size = int(self.accelerator.gather_for_metrics(torch.tensor(len(inputs["labels"]))).sum())
            assert size >= len(inputs["labels"])
            assert self.accelerator.num_processes == 1
            return super().compute_loss(model, inputs, *args, **more)

    return Gathering


def own_optimizer(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))}


LENGTHS = [{name: each[: 4 + number % 4] for name, each in row.items()} for number, row in enumerate(ROWS)]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids, labels = (
        torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)
        for name, value in (("input_ids", 0), ("labels", -100))
    )
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        yield from ROWS


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


PLATEAU: Any = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
BY_LENGTH: Any = {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "all"}
EPOCHS: Any = {"eval_strategy": "epoch"}
KINDS: dict[str, tuple[Make, str]] = {
    "compute_loss_func": (simple(given=lambda model: {"compute_loss_func": own_loss}), "stage 3"),
    "compute_loss of a mean": (simple(of_means, max_grad_norm=0.0, **EPOCHS), "stage 2, four ranks"),
    "label smoothing": (simple(label_smoothing_factor=0.1, **EPOCHS), "pp and stage 2"),
    "optimizers=": (simple(given=own_optimizer), "stage 1"),
    "lengths": (
        simple(
            rows=LENGTHS,
            held_out=LENGTHS[:5],
            given=lambda model: {"data_collator": padded, "compute_metrics": accuracy},
            num_train_epochs=2,
            **EPOCHS,
            **BY_LENGTH,
        ),
        "pp",
    ),
    "recomputed activations": (simple(activation_checkpointing=True), "stage 3"),
    "a schedule by metrics": (simple(**PLATEAU), "tp"),
    "rmsprop, cosine": (simple(optim="rmsprop", lr_scheduler_type="cosine"), "replicas"),
    "losses that are not finite": (simple(spoilt, num_train_epochs=2, logging_steps=2), "pp"),
    "a loss that gathers": (
        simple(gathering, rows=ROWS[:10], held_out=HELD_OUT[:1], eval_on_start=True, **EPOCHS),
        "stage 3",
    ),
    "batches that a stream leaves over": (simple(rows=Stream(), held_out=Stream(), max_steps=4), "pp"),
    "a stream of data ranks": (streamed_to_ranks, "stage 3"),
    "metrics of batches": (
        simple(given=lambda model: {"compute_metrics": Hits()}, max_steps=1, batch_eval_metrics=True, **EPOCHS),
        "stage 3",
    ),
    **TASKS,
}
"""Settings, each with the plan under which it is tried."""
KINDS["lengths of data ranks"] = KINDS["lengths"][0], "stage 1"


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
    cases=[
        *((name, PLAIN) for name in PLANS if name != "one process"),
        *((name, kind) for kind, (_, name) in KINDS.items()),
    ],
    moves=[
        *((PLAIN, "stage 3"), ("stage 3", "pp"), ("tp", "one process"), ("stage 2, four ranks", PLAIN)),
    ],
    on_device=[("stage 3", PLAIN), ("pp", PLAIN)],
)
