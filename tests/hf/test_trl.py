"""The trainers of TRL under a plan, against plain TRL in one process: of given answers, and of answers that they draw.

Where a trainer generates, the plain one has the rows of all data ranks in each microbatch, as TRL gathers them. What is
fixed in both: the draws, which follow from the place of a row among the rows of all ranks.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset

import shardwise as sw
from shardwise.errors import MismatchError, PeerError
from shardwise.hf import trainer_class
from tests.contracts.adapter_cases import refused_on_all
from tests.hf.example_tasks import llama, tokenizer
from tests.hf.tiny_trainers import logged
from tests.refusals import Refusals

pytestmark = [
    # TRL calls transformers by names that end with its version 6.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing[_a-z]*. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning"),
]

LAYERS = {
    f"model.layers.*.{name}": "row" if name in ("self_attn.o_proj", "mlp.down_proj") else "column"
    for name in (
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
    )
}
PLANS = {
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_replicate=2), sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=2)),
    "stage 2 on 3 ranks": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "pp x stage 1": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2)),
    "pp x stage 3": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp x tp": sw.Plan(mesh=sw.Mesh(pp=2, tp=2), tensor=sw.Tensor(rules=LAYERS)),
    # Its head reads the weight of lm_head itself, which stays whole.
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=LAYERS)),
    "stage 3 x tp": sw.Plan(
        mesh=sw.Mesh(dp_shard=2, tp=2), sharding=sw.Sharding(stage=3), tensor=sw.Tensor(rules=LAYERS)
    ),
}
SETTINGS: dict[str, Any] = {
    **{"use_cpu": True, "bf16": False, "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1},
    **{"disable_tqdm": True, "report_to": "none", "learning_rate": 1e-2},
}
"""Of all trainers here."""


def words(numbers: np.random.Generator, most: int) -> str:
    return " ".join(f"w{each}" for each in numbers.integers(0, 29, numbers.integers(2, most)))


def rows(*names: str) -> Dataset:
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


def build() -> Any:
    torch.manual_seed(0)
    return llama()


def as_of(kind: Any, plan: sw.Plan | None, channel: sw.Channel | None) -> Callable[..., Any]:
    """The class of a trainer, plain or under a plan."""
    if plan is None:
        return kind  # type: ignore[no-any-return]
    return lambda **given: trainer_class(kind)(**given, plan=plan, channel=channel)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole weights, on each rank."""
    engine = getattr(trainer, "engine", None)
    with nullcontext() if engine is None else engine.whole(optimizer=False):
        return {name: each.clone() for name, each in trainer.model.state_dict().items()}


# Trainers of given answers --------------------------------------------------------------------------------------------


