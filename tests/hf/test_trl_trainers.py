"""The trainers of TRL under a plan, against plain TRL in one process."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
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
PP = sw.Plan(mesh=sw.Mesh(pp=2))
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


def talks() -> Dataset:
    """Prompts and answers, by turns."""
    numbers = np.random.default_rng(0)
    turns = ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": words(numbers, 4)} for role in turns]} for _ in range(16)]
    )


def talking_tokenizer() -> Any:
    made = copy.deepcopy(tokenizer())
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} [EOS] {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    return made


LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def trained(
    kind: str, folder: Path, plan: sw.Plan | None = None, channel: sw.Channel | None = None, **settings: Any
) -> Any:
    """What a trainer logs, and its weights. Of the settings, `k` is the number of microbatches of one process."""
    base, config, names = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, ["prompt", "completion"]),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, ["prompt", "chosen", "rejected"]),
    }[kind]
    build = causal_language_model().build
    k, lora, resume = settings.pop("k", 2), settings.pop("lora", None), settings.pop("resume", None)
    dataset = talks() if settings.get("assistant_only_loss") else rows(["text"] if settings.get("packing") else names)
    if (on_disk := settings.pop("on_disk", None)) is not None:
        dataset = Dataset.load_from_disk(on_disk)
    more: dict[str, Any] = {}
    if lora is not None:
        torch.manual_seed(0)
        more["peft_config"] = peft.LoraConfig(**lora)
    elif kind == "dpo" and not settings.get("precompute_ref_log_probs"):
        more["ref_model"] = build()
        with torch.no_grad():
            for parameter in more["ref_model"].parameters():
                parameter.mul_(1.1)
    trainer = (base if plan is None else trainer_class(base))(
        model=build(),
        args=config(
            output_dir=str(folder),
            **{
                "use_cpu": True,
                "bf16": False,
                "activation_checkpointing": False,
                "max_steps": 3,
                "logging_steps": 1,
                "learning_rate": 1e-2,
                "adam_epsilon": 1e-4,
                "per_device_train_batch_size": 2,
                "per_device_eval_batch_size": 2,
                "gradient_accumulation_steps": k // (1 if plan is None else plan.mesh.num_data_ranks),
                "max_length": 16,
                "save_strategy": "no",
                "disable_tqdm": True,
                "report_to": "none",
                **settings,
            },
        ),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(5)),
        processing_class=talking_tokenizer() if settings.get("assistant_only_loss") else tokenizer(),
        **more,
        **({} if plan is None else {"plan": plan, "channel": channel}),
    )
    trainer.train(resume_from_checkpoint=resume)
    history = [
        {name: each for name, each in logs.items() if not any(word in name for word in ("runtime", "second", "flos"))}
        for logs in trainer.state.log_history
    ]
    if plan is None:
        return history, dict(trainer.model.state_dict())
    with trainer.engine.whole(optimizer=False):
        return history, {name: each.clone() for name, each in trainer.model.state_dict().items()}


def losses_in(history: list[dict[str, float]]) -> list[float]:
    return [each["loss"] for each in history if "loss" in each]


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=2e-6)


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
    history, weights = trained(kind, tmp_path / "plain")
    assert len(losses_in(history)) == 3
    for found, whole in sw.simulate(2, lambda channel: trained(kind, tmp_path / "plan", PLANS[name], channel)):
        np.testing.assert_allclose(losses_in(found), losses_in(history), rtol=1e-5)
        assert_same_weights(whole, weights)


STAGES: dict[str, tuple[str, sw.Plan, dict[str, Any]]] = {
    "packed": ("sft", PP, {"packing": True}),
    # All of its weights follow on every rank, also those of other stages.
    "a reference that follows": ("dpo", PP, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "with a reference": ("dpo", PP, {}),
    "one microbatch": ("sft", PP, {"k": 1}),
    "one pair": ("dpo", PP, {"k": 1}),
    "answers alone": ("sft", PP, {"assistant_only_loss": True}),
    "prompts too": ("sft", PP, {"completion_only_loss": False}),
    "smoothed": ("sft", PP, {"label_smoothing_factor": 0.1}),
    "dft": ("sft", PP, {"loss_type": "dft"}),
    "checkpoints": ("sft", PP, {"activation_checkpointing": True}),
    "several losses": ("dpo", PP, {"loss_type": ["sigmoid", "sft", "ipo", "bco_pair"], "ld_alpha": 0.5}),
    "weighted": ("dpo", PP, {"use_weighting": True}),
    "adapter": ("sft", PP, {"lora": LORA}),
    "adapter and its base as the reference": ("dpo", PP, {"lora": LORA}),
    "all before": ("sft", sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="fthenb")), {"k": 3}),
    "in turns": ("dpo", sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved", chunks=2)), {"k": 3}),
    "four": ("sft", sw.Plan(mesh=sw.Mesh(pp=4)), {"k": 4}),
    "tp": ("sft", sw.Plan(mesh=sw.Mesh(pp=2, tp=2), tensor=sw.Tensor(rules=LAYERS)), {}),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning")
@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if at < 2 else pytest.mark.stress) for at, name in enumerate(STAGES)],
)
def test_under_stages_all_that_is_logged_is_that_of_plain_trl(name: str, tmp_path: Path) -> None:
    kind, plan, settings = STAGES[name]
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, **settings}
    history, weights = trained(kind, tmp_path / "plain", **evaluated)
    assert len(losses_in(history)) == 3
    assert "eval_entropy" in history[3]
    for found, whole in sw.simulate(
        plan.mesh.size, lambda channel: trained(kind, tmp_path / "plan", plan, channel, **evaluated)
    ):
        assert len(found) == len(history)
        for ours, theirs in zip(found, history, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        assert_same_weights(whole, weights)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("stage", [1, 3])
def test_losses_and_weights_under_stages_of_several_data_ranks(kind: str, stage: int, tmp_path: Path) -> None:
    plan = sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=stage))
    history, weights = trained(kind, tmp_path / "plain", k=4)
    for found, whole in sw.simulate(4, lambda channel: trained(kind, tmp_path / "plan", plan, channel, k=4)):
        np.testing.assert_allclose(losses_in(found), losses_in(history), rtol=1e-5)
        assert found[0]["num_tokens"] == history[0]["num_tokens"]
        assert_same_weights(whole, weights)


@pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning")
@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.stress)])
def test_a_run_under_stages_goes_on_in_plain_trl_and_back(kind: str, tmp_path: Path) -> None:
    def run(name: str, plan: sw.Plan | None = None, channel: sw.Channel | None = None, **settings: Any) -> Any:
        saved = {"save_strategy": "steps", "save_steps": 2}
        return trained(kind, tmp_path / name, plan, channel, **saved, **settings)

    history, weights = run("plain")
    checkpoint = str(tmp_path / "plain" / "checkpoint-2")
    for found, whole in sw.simulate(2, lambda channel: run("plan", PP, channel, resume=checkpoint)):
        assert losses_in(found)[2:] == pytest.approx(losses_in(history)[2:], rel=1e-5)
        assert_same_weights(whole, weights)
    sw.simulate(2, lambda channel: run("plan", PP, channel))
    found, whole = run("again", resume=str(tmp_path / "plan" / "checkpoint-2"))
    assert losses_in(found)[2:] == pytest.approx(losses_in(history)[2:], rel=1e-5)
    assert_same_weights(whole, weights)


@pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning")
@pytest.mark.parametrize(
    "mesh", [sw.Mesh(dp_shard=2), pytest.param(sw.Mesh(pp=2, dp_shard=2), marks=pytest.mark.stress)]
)
def test_ranks_choose_one_best_model_though_each_counts_its_last_batch_alone(mesh: sw.Mesh, tmp_path: Path) -> None:
    def chosen(channel: sw.Channel) -> Any:
        names = ["prompt", "completion"]
        steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        trainer = trainer_class(trl.SFTTrainer)(
            model=causal_language_model().build(),
            args=trl.SFTConfig(
                output_dir=str(tmp_path),
                use_cpu=True,
                bf16=False,
                activation_checkpointing=False,
                max_steps=3,
                learning_rate=3e-2,
                per_device_train_batch_size=2,
                per_device_eval_batch_size=1,
                load_best_model_at_end=True,
                metric_for_best_model="eval_mean_token_accuracy",
                disable_tqdm=True,
                report_to="none",
                **steps,
            ),
            train_dataset=rows(names),
            eval_dataset=rows(names).select(range(3)),
            processing_class=tokenizer(),
            plan=sw.Plan(mesh=mesh),
            channel=channel,
        )
        trainer.train()
        logged = [each["eval_mean_token_accuracy"] for each in trainer.state.log_history if "eval_loss" in each]
        return trainer.state.best_global_step, trainer.state.best_metric, logged

    both = sw.simulate(mesh.size, chosen)
    assert both[0][2].index(max(both[0][2])) != both[1][2].index(max(both[1][2]))
    for step, metric, _ in both:
        assert metric == max(both[0][2])
        assert step == 1 + both[0][2].index(metric)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning")
def test_pairs_with_reference_values_computed_before_train_under_stages(tmp_path: Path) -> None:
    def run(name: str, plan: sw.Plan | None = None, channel: sw.Channel | None = None) -> Any:
        folder = tmp_path / f"rows of {name}"
        if not folder.exists():
            rows(["prompt", "chosen", "rejected"]).save_to_disk(str(folder))
        if channel is not None:
            channel.exchange(b"", purpose="the data set is there")
        settings = {"precompute_ref_log_probs": True, "on_disk": str(folder)}
        return trained("dpo", tmp_path / name, plan, channel, eval_strategy="steps", eval_steps=3, **settings)

    history, weights = run("plain")
    for found, whole in sw.simulate(2, lambda channel: run("plan", PP, channel)):
        assert len(found) == len(history)
        for ours, theirs in zip(found, history, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        assert_same_weights(whole, weights)


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
