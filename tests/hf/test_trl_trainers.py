"""The trainers of TRL under a plan, against plain TRL in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset

import shardwise as sw
from shardwise.hf import trainer_class
from tests.hf.example_tasks import causal_language_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
"""TRL calls transformers by names that end with its version 6."""

LAYERS = {
    f"model.layers.*.{name}": "row" if name in ("self_attn.o_proj", "mlp.down_proj") else "column"
    for name in (
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
    )
}
PLANS = {
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    # Its head reads the weight of lm_head itself, which stays whole.
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=LAYERS)),
}


def words(numbers: np.random.Generator, most: int) -> str:
    return " ".join(f"w{each}" for each in numbers.integers(0, 29, numbers.integers(2, most)))


def rows(names: list[str]) -> Dataset:
    numbers = np.random.default_rng(0)
    return Dataset.from_list([{name: words(numbers, 6) + " " for name in names} for _ in range(16)])


def trained(kind: str, folder: Path, plan: sw.Plan | None = None, channel: sw.Channel | None = None) -> Any:
    base, config, names = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, ["prompt", "completion"]),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, ["prompt", "chosen", "rejected"]),
    }[kind]
    build = causal_language_model().build
    more: dict[str, Any] = {"ref_model": build()} if kind == "dpo" else {}
    with torch.no_grad():
        for parameter in more["ref_model"].parameters() if more else ():
            parameter.mul_(1.1)
    trainer = (base if plan is None else trainer_class(base))(
        model=build(),
        args=config(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            adam_epsilon=1e-4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2 // (1 if plan is None else plan.mesh.num_data_ranks),
            max_length=16,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=rows(names),
        processing_class=tokenizer(),
        **more,
        **({} if plan is None else {"plan": plan, "channel": channel}),
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    if plan is None:
        return losses, dict(trainer.model.state_dict())
    with trainer.engine.whole(optimizer=False):
        return losses, {name: each.clone() for name, each in trainer.model.state_dict().items()}


QUICK = {("sft", "tp"), ("dpo", "stage 3")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.stress)
        for kind in ("sft", "dpo")
        for name in PLANS
    ],
)
def test_losses_and_weights_are_those_of_plain_trl(kind: str, name: str, tmp_path: Path) -> None:
    losses, weights = trained(kind, tmp_path / "plain")
    assert len(losses) == 3
    for found, whole in sw.simulate(2, lambda channel: trained(kind, tmp_path / "plan", PLANS[name], channel)):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for each, weight in weights.items():
            torch.testing.assert_close(whole[each], weight, rtol=1e-4, atol=2e-6)


def answering(folder: Path, plan: sw.Plan | None, channel: sw.Channel | None = None) -> list[dict[str, float]]:
    """What a trainer logs that generates what it trains on."""
    trainer = (trl.GRPOTrainer if plan is None else trainer_class(trl.GRPOTrainer))(
        model=causal_language_model().build(),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            activation_checkpointing=False,
            num_generations=4,
            num_iterations=2,
            max_completion_length=4,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=rows(["prompt"]),
        processing_class=tokenizer(),
        reward_funcs=lambda completions, **_: [float(at + len(each)) for at, each in enumerate(completions)],
        **({} if plan is None else {"plan": plan, "channel": channel}),
    )
    trainer.train()
    names = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length")
    return [{name: each.get(name, 0.0) for name in names} for each in trainer.state.log_history]


def test_a_trainer_that_generates_trains_on_one_rank_to_the_bit(tmp_path: Path) -> None:
    found = answering(tmp_path, sw.Plan())
    assert found == answering(tmp_path, None)
    assert any(each["loss"] for each in found)


def test_losses_of_a_packed_evaluation_count_the_rows_of_the_dataset(tmp_path: Path) -> None:
    def evaluated(plan: sw.Plan | None, channel: sw.Channel | None = None) -> float:
        config = trl.SFTConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            packing=True,
            eval_packing=True,
            max_length=8,
            per_device_eval_batch_size=2,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = (trl.SFTTrainer if plan is None else trainer_class(trl.SFTTrainer))(
            model=causal_language_model().build(),
            args=config,
            train_dataset=rows(["text"]),
            eval_dataset=rows(["text"]).select(range(11)),
            processing_class=tokenizer(),
            **({} if plan is None else {"plan": plan, "channel": channel}),
        )
        assert len(trainer.eval_dataset) % 2 == 1
        return float(trainer.evaluate()["eval_loss"])

    expected = evaluated(None)
    assert evaluated(sw.Plan()) == expected
    for found in sw.simulate(2, lambda channel: evaluated(PLANS["stage 3"], channel)):
        assert found == pytest.approx(expected, rel=1e-5)


def test_reference_values_computed_before_are_those_of_plain_trl(tmp_path: Path) -> None:
    def computed(name: str, plan: sw.Plan | None, channel: sw.Channel | None = None) -> Any:
        folder = tmp_path / name
        if not folder.exists():
            # All ranks have one data set, whose folder has what the first one computes.
            rows(["prompt", "chosen", "rejected"]).select(range(13)).save_to_disk(str(folder))
        if channel is not None:
            channel.exchange(b"", purpose="the data set is there")
        trainer = (trl.DPOTrainer if plan is None else trainer_class(trl.DPOTrainer))(
            model=causal_language_model().build(),
            args=trl.DPOConfig(
                output_dir=str(tmp_path / f"of {name}"),
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=2,
                precompute_ref_log_probs=True,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.load_from_disk(str(folder)),
            processing_class=tokenizer(),
            **({} if plan is None else {"plan": plan, "channel": channel}),
        )
        return [np.array(trainer.train_dataset[f"ref_{each}_logps"]) for each in ("chosen", "rejected")]

    expected = computed("plain", None)
    assert len(expected[0]) == 13
    for found in sw.simulate(2, lambda channel: computed("plan", PLANS["stage 3"], channel)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