def of_answers(
    kind: str,
    folder: Path,
    plan: sw.Plan | None = None,
    channel: sw.Channel | None = None,
    *,
    k: int = 2,
    lora: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    num_held_out: int = 5,
    **settings: Any,
) -> Any:
    """A trainer of given answers. k: microbatches of one process."""
    base, config, names = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, ["prompt", "completion"]),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, ["prompt", "chosen", "rejected"]),
    }[kind]
    is_talk = settings.get("assistant_only_loss")
    if dataset is None:
        dataset = talks() if is_talk else rows(*(["text"] if settings.get("packing") else names))
    more: dict[str, Any] = {}
    if lora is not None:
        torch.manual_seed(0)
        more["peft_config"] = peft.LoraConfig(**lora)
    elif kind == "dpo" and not settings.get("precompute_ref_log_probs"):
        more["ref_model"] = reference()
    given = {
        **{"max_steps": 3, "adam_epsilon": 1e-4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
        **{"gradient_accumulation_steps": k // (1 if plan is None else plan.mesh.num_data_ranks), "max_length": 16},
    }
    return as_of(base, plan, channel)(
        model=build(),
        args=config(output_dir=str(folder), **{**SETTINGS, **given, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(num_held_out)),
        processing_class=talking_tokenizer() if is_talk else tokenizer(),
        **more,
    )


def trained(*given: Any, **settings: Any) -> Any:
    """What a trainer of given answers logs, and its weights."""
    trainer = of_answers(*given, **settings)
    trainer.train()
    return logged(trainer), weights_of(trainer)


def reference() -> Any:
    """A model with other weights."""
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


# Trainers of answers that they generate -------------------------------------------------------------------------------


class PlacedDraws(transformers.LogitsProcessor):
    """Gumbel noise by the place of a row and of a token: the largest logit is a draw, equal in every layout."""

    def __init__(self, first_row: int, prompt_length: int) -> None:
        self._first_row = first_row
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._prompt_length
        seeds = [100 * (self._first_row + row) + place for row in range(len(input_ids))]
        draws = [torch.rand(scores.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return scores - (-torch.stack(draws).to(scores.device).log()).log()


def with_adapter() -> Any:
    torch.manual_seed(1)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(build(), adapter)


def referring_to(folder: Path) -> Callable[[], Any]:
    """A model that was read from a folder, which has other weights by now: the reference."""
    reference().save_pretrained(folder)

    def read() -> Any:
        model = build()
        model.config._name_or_path = str(folder)  # where TRL looks for the reference
        return model

    return read


def reward(completions: list[str], prompts: list[str], **_: Any) -> list[float | None]:
    values = [sum(map(ord, prompt + text)) % 7 for prompt, text in zip(prompts, completions, strict=True)]
    # 6: an answer that cannot be scored.
    return [None if value == 6 else float(value) for value in values]


def made(
    folder: Path,
    plan: sw.Plan | None = None,
    channel: sw.Channel | None = None,
    *,
    rows_per_rank: int = 4,
    data_ranks: int = 2,
    num_generations: int = 4,
    build: Callable[[], Any] = build,
    of: Any = (trl.GRPOTrainer, trl.GRPOConfig),
    rewarding: Callable[..., Any] = reward,
    eval_dataset: Dataset | None = None,
    **changed: Any,
) -> Any:
    """A trainer with fixed draws; without a plan, one process with the rows of all data ranks."""
    kind, config = of
    model = build()
    generate = model.generate
    size = rows_per_rank * (data_ranks if plan is None else 1)

    def drawing(**given: Any) -> Any:
        first = trainer.accelerator.process_index * len(given["input_ids"])
        draws = PlacedDraws(first, given["input_ids"].shape[1])
        return generate(**given, logits_processor=transformers.LogitsProcessorList([draws]))

    model.generate = drawing
    settings = {
        **{"max_steps": 2, "adam_epsilon": 1e-3, "per_device_train_batch_size": size},
        **{"per_device_eval_batch_size": size, "num_generations": 2, "max_completion_length": 4},
        **{"generation_kwargs": {"do_sample": False}},
    }
    args = config(output_dir=str(folder), **{**SETTINGS, **settings, **changed})
    # Now, for the arguments of simulated ranks know of one process.
    args.num_generations = num_generations
    trainer = as_of(kind, plan, channel)(
        model=model,
        args=args,
        train_dataset=rows("prompt"),
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        reward_funcs=rewarding,
    )
    return trainer


def outcome(folder: Path, *given: Any, **changed: Any) -> tuple[Any, Any, Any]:
    """What a training logs, its last prompts, answers, rewards and advantages, and its weights."""
    trainer = made(folder, *given, **changed)
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    logs = [
        {name: value for name, value in each.items() if "time" not in name and "second" not in name}
        for each in trainer.state.log_history
    ]
    seen = {name: list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")}
    seen |= {name: list(each) for name, each in trainer._logs["rewards"].items()}
    return logs, seen, weights_of(trainer)


def drawn(folder: Path, plan: str, channel: sw.Channel) -> tuple[list[str], list[list[int]]]:
    """All answers that the model drew, and those of this rank as it trained on them."""
    trainer = made(folder, PLANS[plan], channel, num_generations=4, generation_kwargs={"do_sample": True})
    # No draws of ours.
    del trainer.model.generate
    trainer.train()
    return list(trainer._logs["completion"]), trainer._buffered_inputs[0]["completion_ids"].tolist()


def assert_alike(found: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        is_text = isinstance(values[0], str)
        assert found[1][name] == (values if is_text else pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True)), name
    for name, weight in expected[2].items():
        torch.testing.assert_close(found[2][name], weight, rtol=1e-4, atol=5e-6)


PP = PLANS["pp"]
IN_TURNS = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved", chunks=2))
LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@pytest.fixture(autouse=True)
def _answers_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL shuffles them on each process apart."""
    for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer):
        monkeypatch.setattr(module, "shuffle_sequence_dict", lambda rows: rows)


def first(num: int, names: Iterable[str]) -> list[Any]:
    """All cases; CI runs the first ones."""
    return [pytest.param(name, marks=() if at < num else pytest.mark.stress) for at, name in enumerate(names)]


# Of given answers ---------------------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[str, sw.Plan, dict[str, Any]]] = {
    "packed": ("sft", PP, {"packing": True}),
    # All of its weights follow on every rank, also those of other stages.
    "a reference that follows": ("dpo", PP, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "sft, tp": ("sft", PLANS["tp"], {}),
    "dpo, stage 3": ("dpo", PLANS["stage 3"], {}),
    "answers alone": ("sft", PP, {"assistant_only_loss": True}),
    "dft": ("sft", PP, {"loss_type": "dft"}),
    "several losses": ("dpo", PP, {"loss_type": ["sigmoid", "sft", "ipo", "bco_pair"], "ld_alpha": 0.5}),
    "weighted": ("dpo", PP, {"use_weighting": True}),
    "adapter and its base as the reference": ("dpo", PP, {"lora": LORA}),
    "in turns": ("dpo", IN_TURNS, {"k": 3}),
    "sft, pp x tp": ("sft", PLANS["pp x tp"], {}),
    "dpo, pp x stage 3": ("dpo", PLANS["pp x stage 3"], {"k": 4}),
}


@pytest.mark.parametrize("name", first(4, GIVEN))
def test_losses_figures_and_weights_are_those_of_plain_trl(name: str, tmp_path: Path) -> None:
    kind, plan, settings = GIVEN[name]
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, **settings}
    history, weights = trained(kind, tmp_path / "plain", **evaluated)
    assert len([each for each in history if "loss" in each]) == 3
    # With several data ranks, TRL takes means of ranks for most figures.
    names = None if plan.mesh.num_data_ranks == 1 and plan.mesh.pp > 1 else ("loss", "eval_loss", "num_tokens")
    for found, whole in sw.simulate(
        plan.mesh.size, lambda channel: trained(kind, tmp_path / "plan", plan, channel, **evaluated)
    ):
        kept = [
            [{name: value for name, value in each.items() if names is None or name in names} for each in side]
            for side in (found, history)
        ]
        assert_alike((kept[0], {}, whole), (kept[1], {}, weights))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(sw.Mesh(dp_shard=2), marks=pytest.mark.quick),
        pytest.param(sw.Mesh(pp=2, dp_shard=2), marks=pytest.mark.stress),
    ],
)
def test_ranks_choose_one_best_model_though_each_counts_its_last_batch_alone(mesh: sw.Mesh, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_mean_token_accuracy",
        "learning_rate": 3e-2,
    }
    sizes: dict[str, Any] = {"k": mesh.num_data_ranks, "per_device_eval_batch_size": 1, "num_held_out": 3}

    def chosen(channel: sw.Channel) -> Any:
        trainer = of_answers("sft", tmp_path, sw.Plan(mesh=mesh), channel, **steps, **best, **sizes)
        trainer.train()
        seen = [each["eval_mean_token_accuracy"] for each in trainer.state.log_history if "eval_loss" in each]
        return trainer.state.best_global_step, trainer.state.best_metric, seen

    both = sw.simulate(mesh.size, chosen)
    assert both[0][2].index(max(both[0][2])) != both[1][2].index(max(both[1][2]))
    for step, metric, _ in both:
        assert metric == max(both[0][2])
        assert step == 1 + both[0][2].index(metric)


def test_losses_of_a_packed_evaluation_count_the_rows_of_the_dataset(tmp_path: Path) -> None:
    packed: dict[str, Any] = {"packing": True, "eval_packing": True, "max_length": 8, "num_held_out": 11}

    def evaluated(plan: sw.Plan | None, channel: sw.Channel | None = None) -> float:
        trainer = of_answers("sft", tmp_path, plan, channel, **packed)
        assert len(trainer.eval_dataset) % 2 == 1
        return float(trainer.evaluate()["eval_loss"])

    expected = evaluated(None)
    assert evaluated(sw.Plan()) == expected
    assert sw.simulate(2, partial(evaluated, PLANS["stage 3"])) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("name", ["stage 3", pytest.param("pp", marks=pytest.mark.stress)])
def test_reference_values_computed_before_are_those_of_plain_trl(name: str, tmp_path: Path) -> None:
    def run(plan: sw.Plan | None, channel: sw.Channel | None = None) -> Any:
        # All ranks have one data set, whose folder has what the first one computes.
        folder = tmp_path / ("plain" if plan is None else "plan")
        if not folder.exists():
            rows("prompt", "chosen", "rejected").select(range(13)).save_to_disk(str(folder))
        if channel is not None:
            channel.exchange(b"", purpose="the data set is there")
        settings = {"precompute_ref_log_probs": True, "dataset": Dataset.load_from_disk(str(folder))}
        history, weights = trained("dpo", tmp_path / "of", plan, channel, **settings)
        return [{"loss": each["loss"]} for each in history if "loss" in each], {}, weights

    expected = run(None)
    for found in sw.simulate(2, partial(run, PLANS[name])):
        assert_alike(found, expected)


# Of answers that they generate --------------------------------------------------------------------------------------

ALL_OF_A_LENGTH = {"generation_kwargs": {"do_sample": False, "suppress_tokens": [2]}}
"""Where a loss divides by the tokens of a rank, as TRL has it: no answer ends before its last token."""
FOLLOWS = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
RLOO = (trl.RLOOTrainer, trl.RLOOConfig)
GENERATED: dict[str, tuple[str, dict[str, Any]]] = {
    # A group of answers is cut by the ranks, and the reference follows the weights.
    "a group over ranks": ("stage 3", {"num_generations": 8, "num_iterations": 2, **FOLLOWS}),
    "three ranks share two groups": ("stage 2 on 3 ranks", {"num_generations": 6, "build": with_adapter, "beta": 0.1}),
    "leave one out": ("tp", {"of": RLOO, "num_iterations": 2}),
    "microbatches": ("stage 1", {"rows_per_rank": 2, "gradient_accumulation_steps": 2, "num_generations": 2}),
    "microbatches of stages": ("pp", {"gradient_accumulation_steps": 2, **FOLLOWS}),
    # Whole groups in every round: the last one of 20 answers has 4, and each rank 2 of them.
    "an evaluation": ("stage 3", {"eval_dataset": rows("prompt").select(range(4)), "max_steps": 1}),
    **{
        loss: (plan, {"loss_type": loss, "num_iterations": 2, **(ALL_OF_A_LENGTH if loss == "bnpo" else {})})
        for loss, plan in {
            **{"grpo": "stage 0", "bnpo": "stage 3", "dr_grpo": "tp", "sapo": "stage 3 x tp"},
            **{"luspo": "stage 2 on 3 ranks"},
        }.items()
    },
    "scaled by the batch": ("stage 3", {"scale_rewards": "batch"}),
    "not scaled": ("stage 3 x tp", {"scale_rewards": "none", "mask_truncated_completions": True}),
    "a bonus for entropy": ("stage 3", {"entropy_coef": 0.1, **ALL_OF_A_LENGTH}),
    "gathered for each call": ("stage 3", {"ds3_gather_for_generation": False}),
    "an evaluation of stages": (
        "pp",
        {"beta": 0.1, "num_iterations": 2, "eval_dataset": rows("prompt").select(range(4))},
    ),
    "leave one out of stages": ("pp", {"of": RLOO, "num_iterations": 2, "beta": 0.1, "gradient_accumulation_steps": 2}),
    "stages, cut and gathered": ("pp x stage 3", {"beta": 0.1, "num_iterations": 2, "num_generations": 8}),
    "stages cut by tp": ("pp x tp", {"gradient_accumulation_steps": 2, "build": with_adapter, "beta": 0.1}),
    "checkpointed stages": (
        "pp",
        {"activation_checkpointing": True, "top_entropy_quantile": 0.5, "loss_type": "cispo"},
    ),
}


@pytest.mark.parametrize("name", first(6, GENERATED))
def test_answers_advantages_metrics_and_weights_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    plan, settings = GENERATED[name]
    ranks = PLANS[plan].mesh.num_data_ranks
    settings = {"data_ranks": ranks, "build": referring_to(tmp_path / "reference"), **settings}
    expected = outcome(tmp_path / "plain", **settings)
    assert any(each.get("grad_norm", 0) > 0.01 for each in expected[0])
    for found in sw.simulate(
        PLANS[plan].mesh.size, lambda channel: outcome(tmp_path / "plan", PLANS[plan], channel, **settings)
    ):
        assert_alike(found, expected)


def test_one_rank_has_the_bits_of_plain_trl(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data_ranks": 1, "num_iterations": 2, "gradient_accumulation_steps": 2}
    found, expected = (outcome(tmp_path, plan, None, **settings) for plan in (sw.Plan(), None))
    assert found[0] == expected[0]
    assert any(each.get("loss") for each in found[0])


@pytest.mark.parametrize("name", ["tp", pytest.param("pp", marks=pytest.mark.stress)])
def test_ranks_of_one_data_rank_take_the_rewards_of_the_first(name: str, tmp_path: Path) -> None:
    def run(plan: sw.Plan | None, channel: sw.Channel | None = None) -> Any:
        def rewarding(completions: list[str], **_: Any) -> list[float]:
            own = 0 if channel is None else channel.rank
            return [float((at + own) % 3) for at in range(len(completions))]

        return outcome(tmp_path, plan, channel, data_ranks=1, rewarding=rewarding)

    expected = run(None)
    for found in sw.simulate(2, partial(run, PLANS[name])):
        assert_alike(found, expected)


def test_a_reward_that_fails_on_one_rank_stops_all(tmp_path: Path) -> None:
    stopped = []

    def run(channel: sw.Channel) -> None:
        def failing(completions: list[str], **_: Any) -> list[float]:
            if channel.rank == 1:
                raise ValueError("no judge answers")
            return [1.0] * len(completions)

        try:
            outcome(tmp_path, PLANS["stage 3"], channel, rewarding=failing)
        except PeerError as error:
            stopped.append(str(error))
            raise

    with pytest.raises(ValueError, match="no judge answers"):
        sw.simulate(2, run)
    assert "ValueError in what a trainer generates: no judge answers" in stopped[0]


@pytest.mark.parametrize(
    ("plan", "first"),
    [("stage 3 x tp", (0, 0, 2, 2)), pytest.param("pp x stage 1", (0, 1, 0, 1), marks=pytest.mark.stress)],
)
def test_answers_drawn_by_the_model_are_alike_but_over_data_ranks(
    plan: str, first: tuple[int, ...], tmp_path: Path
) -> None:
    both = sw.simulate(4, lambda channel: drawn(tmp_path, plan, channel))
    assert all(each[0] == both[0][0] for each in both)
    assert [each[1] for each in both] == [both[at][1] for at in first]
    assert len({str(each[1]) for each in both}) == 2


class WithTools(trl.GRPOTrainer):
    def create_accelerator_and_postprocess(self) -> None:
        self.tools = [print]  # as TRL sets them before the trainer is made
        super().create_accelerator_and_postprocess()


def refused(plan: sw.Plan, folder: Path, **changed: Any) -> None:
    refused_on_all(plan, lambda channel: made(folder, plan, channel, **changed))


REFUSED = Refusals(
    "hf.trl",
    {
        "groups that answers do not fill": lambda folder: refused(PLANS["stage 1"], folder, num_generations=3),
        "continuous batching": lambda folder: refused(
            PLANS["stage 1"], folder, use_transformers_continuous_batching=True
        ),
        "tools": lambda folder: refused(PLANS["stage 3"], folder, of=(WithTools, trl.GRPOConfig)),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_trains(case: str) -> None:
    REFUSED.check(case)


def test_a_head_that_is_cut_is_found_though_the_first_losses_are_alike(tmp_path: Path) -> None:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto"))
    with pytest.raises(MismatchError, match=r"Leave lm_head whole, by tensor.rules for the layers alone"):
        sw.simulate(2, lambda channel: outcome(tmp_path, plan, channel))
