"""A tiny model and its rows, trained by the plain Trainer in one process and by ours under plans."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import shardwise as sw
import shardwise.hf as hf

VOCABULARY = 64

PLANS: Mapping[str, tuple[sw.Plan, int]] = {
    "one process": (sw.Plan(), 1),
    "stage 1": (sw.Plan(mesh=sw.Mesh(dp_shard=2)), 2),
    "stage 3": (sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)), 2),
    "stage 2, four ranks": (sw.Plan(mesh=sw.Mesh(dp_shard=4), sharding=sw.Sharding(stage=2)), 4),
    "replicas": (sw.Plan(mesh=sw.Mesh(dp_replicate=2), sharding=sw.Sharding(stage=0)), 2),
    "pp": (sw.Plan(mesh=sw.Mesh(pp=2)), 1),
    "tp": (sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")), 1),
    "pp and stage 2": (sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=2)), 2),
}
"""By name a plan, and its data ranks: so many times fewer microbatches make an update of a rank."""


def build() -> LlamaForCausalLM:
    """The same values at each call."""
    set_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def rows_of(count: int, *, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Rows with unlike numbers of tokens that count."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % (length - 2)] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


ROWS = rows_of(11)
HELD_OUT = rows_of(16)[11:]

Make = Callable[..., Any]
"""f(transformers or shardwise.hf, folder, microbatches of a rank, plan=, channel=) -> a trainer."""


def arguments(folder: str, microbatches: int, *, of: Any = transformers.TrainingArguments, **asked: Any) -> Any:
    """What all runs have, and what one asks for."""
    settings = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": microbatches,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **asked,
    }
    return of(output_dir=folder, **settings)


def simple(
    kind: Callable[[Any], Any] = lambda trainers: trainers.Trainer,
    *,
    rows: Any = ROWS,
    held_out: Any = HELD_OUT,
    given: Callable[[Any], Mapping[str, Any]] = lambda model: {},
    **asked: Any,
) -> Make:
    """Trainers with these arguments. kind: of transformers or shardwise.hf, their class. given: more, for a model."""

    def make(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        model = build()
        args = arguments(folder, microbatches, **asked)
        return kind(trainers)(model, args, train_dataset=rows, eval_dataset=held_out, **given(model), **ours)

    return make


Run = Callable[[Any], Any]
"""Trains, and gives what is compared."""


def logged(trainer: Any) -> list[dict[str, float]]:
    """What a trainer has logged, without times."""
    times = ("runtime", "per_second", "epoch", "flos")
    return [
        {name: value for name, value in each.items() if not any(word in name for word in times)}
        for each in trainer.state.log_history
    ]


def trained(trainer: Any) -> list[dict[str, float]]:
    """Train, and give what was logged."""
    trainer.train()
    return logged(trainer)


def plain(make: Make, run: Run = trained, *, microbatches: int = 4, folder: str | None = None) -> Any:
    """What the plain Trainer gives in one process."""
    return run(make(transformers, folder or tempfile.mkdtemp(), microbatches))


def under(name: str, make: Make, run: Run = trained, *, microbatches: int = 4, folder: str | None = None) -> list[Any]:
    """What each rank of a plan gives. microbatches: of all data ranks together."""
    plan, num_data_ranks = PLANS[name]
    shared = folder or tempfile.mkdtemp()

    def on(channel: sw.Channel) -> Any:
        return run(make(hf, shared, microbatches // num_data_ranks, plan=plan, channel=channel))

    return sw.simulate(plan.mesh.size, on)


def assert_close(found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> None:
    """Equal within the error of float32 sums in another order."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert abs(one[name] - value) <= 1e-5 * abs(value) + 1e-7, (name, one[name], value)
